#include "ffn_plan.h"

#include <algorithm>
#include <new>

namespace mol {
namespace {

constexpr std::align_val_t kAlignment{64};
constexpr int kPiecesPerThread = 8;

int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows of a piece: multiples of kRowsPerPass, as many as make long runs for the memory, fewer where there are not
// enough for all threads.
int32_t piece_rows(int64_t all_rows, int num_threads) {
  const int64_t rows = divided_up(all_rows, kPiecesPerThread * num_threads) / kRowsPerPass * kRowsPerPass;
  return static_cast<int32_t>(std::clamp<int64_t>(rows, kRowsPerPass, kMaxPieceRows));
}

}  // namespace

void FfnWorkspace::Free::operator()(char* memory) const { ::operator delete[](memory, kAlignment); }

char* FfnWorkspace::reserve(size_t num_bytes) {
  if (num_bytes > num_bytes_) {
    memory_.reset();
    num_bytes_ = 0;
    memory_.reset(static_cast<char*>(::operator new[](num_bytes, kAlignment)));
    num_bytes_ = num_bytes;
  }
  return memory_.get();
}

// Counting sort of the (token, choice) pairs by expert.
void FfnWorkspace::find_slots(const mol_expert_ffn_task& task) {
  const int64_t num_choices = static_cast<int64_t>(task.num_tokens) * task.top_k;
  expert_slots_.assign(task.num_experts, 0);
  for (int64_t i = 0; i < num_choices; ++i) {
    if (task.topk_ids[i] >= 0) ++expert_slots_[task.topk_ids[i]];
  }
  blocks_.clear();
  experts_.clear();
  int64_t num_slots = 0;
  for (int32_t expert = 0; expert < task.num_experts; ++expert) {
    const int64_t num_tokens = expert_slots_[expert];
    const bool is_left_out = task.max_tokens_per_expert > 0 && num_tokens > task.max_tokens_per_expert;
    expert_slots_[expert] = is_left_out ? -1 : num_slots;
    if (is_left_out || num_tokens == 0) continue;
    const int64_t num_blocks = divided_up(num_tokens, kMaxBlockTokens);
    experts_.push_back({expert, static_cast<int32_t>(num_blocks), static_cast<int64_t>(blocks_.size())});
    for (int64_t b = 0; b < num_blocks; ++b) {
      const int64_t begin = num_tokens * b / num_blocks, end = num_tokens * (b + 1) / num_blocks;
      blocks_.push_back({expert, static_cast<int32_t>(end - begin), num_slots + begin});
    }
    num_slots += num_tokens;
  }
  token_slots_.resize(num_choices);
  slot_tokens_.resize(num_slots);
  for (int64_t i = 0; i < num_choices; ++i) {
    const int32_t expert = task.topk_ids[i];
    token_slots_[i] = expert < 0 || expert_slots_[expert] < 0 ? -1 : expert_slots_[expert]++;
    if (token_slots_[i] >= 0) slot_tokens_[token_slots_[i]] = static_cast<int32_t>(i / task.top_k);
  }
}

FfnPlan FfnWorkspace::plan(const mol_expert_ffn_task& task, const FfnKernel& kernel, int num_threads) {
  find_slots(task);
  FfnPlan plan = {};
  plan.task = &task;
  plan.blocks = blocks_.data();
  plan.experts = experts_.data();
  plan.num_blocks = static_cast<int64_t>(blocks_.size());
  plan.num_experts = static_cast<int64_t>(experts_.size());
  plan.slot_tokens = slot_tokens_.data();
  plan.token_slots = token_slots_.data();
  plan.hidden_operand_bytes = kernel.operand_bytes(task.hidden_size);
  plan.inner_operand_bytes = kernel.operand_bytes(task.intermediate_size);

  const int64_t num_slots = static_cast<int64_t>(slot_tokens_.size());
  const int64_t hidden_bytes = num_slots * plan.hidden_operand_bytes;
  const int64_t inner_bytes = num_slots * plan.inner_operand_bytes;
  const int64_t output_bytes = num_slots * task.hidden_size * static_cast<int64_t>(sizeof(float));
  char* memory = reserve(hidden_bytes + inner_bytes + output_bytes);
  plan.hidden_operands = memory;
  plan.inner_operands = memory + hidden_bytes;
  plan.slot_outputs = reinterpret_cast<float*>(memory + hidden_bytes + inner_bytes);

  plan.gate_up_rows = piece_rows(plan.num_experts * task.intermediate_size, num_threads);
  plan.down_rows = piece_rows(plan.num_experts * task.hidden_size, num_threads);
  plan.num_threads = num_threads;
  return plan;
}

}  // namespace mol
