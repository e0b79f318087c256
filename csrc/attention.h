// What the parts of attention agree on: the planner (attention_plan.cpp), the kernels of each instruction set
// (attention_kernel.h) and the dispatcher (attention.cpp).
#pragma once
#include <stdint.h>

#include "elements.h"
#include "moe_lightning.h"

namespace mol {

constexpr int kMaxHeadDim = 256;
// Keys whose logits, softmax and values are done together; also the unit of prefetching. 32 keys of 128 dims are 16 KB
// of K and V in 16 bits, so that a chunk and the next one share L1 (32 KB and more). Longer chunks leave the memory
// idle during the softmax, shorter ones reduce and rescale too often.
constexpr int kKeysPerChunk = 32;
constexpr int kMaxRows = 64;  // enough to convert and stream each K/V row once per 64 rows of prefill
// From this many rows of a key/value head on, V (and K, where its dot product needs it) is widened once per chunk.
constexpr int kMinRowsToConvert = 16;
constexpr int kScoreStride = kKeysPerChunk + 16;  // a last step may write some scores too many
// A context is summed up in segments of about this many keys, whatever the number of threads, so that handing segments
// to several threads changes no bit. Joining two costs about as much as three keys.
constexpr int64_t kKeysPerSegment = 1024;

// Bytes of one key/value head in one block: K of all tokens, V of all tokens, then for a quantised cache the tokens'
// K scales and V scales in fp32.
static inline int64_t cache_element_bytes(int32_t cache_dtype) {
  return cache_dtype == MOL_FLOAT32 ? 4 : cache_dtype == MOL_BFLOAT16 || cache_dtype == MOL_FLOAT16 ? 2 : 1;
}
static inline bool is_quantised(int32_t cache_dtype) { return cache_dtype == MOL_INT8 || cache_dtype == MOL_FP8_E4M3; }
static inline int64_t head_block_bytes(const mol_attention_task& task) {
  const int64_t token_bytes = task.head_dim * cache_element_bytes(task.cache_dtype);
  return 2 * task.block_size * (token_bytes + (is_quantised(task.cache_dtype) ? 4 : 0));
}
static inline int64_t segment_keys(const mol_attention_task& task) {
  const int64_t blocks = kKeysPerSegment / task.block_size;
  return (blocks > 0 ? blocks : 1) * task.block_size;
}

// Some query tokens of one sequence, some of its key/value heads, some of the query heads of each of these, and some
// segments of its context. Its (key/value head, token, head) triples are its rows, in this order, at most kMaxRows.
struct Piece {
  int32_t seq;
  int32_t first_token, num_tokens;  // counted in the T tokens of the task
  int32_t first_kv_head, num_kv_heads;
  int32_t first_head, num_heads;  // within the group of a key/value head
  int32_t first_segment, num_segments;
  int64_t partial;  // where its unfinished sums go, counted in floats; negative: it finishes by itself
  int num_rows() const { return num_kv_heads * num_tokens * num_heads; }
};
// The segments of one piece of output, whose sums several pieces made.
struct Join {
  Piece whole;  // partial: the first one's; the others' follow
  int32_t num_parts;
};
static inline int64_t partial_floats(const mol_attention_task& task, int num_rows) {
  return static_cast<int64_t>(num_rows) * ((task.head_dim + 31) / 32 * 32 + 2);
}

// The sums of some keys for each row: values weighted by exp(logit - row_max), not yet divided by row_sum.
struct Sums {
  float output[kMaxRows * kMaxHeadDim];  // rows packed at head_dim rounded up to pairs of vectors
  float row_max[kMaxRows], row_sum[kMaxRows];
};

// Queries and weights rounded to integers, for instruction sets that multiply 8-bit integers
// (attention_avx512vnni.cpp).
struct Integers {
  // Queries in 15 bits, high * 128 + low, times query_units; [rows, head_dim].
  int8_t query_high[kMaxRows * kMaxHeadDim], query_low[kMaxRows * kMaxHeadDim];
  float query_units[kMaxRows + 16];  // a vector may be loaded at each row
  int32_t query_sums[kMaxRows + 16];
  // Weights of a chunk in 16 bits, high * 256 + low, times weight_units; 0 for keys that a row does not see.
  uint8_t weights_high[kMaxRows * kKeysPerChunk], weights_low[kMaxRows * kKeysPerChunk];
  float weight_units[kMaxRows];
};

// The memory of one thread.
struct alignas(64) Scratch {
  float query[kMaxRows * kMaxHeadDim];
  uint16_t query_bits[kMaxRows * kMaxHeadDim];  // as it came, for dot products in 16 bits
  Integers integers;
  Sums total, segment;
  int64_t positions[kMaxRows];              // of the rows' tokens in their sequence
  float keys[kKeysPerChunk * kMaxHeadDim];  // this chunk's, if widened
  float values[kKeysPerChunk * kMaxHeadDim];
  float scores[kMaxRows * kScoreStride];  // logits, then weights
};

struct AttentionKernel {
  // `next`: the piece that this thread will probably take next, to be prefetched; may be null.
  void (*attend)(const mol_attention_task& task, const Piece& piece, const Piece* next, Scratch& scratch,
                 float* partials) = nullptr;
  void (*join)(const mol_attention_task& task, const Join& join, Scratch& scratch, const float* partials) = nullptr;
};
// For a task's dtype and cache_dtype; empty if this instruction set is not compiled in.
AttentionKernel attention_kernel_scalar(const mol_attention_task& task);
AttentionKernel attention_kernel_avx2(const mol_attention_task& task);
AttentionKernel attention_kernel_avx512(const mol_attention_task& task);
AttentionKernel attention_kernel_avx512bf16(const mol_attention_task& task);
AttentionKernel attention_kernel_avx512vnni(const mol_attention_task& task);

}  // namespace mol
