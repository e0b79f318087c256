// mol_expert_ffn: checks the task, then gathers the tokens of each expert, multiplies with w13, with w2, and adds up.
// Decides what runs where (instruction set, threads); the pieces of work are ffn_plan.cpp's, their arithmetic
// ffn_kernel.h's.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <new>

#include "ffn_plan.h"
#include "pool.h"

namespace mol {
namespace {

bool is_size(int32_t size) { return size >= 8 && size % 8 == 0; }

bool is_valid(const mol_expert_ffn_task& task) {
  if (task.num_tokens < 0 || task.top_k < 1 || task.num_experts < 1 || task.max_tokens_per_expert < 0) return false;
  if (!is_size(task.hidden_size) || !is_size(task.intermediate_size)) return false;
  if (task.dtype < MOL_FLOAT32 || task.dtype > MOL_FLOAT16) return false;
  if (task.isa < MOL_ISA_AUTO || task.isa > MOL_ISA_AVX512VNNI) return false;
  if (!std::isfinite(task.gate_alpha) || !std::isfinite(task.up_offset) || !(task.clamp_limit > 0.0f)) return false;
  if (task.w13 == nullptr || task.w2 == nullptr) return false;
  if (task.num_tokens == 0) return true;  // tensors without elements come as null pointers
  if (task.hidden == nullptr || task.output == nullptr) return false;
  if (task.topk_ids == nullptr || task.topk_weights == nullptr) return false;
  if (task.hidden_token_stride < task.hidden_size || task.output_token_stride < task.hidden_size) return false;
  const int64_t num_choices = static_cast<int64_t>(task.num_tokens) * task.top_k;
  return std::all_of(task.topk_ids, task.topk_ids + num_choices, [&](int32_t id) { return id < task.num_experts; });
}

// Empty: not available here. AUTO never means scalar: a kernel that much slower must be asked for by name.
FfnKernel kernel_for(const mol_expert_ffn_task& task) {
  if (!mol_isa_available(task.isa)) return {};
  switch (task.isa == MOL_ISA_AUTO ? mol_best_isa(task.dtype) : task.isa) {
    case MOL_ISA_SCALAR:
      return ffn_kernel_scalar(task.dtype);
    case MOL_ISA_AVX2:
      return ffn_kernel_avx2(task.dtype);
    case MOL_ISA_AVX512:
    case MOL_ISA_AVX512VNNI:  // nothing in it is made of 8-bit integers
      return ffn_kernel_avx512(task.dtype);
    default:
      return ffn_kernel_avx512bf16(task.dtype);
  }
}

int32_t run(const mol_expert_ffn_task& task, const FfnKernel& kernel) {
  thread_local FfnWorkspace workspace;
  const FfnPlan plan = workspace.plan(task, kernel, task.pool == nullptr ? 1 : task.pool->num_threads());
  std::atomic<bool> lacks_memory{false};
  auto run_rows = [&](auto piece_kernel, int64_t rows, int64_t rows_per_piece) {
    auto body = [&](int64_t piece) {
      FfnScratch* scratch = own_scratch<FfnScratch>();
      if (scratch == nullptr) {
        lacks_memory = true;
      } else {
        piece_kernel(plan, piece, *scratch);
      }
    };
    run_pieces(task.pool, plan.num_experts * ((rows + rows_per_piece - 1) / rows_per_piece), body);
  };
  auto gather = [&](int64_t block) { kernel.gather(plan, block); };
  auto combine = [&](int64_t token) { kernel.combine(plan, token); };
  // Each ends in a barrier.
  run_pieces(task.pool, plan.num_blocks, gather);
  run_rows(kernel.gate_up, task.intermediate_size, plan.gate_up_rows);
  run_rows(kernel.down, task.hidden_size, plan.down_rows);
  if (lacks_memory) return MOL_ERROR_OUT_OF_MEMORY;
  run_pieces(task.pool, task.num_tokens, combine);
  return MOL_OK;
}

}  // namespace
}  // namespace mol

int32_t mol_expert_ffn(const void* argument) {
  if (argument == nullptr) return MOL_ERROR_BAD_ARGUMENT;
  const mol_expert_ffn_task& task = *static_cast<const mol_expert_ffn_task*>(argument);
  // All checks come before the first write: a refused task leaves the output as it was.
  if (!mol::is_valid(task)) return MOL_ERROR_BAD_ARGUMENT;
  const mol::FfnKernel kernel = mol::kernel_for(task);
  if (kernel.gather == nullptr) return MOL_ERROR_UNSUPPORTED_ISA;
  try {
    return task.num_tokens == 0 ? static_cast<int32_t>(MOL_OK) : mol::run(task, kernel);
  } catch (const std::bad_alloc&) {
    return MOL_ERROR_OUT_OF_MEMORY;
  }
}
