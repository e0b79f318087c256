// What the parts of the expert FFN agree on: the planner (ffn_plan.cpp), the kernels of each instruction set
// (ffn_kernel.h) and the dispatcher (ffn.cpp).
//
// Letters: T tokens, K choices of each (top_k), E experts, H hidden size, I intermediate size. A slot is one (token,
// choice) pair that is computed here; slots are ordered by expert.
#pragma once
#include <stdint.h>

#include "elements.h"
#include "moe_lightning.h"

namespace mol {

constexpr int kMaxBlockTokens = 16;
constexpr int kMaxPieceRows = 128;
// Rows of a piece that several blocks of tokens read in turn from the cache, instead of from memory each.
constexpr int kRowsPerPass = 32;

// Some tokens of one expert, multiplied together with each of its weights.
struct FfnBlock {
  int32_t expert, num_tokens;
  int64_t first_slot;
};
struct FfnExpert {
  int32_t expert, num_blocks;
  int64_t first_block;
};

// Operands: the tokens' rows in the order and format in which a kernel multiplies them, see ffn_kernel.h.
struct FfnPlan {
  const mol_expert_ffn_task* task;
  const FfnBlock* blocks;    // [num_blocks]
  const FfnExpert* experts;  // [num_experts] those with tokens
  int64_t num_blocks, num_experts;
  const int32_t* slot_tokens;                         // [num_slots]
  const int64_t* token_slots;                         // [T, K]; negative: not computed here
  int64_t hidden_operand_bytes, inner_operand_bytes;  // of a slot
  char* hidden_operands;                              // [num_slots, H]
  char* inner_operands;                               // [num_slots, I]
  float* slot_outputs;                                // [num_slots, H]
  int32_t gate_up_rows, down_rows;                    // of I and of H in a piece
  int32_t num_threads;
};

// The memory of one thread. The stride puts the tokens' rows in different sets of the cache.
struct alignas(64) FfnScratch {
  static constexpr int kStride = kMaxPieceRows + 16;
  float gate[kMaxBlockTokens * kStride];  // also the output of w2
  float up[kMaxBlockTokens * kStride];
};

struct FfnKernel {
  // Bytes of the operand of one token with so many columns.
  int64_t (*operand_bytes)(int64_t num_columns) = nullptr;
  // Hidden states to operands, for one block.
  void (*gather)(const FfnPlan& plan, int64_t block) = nullptr;
  // Piece of w13: act(gate) * up to operands.
  void (*gate_up)(const FfnPlan& plan, int64_t piece, FfnScratch& scratch) = nullptr;
  // Piece of w2: to slot_outputs.
  void (*down)(const FfnPlan& plan, int64_t piece, FfnScratch& scratch) = nullptr;
  // The weighted sum of a token's slots, to the task's output.
  void (*combine)(const FfnPlan& plan, int64_t token) = nullptr;
};
// For a MOL_* dtype; empty if this instruction set is not compiled in.
FfnKernel ffn_kernel_scalar(int32_t dtype);
FfnKernel ffn_kernel_avx2(int32_t dtype);
FfnKernel ffn_kernel_avx512(int32_t dtype);
FfnKernel ffn_kernel_avx512bf16(int32_t dtype);

}  // namespace mol
