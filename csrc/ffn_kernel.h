// The expert FFN for any instruction set: a template over Vec, the vector operations of one (scalar_vec.h has the
// plainest ones), and W, the element type of weights and tokens.
//
// The bits of a token's result depend on the number of its expert's tokens (it decides on chunks and tiles), on nothing
// else: not on threads, pieces or the other tokens.
#pragma once
#include "ffn_multiply.h"
#include "vec_math.h"

namespace mol {

template <class Vec, class W>
class FfnPieceKernel {
 public:
  static int64_t operand_bytes(int64_t num_columns) {
    return Tokens::padded(num_columns) * static_cast<int64_t>(sizeof(X));
  }

  static void gather(const FfnPlan& plan, int64_t index) {
    const FfnBlock& block = plan.blocks[index];
    const mol_expert_ffn_task& task = *plan.task;
    const Tokens tokens = hidden_tokens(plan, block);
    for (int t = 0; t < block.num_tokens; ++t) {
      const int64_t token = plan.slot_tokens[block.first_slot + t];
      const W* row = static_cast<const W*>(task.hidden) + token * task.hidden_token_stride;
      tokens.for_steps(t, 0, task.hidden_size, [&](int64_t column, X* target) {
        Op::pack(row + column, smaller(kStep, task.hidden_size - column), target);
      });
    }
  }

  static void gate_up(const FfnPlan& plan, int64_t index, FfnScratch& scratch) {
    const mol_expert_ffn_task& task = *plan.task;
    const Piece piece(plan, index, task.intermediate_size, plan.gate_up_rows);
    const Piece following(plan, index + plan.num_threads, task.intermediate_size, plan.gate_up_rows);
    const Weights weights = gate_up_weights(task, piece.expert->expert);
    const W* next = gate_up_weights(task, following.expert->expert).gate + following.begin * weights.row_stride;
    for (int64_t row = piece.begin; row < piece.end; row += piece.rows_per_pass()) {
      const int num_rows = smaller(piece.rows_per_pass(), piece.end - row);
      const Rows gate = {weights.gate + row * weights.row_stride, weights.row_stride, num_rows};
      const Rows up = {weights.up + row * weights.row_stride, weights.row_stride, num_rows};
      for (int b = 0; b < piece.expert->num_blocks; ++b) {
        const FfnBlock& block = plan.blocks[piece.expert->first_block + b];
        const Tokens tokens = hidden_tokens(plan, block);
        FfnMultiply<Vec, W>::multiply(gate, up.first, tokens, scratch.gate);
        FfnMultiply<Vec, W>::multiply(up, next, tokens, scratch.up);
        add_bias(weights.gate_bias, weights.bias_stride, row, num_rows, block.num_tokens, scratch.gate);
        add_bias(weights.up_bias, weights.bias_stride, row, num_rows, block.num_tokens, scratch.up);
        activate(plan, block, row, num_rows, scratch);
      }
    }
  }

  static void down(const FfnPlan& plan, int64_t index, FfnScratch& scratch) {
    const mol_expert_ffn_task& task = *plan.task;
    const Piece piece(plan, index, task.hidden_size, plan.down_rows);
    const Piece following(plan, index + plan.num_threads, task.hidden_size, plan.down_rows);
    const int64_t stride = task.intermediate_size;
    const W* weights = down_weights(task, piece.expert->expert);
    const W* next = down_weights(task, following.expert->expert) + following.begin * stride;
    const float* bias = task.w2_bias ? task.w2_bias + piece.expert->expert * task.hidden_size : nullptr;
    for (int64_t row = piece.begin; row < piece.end; row += piece.rows_per_pass()) {
      const int num_rows = smaller(piece.rows_per_pass(), piece.end - row);
      for (int b = 0; b < piece.expert->num_blocks; ++b) {
        const FfnBlock& block = plan.blocks[piece.expert->first_block + b];
        const Rows rows = {weights + row * stride, stride, num_rows};
        FfnMultiply<Vec, W>::multiply(rows, next, inner_tokens(plan, block), scratch.gate);
        add_bias(bias, 1, row, num_rows, block.num_tokens, scratch.gate);
        for (int t = 0; t < block.num_tokens; ++t) {
          float* target = plan.slot_outputs + (block.first_slot + t) * task.hidden_size + row;
          __builtin_memcpy(target, scratch.gate + t * FfnScratch::kStride, num_rows * sizeof(float));
        }
      }
    }
  }

  static void combine(const FfnPlan& plan, int64_t token) {
    const mol_expert_ffn_task& task = *plan.task;
    W* target = static_cast<W*>(task.output) + token * task.output_token_stride;
    const float* addend = task.addend ? task.addend + token * task.hidden_size : nullptr;
    for (int64_t column = 0; column < task.hidden_size; column += kStep) {
      const int num_columns = smaller(kStep, task.hidden_size - column);
      alignas(64) float ends[kStep] = {};
      V a = Vec::set(0.0f), b = Vec::set(0.0f);
      if (addend) load_floats(addend + column, num_columns, ends, a, b);
      for (int k = 0; k < task.top_k; ++k) {
        const int64_t slot = plan.token_slots[token * task.top_k + k];
        if (slot < 0) continue;
        const V weight = Vec::set(task.topk_weights[token * task.top_k + k]);
        V x, y;
        load_floats(plan.slot_outputs + slot * task.hidden_size + column, num_columns, ends, x, y);
        a = Vec::fma(weight, x, a), b = Vec::fma(weight, y, b);
      }
      if (Vec::template kIsInterleaved<W>) Vec::deinterleave(a, b);
      if (num_columns == kStep) {
        Vec::store_pair(target + column, a, b);
      } else {
        Vec::store_part(target + column, num_columns, a, b);
      }
    }
  }

 private:
  using Op = Operand<Vec, W>;
  using Tokens = FfnTokens<Vec, W>;
  using Rows = FfnRows<W>;
  using V = typename Vec::V;
  using X = typename Op::X;
  static constexpr int kLanes = Vec::kLanes, kStep = Op::kStep;
  static_assert(kRowsPerPass % kStep == 0);

  static Tokens hidden_tokens(const FfnPlan& plan, const FfnBlock& block) {
    char* first = plan.hidden_operands + block.first_slot * plan.hidden_operand_bytes;
    return Tokens(reinterpret_cast<X*>(first), block.num_tokens, plan.task->hidden_size);
  }
  static Tokens inner_tokens(const FfnPlan& plan, const FfnBlock& block) {
    char* first = plan.inner_operands + block.first_slot * plan.inner_operand_bytes;
    return Tokens(reinterpret_cast<X*>(first), block.num_tokens, plan.task->intermediate_size);
  }

  // ---------------------------------------------------------------- weights

  // Piece `index` of all experts' rows. Past the last piece it is the last one: there is nothing better to prefetch.
  struct Piece {
    const FfnExpert* expert;
    int64_t begin, end;  // rows

    Piece(const FfnPlan& plan, int64_t index, int64_t num_rows, int64_t rows_per_piece) {
      const int64_t pieces_per_expert = (num_rows + rows_per_piece - 1) / rows_per_piece;
      index = index < plan.num_experts * pieces_per_expert ? index : plan.num_experts * pieces_per_expert - 1;
      expert = plan.experts + index / pieces_per_expert;
      begin = index % pieces_per_expert * rows_per_piece;
      end = begin + smaller(rows_per_piece, num_rows - begin);
    }
    int rows_per_pass() const { return expert->num_blocks > 1 ? kRowsPerPass : static_cast<int>(end - begin); }
  };

  struct Weights {
    const W *gate, *up;
    const float *gate_bias, *up_bias;
    int64_t row_stride, bias_stride;
  };
  static Weights gate_up_weights(const mol_expert_ffn_task& task, int64_t expert) {
    const int64_t size = task.intermediate_size, width = task.hidden_size;
    const int64_t up_row = task.interleaved ? 1 : size, step = task.interleaved ? 2 : 1;
    const W* gate = static_cast<const W*>(task.w13) + expert * 2 * size * width;
    const float* bias = task.w13_bias ? task.w13_bias + expert * 2 * size : nullptr;
    return {gate, gate + up_row * width, bias, bias ? bias + up_row : nullptr, step * width, step};
  }
  static const W* down_weights(const mol_expert_ffn_task& task, int64_t expert) {
    return static_cast<const W*>(task.w2) + expert * task.hidden_size * task.intermediate_size;
  }

  // ---------------------------------------------------------------- between the products

  static void add_bias(const float* bias, int64_t stride, int64_t first_row, int num_rows, int num_tokens, float* out) {
    if (bias == nullptr) return;
    for (int t = 0; t < num_tokens; ++t) {
      for (int row = 0; row < num_rows; ++row) out[t * FfnScratch::kStride + row] += bias[(first_row + row) * stride];
    }
  }

  // act(gate) * up, rounded to W, to the operands of w2.
  static void activate(const FfnPlan& plan, const FfnBlock& block, int64_t first_row, int num_rows,
                       const FfnScratch& scratch) {
    const Tokens tokens = inner_tokens(plan, block);
    for (int t = 0; t < block.num_tokens; ++t) {
      const float* gate = scratch.gate + t * FfnScratch::kStride - first_row;
      const float* up = scratch.up + t * FfnScratch::kStride - first_row;
      tokens.for_steps(t, first_row, first_row + num_rows, [&](int64_t column, X* target) {
        V a = gated(*plan.task, Vec::load(gate + column), Vec::load(up + column));
        V b = gated(*plan.task, Vec::load(gate + column + kLanes), Vec::load(up + column + kLanes));
        if (Vec::template kIsInterleaved<W>) Vec::deinterleave(a, b);
        W rounded[kStep];
        Vec::store_pair(rounded, a, b);
        Op::pack(rounded, smaller(kStep, first_row + num_rows - column), target);
      });
    }
  }

  // gate * sigmoid(alpha * gate) * (up + offset), both clamped first. Clamps let NaN through.
  static V gated(const mol_expert_ffn_task& task, V gate, V up) {
    const V zero = Vec::set(0.0f), one = Vec::set(1.0f);
    if (task.clamp_limit < __builtin_inff()) {
      const V lowest = Vec::set(-task.clamp_limit);
      gate = Vec::sub(zero, Vec::max(lowest, Vec::sub(zero, gate)));
      up = Vec::max(lowest, Vec::sub(zero, Vec::max(lowest, Vec::sub(zero, up))));
    }
    const V z = Vec::mul(gate, Vec::set(task.gate_alpha));
    // 1 / (1 + e) for z >= 0, else e / (1 + e), with e = exp(-|z|), which can't overflow.
    const V e = exp_not_above_0<Vec>(Vec::sub(zero, Vec::abs(z)));
    const V numerator = Vec::add(Vec::zero_if_less(z, zero, Vec::sub(one, e)), e);
    const V sigmoid = Vec::div(numerator, Vec::add(one, e));
    return Vec::mul(Vec::mul(gate, sigmoid), Vec::add(up, Vec::set(task.up_offset)));
  }

  // kStep floats in their order, of which num_columns may be read.
  static void load_floats(const float* source, int num_columns, float (&ends)[kStep], V& a, V& b) {
    if (num_columns < kStep) {
      __builtin_memcpy(ends, source, num_columns * sizeof(float));
      source = ends;
    }
    a = Vec::load(source), b = Vec::load(source + kLanes);
  }
};

template <class Vec, class W>
FfnKernel ffn_piece_kernel() {
  using Kernel = FfnPieceKernel<Vec, W>;
  return {Kernel::operand_bytes, Kernel::gather, Kernel::gate_up, Kernel::down, Kernel::combine};
}

template <class Vec>
FfnKernel ffn_kernel_for(int32_t dtype) {
  switch (dtype) {
    case MOL_FLOAT32:
      return ffn_piece_kernel<Vec, float>();
    case MOL_BFLOAT16:
      return ffn_piece_kernel<Vec, BFloat16>();
    case MOL_FLOAT16:
      return ffn_piece_kernel<Vec, Float16>();
    default:
      return {};
  }
}

}  // namespace mol
