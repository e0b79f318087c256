// Refuses a task that would read or write outside its arrays, before anything is written.
#include <algorithm>
#include <cmath>

#include "attention_task.h"

namespace mol {
namespace {

bool has_valid_scalars(const mol_attention_task& task) {
  if (task.kv_cache == nullptr || task.num_blocks < 1 || task.block_size < 1) return false;
  if (task.num_tokens < 0 || task.num_seqs < 0) return false;
  if (task.num_kv_heads < 1 || task.num_heads < 1 || task.num_heads % task.num_kv_heads != 0) return false;
  if (task.head_dim < 8 || task.head_dim > kMaxHeadDim || task.head_dim % 8 != 0) return false;
  if (task.dtype < MOL_FLOAT32 || task.dtype > MOL_FLOAT16) return false;
  if (task.cache_dtype != task.dtype && !is_quantised(task.cache_dtype)) return false;
  if (task.isa < MOL_ISA_AUTO || task.isa > MOL_ISA_AVX512VNNI) return false;
  if (task.sliding_window < 0 || !std::isfinite(task.scale)) return false;
  return std::isfinite(task.soft_cap) && task.soft_cap >= 0.0f;
}

bool has_valid_append(const mol_attention_task& task) {
  if (task.num_tokens == 0) return true;  // tensors without elements come as null pointers
  const int64_t row = static_cast<int64_t>(task.num_kv_heads) * task.head_dim;
  if (task.key == nullptr || task.value == nullptr || task.slot_mapping == nullptr) return false;
  if (task.key_token_stride < row || task.value_token_stride < row) return false;
  const int64_t num_slots = task.num_blocks * task.block_size;
  return std::all_of(task.slot_mapping, task.slot_mapping + task.num_tokens,
                     [=](int64_t slot) { return slot < num_slots; });
}

// Every block that some query reads must exist. Blocks before the window are not read: a cache may have freed them.
bool has_valid_blocks(const mol_attention_task& task, int32_t seq, int32_t query_len) {
  const int64_t seq_len = task.seq_lens[seq];
  int64_t begin = 0;
  if (task.sliding_window > 0) begin = std::max<int64_t>(0, seq_len - query_len + 1 - task.sliding_window);
  const int64_t end_block = (seq_len + task.block_size - 1) / task.block_size;
  if (end_block > task.block_table_stride) return false;
  const int32_t* blocks = task.block_table + seq * task.block_table_stride;
  return std::all_of(blocks + begin / task.block_size, blocks + end_block,
                     [&](int32_t block) { return block >= 0 && block < task.num_blocks; });
}

bool has_valid_attend(const mol_attention_task& task) {
  if (task.num_tokens == 0) return true;
  const int64_t row = static_cast<int64_t>(task.num_heads) * task.head_dim;
  if (task.query == nullptr || task.output == nullptr || task.query_start == nullptr) return false;
  if (task.query_token_stride < row || task.output_token_stride < row) return false;
  if (task.num_seqs > 0 && (task.block_table == nullptr || task.seq_lens == nullptr)) return false;
  if (task.query_start[0] < 0 || task.query_start[task.num_seqs] > task.num_tokens) return false;
  for (int32_t seq = 0; seq < task.num_seqs; ++seq) {
    const int32_t seq_len = task.seq_lens[seq];
    // Before the difference: of any two numbers it may not fit.
    if (task.query_start[seq + 1] < task.query_start[seq] || seq_len < 0) return false;
    const int32_t query_len = task.query_start[seq + 1] - task.query_start[seq];
    if (query_len == 0 || seq_len == 0) continue;
    if (seq_len < query_len || !has_valid_blocks(task, seq, query_len)) return false;
  }
  return true;
}

}  // namespace

bool is_valid(const mol_attention_task& task) {
  if (!has_valid_scalars(task)) return false;
  return (!task.append || has_valid_append(task)) && (!task.attend || has_valid_attend(task));
}

}  // namespace mol
