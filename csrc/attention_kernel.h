// One tile of paged attention, for any instruction set: a template over Vec, the few vector operations that each
// attention_<isa>.cpp defines in its own namespace (see attention_scalar.cpp for the plainest one).
//
// A tile is some query tokens of one sequence times some query heads of one key/value head; its (token, head) pairs are
// its rows. Keys are taken in chunks that start at multiples of kKeysPerChunk, counted from the sequence's first token,
// and everything a row adds up is added in the order of its own keys. So the bits of a row depend on its own keys
// alone: not on threads, not on its neighbours in the tile, not on whether it comes as prefill, chunk or decode. A key
// outside a row's range never meets the row's sums, not even with weight zero: stale memory may hold NaN.
//
// Neither this header nor attention.h includes a C++ library: an inline function of it, compiled with AVX-512 here,
// could replace the baseline's copy at link time.
#pragma once
#include "attention.h"

namespace mol {

template <int N>
struct Count {
  static constexpr int value = N;
};

template <class Vec, class T>
class TileKernel {
 public:
  static void attend(const mol_attention_task& task, const Tile& tile, Scratch& scratch) {
    TileKernel(task, tile, scratch).run();
  }

 private:
  using V = typename Vec::V;
  static constexpr int kLanes = Vec::kLanes;
  static constexpr float kMinusInfinity = -__builtin_inff();

  const mol_attention_task& task_;
  const Tile& tile_;
  Scratch& scratch_;
  const int head_dim_, row_stride_, num_rows_;
  const int64_t first_position_;  // of the tile's first token in its sequence
  int64_t chunk_start_ = 0;
  int chunk_begin_ = 0, chunk_end_ = 0;  // keys of the chunk that some row sees
  int found_end_ = 0;                    // key_rows and value_rows are known up to here, counted from chunk_start_

  TileKernel(const mol_attention_task& task, const Tile& tile, Scratch& scratch)
      : task_(task),
        tile_(tile),
        scratch_(scratch),
        head_dim_(task.head_dim),
        row_stride_((task.head_dim + kLanes - 1) / kLanes * kLanes),
        num_rows_(tile.num_tokens * tile.num_heads),
        first_position_(task.seq_lens[tile.seq] - task.query_start[tile.seq + 1] + tile.first_token) {}

  void run() {
    load_query();
    const int64_t end = first_position_ + tile_.num_tokens;
    int64_t begin = 0;
    if (task_.sliding_window > 0 && first_position_ + 1 > task_.sliding_window) {
      begin = first_position_ + 1 - task_.sliding_window;
    }
    const bool converts = sizeof(T) < sizeof(float) && num_rows_ >= kMinRowsToConvert;
    for (chunk_start_ = begin / kKeysPerChunk * kKeysPerChunk; chunk_start_ < end; chunk_start_ += kKeysPerChunk) {
      chunk_begin_ = clamp_to_chunk(begin - chunk_start_);
      chunk_end_ = clamp_to_chunk(end - chunk_start_);
      find_rows(end);
      if (converts) {
        convert_rows();
        attend_chunk<float>();
      } else {
        attend_chunk<T>();
      }
    }
    store_output();
  }

  static int clamp_to_chunk(int64_t key) {
    return key < 0 ? 0 : key > kKeysPerChunk ? kKeysPerChunk : static_cast<int>(key);
  }

  // The keys of this chunk that a row sees, causally and through the window: [row_begin, row_end). Both grow with
  // the row.
  int row_end(int row) const { return clamp_to_chunk(first_position_ + row / tile_.num_heads + 1 - chunk_start_); }
  int row_begin(int row) const {
    if (task_.sliding_window == 0) return 0;
    return clamp_to_chunk(first_position_ + row / tile_.num_heads + 1 - task_.sliding_window - chunk_start_);
  }

  // Calls body(first_row, Count<R>) for groups of R = 4, 2 or 1 rows, at most what the registers hold.
  template <class Body>
  void for_row_groups(Body body) const {
    int row = 0;
    if constexpr (Vec::kMaxRows >= 4) {
      for (; row + 4 <= num_rows_; row += 4) body(row, Count<4>());
    }
    if constexpr (Vec::kMaxRows >= 2) {
      for (; row + 2 <= num_rows_; row += 2) body(row, Count<2>());
    }
    for (; row < num_rows_; ++row) body(row, Count<1>());
  }

  // head_dim is a multiple of 8, so what whole vectors of 16 lanes leave over is exactly 8.
  template <class Body>
  void for_dims(Body body) const {
    int dim = 0;
    for (; dim + kLanes <= head_dim_; dim += kLanes) body(dim, Count<0>());
    if constexpr (kLanes > 8) {
      if (dim < head_dim_) body(dim, Count<1>());
    }
  }
  template <int kIsHalf, class S>
  static V load(const S* source) {
    if constexpr (kIsHalf) {
      return Vec::load_half(source);
    } else {
      return Vec::load(source);
    }
  }

  void load_query() {
    const V scale = Vec::set(task_.scale);
    for (int row = 0; row < num_rows_; ++row) {
      const T* source = static_cast<const T*>(task_.query) + token_of(row) * task_.query_token_stride +
                        static_cast<int64_t>(head_of(row)) * head_dim_;
      float* query = scratch_.query + row * row_stride_;
      float* output = scratch_.output + row * row_stride_;
      for_dims([&](int dim, auto half) {
        Vec::store(query + dim, Vec::mul(load<decltype(half)::value>(source + dim), scale));
        Vec::store(output + dim, Vec::set(0.0f));
      });
      // A sink is a key with this logit and no value.
      scratch_.row_max[row] = task_.sinks ? task_.sinks[head_of(row)] : kMinusInfinity;
      scratch_.row_sum[row] = scratch_.row_max[row] > kMinusInfinity ? 1.0f : 0.0f;
    }
  }
  int64_t token_of(int row) const { return tile_.first_token + row / tile_.num_heads; }
  int head_of(int row) const { return tile_.first_head + row % tile_.num_heads; }

  void store_output() {
    for (int row = 0; row < num_rows_; ++row) {
      T* target = static_cast<T*>(task_.output) + token_of(row) * task_.output_token_stride +
                  static_cast<int64_t>(head_of(row)) * head_dim_;
      const float* output = scratch_.output + row * row_stride_;
      const V factor = Vec::set(1.0f / scratch_.row_sum[row]);
      for_dims([&](int dim, auto half) {
        const V result = Vec::mul(Vec::load(output + dim), factor);
        if constexpr (decltype(half)::value) {
          Vec::store_half(target + dim, result);
        } else {
          Vec::store(target + dim, result);
        }
      });
    }
  }

  // Looks up where the keys and values of this chunk and the next lie. The cache is [num_blocks, Hk, 2 (K, V), B, D].
  void find_rows(int64_t end) {
    const int64_t block_elements = static_cast<int64_t>(task_.block_size) * head_dim_;
    const int32_t* block_table = task_.block_table + tile_.seq * task_.block_table_stride;
    const int64_t left_in_sequence = end - chunk_start_;
    found_end_ = left_in_sequence < 2 * kKeysPerChunk ? static_cast<int>(left_in_sequence) : 2 * kKeysPerChunk;
    for (int key = chunk_begin_; key < found_end_;) {
      const int64_t position = chunk_start_ + key;
      const int64_t block = block_table[position / task_.block_size];
      const int64_t offset = position % task_.block_size;
      const T* row = static_cast<const T*>(task_.kv_cache) +
                     (block * task_.num_kv_heads + tile_.kv_head) * 2 * block_elements + offset * head_dim_;
      for (int64_t left = task_.block_size - offset; left > 0 && key < found_end_; --left, ++key, row += head_dim_) {
        scratch_.key_rows[key] = row;
        scratch_.value_rows[key] = row + block_elements;
      }
    }
  }

  // Decode waits for memory: while the first rows' dot products read K, this chunk's V is fetched, and while they add
  // V, the next chunk's K. Converted chunks have been read already.
  template <class S>
  static constexpr bool kPrefetches = sizeof(S) == sizeof(T);
  static void prefetch(const void* row, int begin, int end) {
    for (int offset = begin * sizeof(T); offset < end * static_cast<int>(sizeof(T)); offset += 64) {
      __builtin_prefetch(static_cast<const char*>(row) + offset);
    }
  }

  void convert_rows() {
    for (int key = chunk_begin_; key < chunk_end_; ++key) {
      convert_row(scratch_.key_rows[key], scratch_.keys + key * row_stride_);
      convert_row(scratch_.value_rows[key], scratch_.values + key * row_stride_);
    }
  }
  void convert_row(const void*& row, float* target) {
    const T* source = static_cast<const T*>(row);
    for_dims([&](int dim, auto half) { Vec::store(target + dim, load<decltype(half)::value>(source + dim)); });
    row = target;
  }

  // S: the element type that key_rows and value_rows point at.
  template <class S>
  void attend_chunk() {
    for_row_groups([&](int row, auto group) {
      constexpr int R = decltype(group)::value;
      const int begin = row_begin(row), end = row_end(row + R - 1);
      for (int key = begin; key < end; key += kKeysPerStep) dot_products<S, R>(row, key, end);
    });
    for (int row = 0; row < num_rows_; ++row) {
      if (row_begin(row) < row_end(row)) update_softmax(row, row_begin(row), row_end(row));
    }
    for_row_groups([&](int row, auto group) {
      constexpr int R = decltype(group)::value;
      // The keys that all R rows see go together; before and after them each row goes alone.
      int common_begin = row_begin(row + R - 1);
      const int common_end = row_end(row) > common_begin ? row_end(row) : common_begin;
      for (int r = row; r < row + R; ++r) add_values<S, 1>(r, row_begin(r), min(common_begin, row_end(r)));
      add_values<S, R>(row, common_begin, common_end);
      for (int r = row; r < row + R; ++r) add_values<S, 1>(r, max(common_end, row_begin(r)), row_end(r));
    });
  }
  static int min(int a, int b) { return a < b ? a : b; }
  static int max(int a, int b) { return a < b ? b : a; }

  // scores[row + r][key + k] = query[row + r] . K[key + k] for R rows and kKeysPerStep keys.
  // AVX-512, R = 4: 16 sums + 4 keys + 1 query of 32 registers; AVX2, R = 2: 8 + 4 + 1 of 16. In decode bound by DRAM
  // reads of K (sizeof(S) bytes per 2 R FLOP), in prefill by the two loads per cycle that feed 16 FMAs from 8 loads.
  template <class S, int R>
  void dot_products(int row, int key, int end) {
    const float* query = scratch_.query + row * row_stride_;
    const S* keys[kKeysPerStep];
    for (int k = 0; k < kKeysPerStep; ++k) {  // past the end the last key is read again, never the memory behind it
      keys[k] = static_cast<const S*>(scratch_.key_rows[min(key + k, end - 1)]);
      if (kPrefetches<S> && row == 0) prefetch(scratch_.value_rows[min(key + k, end - 1)], 0, head_dim_);
    }
    V sums[R][kKeysPerStep];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int k = 0; k < kKeysPerStep; ++k) sums[r][k] = Vec::set(0.0f);
    }
    for_dims([&](int dim, auto half) {
      V key_part[kKeysPerStep];
#pragma GCC unroll 4
      for (int k = 0; k < kKeysPerStep; ++k) key_part[k] = load<decltype(half)::value>(keys[k] + dim);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const V query_part = Vec::load(query + r * row_stride_ + dim);
#pragma GCC unroll 4
        for (int k = 0; k < kKeysPerStep; ++k) sums[r][k] = Vec::fma(query_part, key_part[k], sums[r][k]);
      }
    });
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) Vec::store_sums(scratch_.scores + (row + r) * kScoreStride + key, sums[r]);
  }

  // Online softmax: turns a row's logits [begin, end) of this chunk into weights relative to the greatest logit so far,
  // and rescales what the row has summed up under the old one. Lanes stand for keys at fixed places of the chunk.
  void update_softmax(int row, int begin, int end) {
    float* scores = scratch_.scores + row * kScoreStride;
    if (task_.soft_cap > 0.0f) {
      for (int key = begin / kLanes * kLanes; key < end; key += kLanes) {
        Vec::store(scores + key, capped(Vec::load(scores + key)));
      }
    }
    for (int key = 0; key < begin; ++key) scores[key] = kMinusInfinity;
    for (int key = end; key < kKeysPerChunk; ++key) scores[key] = kMinusInfinity;

    V lane_max = Vec::set(scratch_.row_max[row]);
    for (int key = 0; key < kKeysPerChunk; key += kLanes) lane_max = Vec::max(lane_max, Vec::load(scores + key));
    const float new_max = Vec::reduce_max(lane_max);
    // All logits minus infinity so far: any finite reference gives weight zero.
    const V reference = Vec::set(new_max == kMinusInfinity ? 0.0f : new_max);

    V lane_sum = Vec::set(0.0f);
    for (int key = 0; key < kKeysPerChunk; key += kLanes) {
      const V weight = exp(Vec::sub(Vec::load(scores + key), reference));
      Vec::store(scores + key, weight);
      lane_sum = Vec::add(lane_sum, weight);
    }
    const V rescale = exp(Vec::sub(Vec::set(scratch_.row_max[row]), reference));
    const V old_sum = Vec::set(scratch_.row_sum[row]);
    scratch_.row_sum[row] = Vec::first(Vec::fma(old_sum, rescale, Vec::set(Vec::reduce_sum(lane_sum))));
    scratch_.row_max[row] = new_max;
    if (Vec::first(rescale) != 1.0f) {
      float* output = scratch_.output + row * row_stride_;
      for (int dim = 0; dim < row_stride_; dim += kLanes) {
        Vec::store(output + dim, Vec::mul(Vec::load(output + dim), rescale));
      }
    }
  }

  // exp(x) for x <= 0, to 2 units in the last place; 0 below the smallest normal number; NaN stays NaN.
  // x = n ln 2 + r, the polynomial is the classic Cephes one for exp(r), |r| <= ln(2) / 2.
  static V exp(V x) {
    const V n = Vec::round(Vec::mul(x, Vec::set(1.44269504088896341f)));
    V r = Vec::fma(n, Vec::set(-0.693359375f), x);  // ln 2 in two parts, the first exact in few bits
    r = Vec::fma(n, Vec::set(2.12194440e-4f), r);
    V p = Vec::set(1.9875691500e-4f);
    p = Vec::fma(p, r, Vec::set(1.3981999507e-3f));
    p = Vec::fma(p, r, Vec::set(8.3334519073e-3f));
    p = Vec::fma(p, r, Vec::set(4.1665795894e-2f));
    p = Vec::fma(p, r, Vec::set(1.6666665459e-1f));
    p = Vec::fma(p, r, Vec::set(5.0000001201e-1f));
    p = Vec::fma(Vec::mul(r, r), p, Vec::add(r, Vec::set(1.0f)));
    return Vec::zero_if_less(x, Vec::set(-87.33f), Vec::times_power_of_two(p, n));
  }

  // cap * tanh(logit / cap), by tanh|y| = (1 - e) / (1 + e) with e = exp(-2 |y|).
  V capped(V logit) const {
    const V one = Vec::set(1.0f);
    const V y = Vec::mul(logit, Vec::set(1.0f / task_.soft_cap));
    const V e = exp(Vec::mul(Vec::abs(y), Vec::set(-2.0f)));
    const V magnitude = Vec::mul(Vec::set(task_.soft_cap), Vec::div(Vec::sub(one, e), Vec::add(one, e)));
    return Vec::copy_sign(magnitude, logit);
  }

  // output[row + r] += weights[row + r][begin..end) * V[begin..end), key after key.
  template <class S, int R>
  void add_values(int row, int begin, int end) {
    if (begin >= end) return;
    int dim = 0;
    for (; dim + 4 * kLanes <= head_dim_; dim += 4 * kLanes) add_value_part<S, R, 4, 0>(row, begin, end, dim);
    for (; dim + kLanes <= head_dim_; dim += kLanes) add_value_part<S, R, 1, 0>(row, begin, end, dim);
    if constexpr (kLanes > 8) {
      if (dim < head_dim_) add_value_part<S, R, 1, 1>(row, begin, end, dim);
    }
  }

  // The sums of R rows times N vectors of dims stay in registers over the keys. AVX-512: 16 sums + 4 values of 32;
  // AVX2: 8 + 4 + 2 of 16. Bound like dot_products, and without its reduction at the end.
  template <class S, int R, int N, int kIsHalf>
  void add_value_part(int row, int begin, int end, int dim) {
    const float* weights = scratch_.scores + row * kScoreStride;
    float* output = scratch_.output + row * row_stride_ + dim;
    V sums[R][N];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[r][n] = Vec::load(output + r * row_stride_ + n * kLanes);
    }
    for (int key = begin; key < end; ++key) {
      const S* value = static_cast<const S*>(scratch_.value_rows[key]) + dim;
      if (kPrefetches<S> && row == 0) {
        prefetch(scratch_.key_rows[min(key + kKeysPerChunk, found_end_ - 1)], dim, dim + N * kLanes);
      }
      V value_part[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) value_part[n] = load<kIsHalf>(value + n * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const V weight = Vec::set(weights[r * kScoreStride + key]);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sums[r][n] = Vec::fma(weight, value_part[n], sums[r][n]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) Vec::store(output + r * row_stride_ + n * kLanes, sums[r][n]);
    }
  }
};

template <class Vec>
AttendTile tile_kernel_for(int32_t dtype) {
  switch (dtype) {
    case MOL_FLOAT32:
      return TileKernel<Vec, float>::attend;
    case MOL_BFLOAT16:
      return TileKernel<Vec, BFloat16>::attend;
    case MOL_FLOAT16:
      return TileKernel<Vec, Float16>::attend;
    default:
      return nullptr;
  }
}

}  // namespace mol
