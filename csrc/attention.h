// What the dispatcher (attention.cpp) and the kernels of each instruction set (attention_kernel.h) agree on: the piece
// of work, the memory it works in, and how a kernel is called.
#pragma once
#include <stdint.h>

#include "moe_lightning.h"

namespace mol {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

constexpr int kMaxHeadDim = 256;
constexpr int kKeysPerChunk = 64;  // 64 keys of 128 dims are 32 KB in fp32: K or V of a chunk stays in L1
constexpr int kMaxTileRows = 64;   // enough to convert and stream each K/V row once per 64 rows of prefill
constexpr int kKeysPerStep = 4;    // keys whose dot products are reduced together
// From this many rows on, K and V of a chunk are converted to fp32 once instead of at each use.
constexpr int kMinRowsToConvert = 16;
constexpr int kScoreStride = kKeysPerChunk + 16;  // a last step may write up to kKeysPerStep - 1 scores too many

struct Tile {
  int32_t seq, kv_head;
  int32_t first_head, num_heads;    // query heads; all share kv_head
  int32_t first_token, num_tokens;  // counted in the T tokens of the task
};

// The memory of one thread. Rows are packed at head_dim rounded up to whole vectors, so that a small head stays small.
struct alignas(64) Scratch {
  float query[kMaxTileRows * kMaxHeadDim];   // scaled
  float output[kMaxTileRows * kMaxHeadDim];  // sum of weight * value, before division by row_sum
  float keys[kKeysPerChunk * kMaxHeadDim];   // this chunk's, if converted
  float values[kKeysPerChunk * kMaxHeadDim];
  float scores[kMaxTileRows * kScoreStride];  // logits, then weights
  float row_max[kMaxTileRows], row_sum[kMaxTileRows];
  const void* key_rows[2 * kKeysPerChunk];  // this chunk's, and behind them the next chunk's, to be prefetched
  const void* value_rows[2 * kKeysPerChunk];
};

using AttendTile = void (*)(const mol_attention_task& task, const Tile& tile, Scratch& scratch);
// The kernel for a MOL_* dtype, or nullptr if this ISA is not compiled in.
AttendTile attend_tile_scalar(int32_t dtype);
AttendTile attend_tile_avx2(int32_t dtype);
AttendTile attend_tile_avx512(int32_t dtype);

}  // namespace mol
