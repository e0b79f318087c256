// One piece of paged attention, for any instruction set (Vec, attention_micro.h) and a cache of C.
//
// Blocks are taken in order and within a block one head after the other, so that the whole block is read in one go; the
// keys of a head and block in chunks of up to kKeysPerChunk. Everything a row adds up is added in the order of its own
// keys, chunk by chunk and segment by segment. So the bits of a row depend on its own keys and the block size alone:
// not on threads, not on its neighbours in the piece, not on whether it comes as prefill, chunk or decode. A key
// outside a row's range never meets the row's sums, not even with weight zero: stale memory may hold NaN.
#pragma once
#include "attention_softmax.h"

namespace mol {

template <class Vec, class C, int D>
class PieceKernel {
 public:
  static void attend(const mol_attention_task& task, const Piece& piece, const Piece* next, Scratch& scratch,
                     float* partials) {
    PieceKernel kernel(task, piece, scratch);
    kernel.load_query();
    kernel.attend_segments(next);
    if (piece.partial < 0) {
      kernel.store_output();
    } else {
      kernel.total_.save(partials + piece.partial);
    }
  }

  static void join(const mol_attention_task& task, const Join& join, Scratch& scratch, const float* partials) {
    PieceKernel kernel(task, join.whole, scratch);
    const int64_t stride = partial_floats(task, join.whole.num_rows());
    kernel.total_.load(partials + join.whole.partial);
    for (int part = 1; part < join.num_parts; ++part) {
      kernel.segment_.load(partials + join.whole.partial + part * stride);
      kernel.total_.add(kernel.segment_);
    }
    kernel.store_output();
  }

 private:
  using M = Micro<Vec, D>;
  using V = typename Vec::V;
  static constexpr int kLanes = Vec::kLanes;
  static constexpr float kMinusInfinity = -__builtin_inff();
  static constexpr bool kIsQuantised = sizeof(C) == 1;
  // Whether load_pair gives even and odd elements, not the first and the second half.
  template <class T>
  static constexpr bool kIsInterleaved = Vec::template kIsInterleaved<T>;
  // Whether logits are taken from the 16-bit elements themselves.
  static constexpr bool kDots16Bit = Vec::template kHasDot16Bit<C>;
  // Whether queries and weights are rounded to integers, to be multiplied with the elements as such.
  static constexpr bool kMultipliesIntegers = Vec::template kMultipliesIntegers<C>;

  const mol_attention_task& task_;
  const Piece& piece_;
  Scratch& scratch_;
  const int head_dim_, stride_;   // stride: of a row in scratch
  const int rows_per_head_;       // of one key/value head
  const int64_t first_position_;  // of the piece's first token in its sequence
  const int64_t head_bytes_;
  const RowSums<Vec, D> total_, segment_;
  int64_t chunk_start_ = 0;  // position of the chunk's first key in the sequence
  int chunk_len_ = 0;

  PieceKernel(const mol_attention_task& task, const Piece& piece, Scratch& scratch)
      : task_(task),
        piece_(piece),
        scratch_(scratch),
        head_dim_(D > 0 ? D : task.head_dim),
        stride_((head_dim_ + M::kPair - 1) / M::kPair * M::kPair),
        rows_per_head_(piece.num_tokens * piece.num_heads),
        first_position_(task.seq_lens[piece.seq] - task.query_start[piece.seq + 1] + piece.first_token),
        head_bytes_(head_block_bytes(task)),
        total_(scratch.total, piece.num_rows(), stride_),
        segment_(scratch.segment, piece.num_rows(), stride_) {}

  // ---------------------------------------------------------------- rows

  int64_t token_of(int row) const { return piece_.first_token + row / piece_.num_heads % piece_.num_tokens; }
  int head_of(int row) const {
    const int kv_head = piece_.first_kv_head + row / rows_per_head_;
    return kv_head * (task_.num_heads / task_.num_kv_heads) + piece_.first_head + row % piece_.num_heads;
  }

  void load_query() {
    for (int row = 0; row < piece_.num_rows(); ++row) {
      scratch_.positions[row] = first_position_ + token_of(row) - piece_.first_token;
      const int64_t offset = token_of(row) * task_.query_token_stride + int64_t{head_of(row)} * head_dim_;
      if constexpr (kDots16Bit) {
        uint16_t* target = scratch_.query_bits + row * stride_;
        __builtin_memset(target + head_dim_, 0, (stride_ - head_dim_) * sizeof(uint16_t));
        __builtin_memcpy(target, static_cast<const BFloat16*>(task_.query) + offset, head_dim_ * sizeof(uint16_t));
      } else if constexpr (!kIsQuantised) {
        load_row(static_cast<const C*>(task_.query) + offset, scratch_.query + row * stride_);
      } else if (task_.dtype == MOL_FLOAT32) {
        load_row(static_cast<const float*>(task_.query) + offset, scratch_.query + row * stride_);
      } else if (task_.dtype == MOL_BFLOAT16) {
        load_row(static_cast<const BFloat16*>(task_.query) + offset, scratch_.query + row * stride_);
      } else {
        load_row(static_cast<const Float16*>(task_.query) + offset, scratch_.query + row * stride_);
      }
      if constexpr (kMultipliesIntegers) {
        Vec::quantise_query(scratch_.query + row * stride_, head_dim_, row, scratch_.integers);
      }
    }
  }
  template <class T>
  void load_row(const T* source, float* target) const {
    M::for_pairs(head_dim_, [&](int dim, int num_elements) {
      V a, b;
      M::load_pair(source + dim, num_elements, a, b);
      if (kIsInterleaved<T> && !kIsInterleaved<C>) Vec::interleave(a, b);
      Vec::store(target + dim, a);
      Vec::store(target + dim + kLanes, b);
    });
  }

  void store_output() {
    for (int row = 0; row < piece_.num_rows(); ++row) {
      const int64_t token = token_of(row), head = head_of(row);
      float row_max = total_.row_max(row), row_sum = total_.row_sum(row), rescale = 1.0f;
      if (task_.sinks) {  // a sink is a key with this logit and no value
        const float sink = task_.sinks[head];
        if (row_max < sink) row_max = sink;
        rescale = M::weight(total_.row_max(row), row_max);
        row_sum = row_sum * rescale + M::weight(sink, row_max);
      }
      if (task_.log_sum_exp) {
        task_.log_sum_exp[token * task_.num_heads + head] = row_max + __builtin_logf(row_sum);
      }
      const V factor = Vec::set(rescale / row_sum);
      float* output = total_.output(row);
      if constexpr (kMultipliesIntegers) Vec::put_in_order(output, head_dim_);
      const int64_t offset = token * task_.output_token_stride + head * head_dim_;
      if constexpr (!kIsQuantised) {
        store_row(output, factor, static_cast<C*>(task_.output) + offset);
      } else if (task_.dtype == MOL_FLOAT32) {
        store_row(output, factor, static_cast<float*>(task_.output) + offset);
      } else if (task_.dtype == MOL_BFLOAT16) {
        store_row(output, factor, static_cast<BFloat16*>(task_.output) + offset);
      } else {
        store_row(output, factor, static_cast<Float16*>(task_.output) + offset);
      }
    }
  }
  template <class T>
  void store_row(const float* output, V factor, T* target) const {
    M::for_pairs(head_dim_, [&](int dim, int num_elements) {
      V a = Vec::mul(Vec::load(output + dim), factor), b = Vec::mul(Vec::load(output + dim + kLanes), factor);
      if (kIsInterleaved<T> && !kIsInterleaved<C>) Vec::deinterleave(a, b);
      M::store_pair(target + dim, num_elements, a, b);
    });
  }
  // ---------------------------------------------------------------- segments

  void attend_segments(const Piece* next) {
    const int64_t end = first_position_ + piece_.num_tokens, segment = segment_keys(task_);
    int64_t begin = 0;
    if (task_.sliding_window > 0 && first_position_ + 1 > task_.sliding_window) {
      begin = first_position_ + 1 - task_.sliding_window;
    }
    bool is_first = true;
    for (int64_t index = piece_.first_segment; index < piece_.first_segment + piece_.num_segments; ++index) {
      const int64_t segment_begin = larger_key(begin, index * segment);
      const int64_t segment_end = smaller_key(end, (index + 1) * segment);
      const RowSums<Vec, D>& sums = is_first ? total_ : segment_;
      sums.clear();
      attend_keys(segment_begin, segment_end, segment_end < end, next, sums);
      if (!is_first) total_.add(segment_);
      is_first = false;
    }
  }
  static int64_t smaller_key(int64_t a, int64_t b) { return a < b ? a : b; }
  static int64_t larger_key(int64_t a, int64_t b) { return a < b ? b : a; }

  // ---------------------------------------------------------------- chunks

  const char* head_block(int32_t seq, int64_t position, int kv_head) const {
    const int64_t block = task_.block_table[seq * task_.block_table_stride + position / task_.block_size];
    return static_cast<const char*>(task_.kv_cache) + (block * task_.num_kv_heads + kv_head) * head_bytes_;
  }
  int64_t value_offset() const { return static_cast<int64_t>(task_.block_size) * head_dim_ * sizeof(C); }

  ChunkScales scales_of(const char* block, int offset) const {
    ChunkScales scales;
    if constexpr (kIsQuantised) {
      scales.keys = reinterpret_cast<const float*>(block + 2 * value_offset()) + offset;
      scales.values = scales.keys + task_.block_size;
    }
    return scales;
  }

  // The lines of the chunk that begins at or around `position`; its scales, few, are fetched at once.
  Lines lines_of(int32_t seq, int64_t position, int kv_head) const {
    const char* block = head_block(seq, position, kv_head);
    const int offset = static_cast<int>(position % task_.block_size) / kKeysPerChunk * kKeysPerChunk;
    const int num_keys = smaller(kKeysPerChunk, task_.block_size - offset);
    if constexpr (kIsQuantised) {
      const ChunkScales scales = scales_of(block, offset);
      for (int key = 0; key < num_keys; key += 64 / sizeof(float)) {
        __builtin_prefetch(scales.keys + key);
        __builtin_prefetch(scales.values + key);
      }
    }
    const char* key = block + offset * head_dim_ * sizeof(C);
    return Lines(key, key + value_offset(), num_keys * head_dim_ * static_cast<int64_t>(sizeof(C)));
  }

  // Keys [begin, end) for all rows. Behind them come more of this sequence's, or the next piece's.
  void attend_keys(int64_t begin, int64_t end, bool goes_on, const Piece* next, const RowSums<Vec, D>& sums) {
    for (int64_t block_start = begin / task_.block_size * task_.block_size; block_start < end;
         block_start += task_.block_size) {
      const int block_begin = static_cast<int>(larger_key(begin - block_start, 0)) / kKeysPerChunk * kKeysPerChunk;
      const int block_end = static_cast<int>(smaller_key(end - block_start, task_.block_size));
      for (int head = 0; head < piece_.num_kv_heads; ++head) {
        const int kv_head = piece_.first_kv_head + head;
        const char* block = head_block(piece_.seq, block_start, kv_head);
        for (int offset = block_begin; offset < block_end; offset += kKeysPerChunk) {
          chunk_start_ = block_start + offset;
          chunk_len_ = smaller(kKeysPerChunk, task_.block_size - offset);
          Lines lines;
          if (offset + kKeysPerChunk < block_end) {
            lines = lines_of(piece_.seq, chunk_start_ + kKeysPerChunk, kv_head);
          } else if (head + 1 < piece_.num_kv_heads) {
            lines = lines_of(piece_.seq, block_start + block_begin, kv_head + 1);
          } else if (block_start + task_.block_size < end || goes_on) {
            lines = lines_of(piece_.seq, block_start + task_.block_size, piece_.first_kv_head);
          } else if (next != nullptr) {
            lines = lines_of(next->seq, next->first_segment * segment_keys(task_), next->first_kv_head);
          }
          attend_chunk(block, offset, head * rows_per_head_, larger_key(begin, chunk_start_), sums, lines);
        }
      }
    }
  }

  // The keys of this chunk that a row sees, causally and through the window: [row_begin, row_end). Both grow with
  // the row within a key/value head. Nothing before `first_key`, which the segment or the window of all begins with.
  KeyRange range_of(int row) const { return {row_begin(row), row_end(row)}; }
  int row_end(int row) const { return clamp_to_chunk(scratch_.positions[row] + 1 - chunk_start_); }
  int row_begin(int row) const {
    return task_.sliding_window ? clamp_to_chunk(scratch_.positions[row] + 1 - task_.sliding_window - chunk_start_) : 0;
  }
  int clamp_to_chunk(int64_t key) const { return key < 0 ? 0 : key > chunk_len_ ? chunk_len_ : static_cast<int>(key); }

  void attend_chunk(const char* block, int offset, int first_row, int64_t first_key, const RowSums<Vec, D>& sums,
                    Lines& lines) {
    const C* keys = reinterpret_cast<const C*>(block) + offset * head_dim_;
    const C* values = reinterpret_cast<const C*>(block + value_offset()) + offset * head_dim_;
    const Softmax<Vec, C, D> softmax(task_.scale, task_.soft_cap, chunk_len_, scales_of(block, offset));
    const int last_row = first_row + rows_per_head_;
    const int begin = static_cast<int>(first_key - chunk_start_), end = row_end(last_row - 1);
    // About 3/8 of the next chunk's lines go with the logits, 1/8 with the softmax, the rest with the values.
    const int num_groups = (rows_per_head_ + 3) / 4, num_lines = lines.num_left();
    const int key_lines = divided(num_lines * 3, 8 * num_groups * (kKeysPerChunk / 4));
    const int softmax_lines = divided(num_lines, 8 * rows_per_head_);
    const int value_lines = divided(num_lines, 2 * num_groups * (kKeysPerChunk / 4) * larger(1, head_dim_ / M::kPair));

    if constexpr (kMultipliesIntegers) {
      score_rows(first_row, last_row, keys, end, lines, key_lines);
      weigh_rows(first_row, last_row, softmax, sums, lines, softmax_lines);
      add_integer_rows(first_row, last_row, values, sums, lines, value_lines);
    } else if (sizeof(C) < sizeof(float) && rows_per_head_ >= kMinRowsToConvert) {
      if constexpr (kDots16Bit) {
        score_rows(first_row, last_row, keys, end, lines, key_lines);
      } else {
        widen(keys, begin, end, scratch_.keys);
        score_rows(first_row, last_row, scratch_.keys, end, lines, key_lines);
      }
      widen(values, begin, end, scratch_.values);
      weigh_rows(first_row, last_row, softmax, sums, lines, softmax_lines);
      add_rows(first_row, last_row, scratch_.values, stride_, sums, lines, value_lines);
    } else {
      score_rows(first_row, last_row, keys, end, lines, key_lines);
      weigh_rows(first_row, last_row, softmax, sums, lines, softmax_lines);
      add_rows(first_row, last_row, values, head_dim_, sums, lines, value_lines);
    }
    lines.fetch(lines.num_left());
  }
  static int divided(int a, int b) { return (a + b - 1) / b; }

  // Keys [begin, end) as fp32, [keys, stride] in load_pair's order: what Micro then loads as pairs is the same.
  void widen(const C* source, int begin, int end, float* target) const {
    for (int key = begin; key < end; ++key) {
      M::for_pairs(head_dim_, [&](int dim, int num_elements) {
        V a, b;
        M::load_pair(source + key * head_dim_ + dim, num_elements, a, b);
        Vec::store(target + key * stride_ + dim, a);
        Vec::store(target + key * stride_ + dim + kLanes, b);
      });
    }
  }

  template <class S>
  void score_rows(int first_row, int last_row, const S* keys, int end, Lines& lines, int lines_per_4_keys) {
    M::for_row_groups(first_row, last_row, [&](int row, auto group) {
      constexpr int R = decltype(group)::value, K = M::kSums / R;
      const int group_end = smaller(end, row_end(row + R - 1));
      int key = row_begin(row) / K * K;
      for (; key < group_end && key + K <= chunk_len_; key += K) {
        lines.fetch(K < 4 ? lines_per_4_keys / 2 : lines_per_4_keys * (K / 4));
        score<S, R, K>(row, keys, key);
      }
      for (; key < group_end; ++key) score<S, R, 1>(row, keys, key);  // never the memory behind the block
    });
  }
  template <class S, int R, int K>
  void score(int row, const S* keys, int key) {
    float* scores = scratch_.scores + row * kScoreStride + key;
    if constexpr (kMultipliesIntegers) {
      Vec::template dot_products<D, R, K>(scratch_.integers, row, keys + key * head_dim_, head_dim_, scores);
    } else if constexpr (kDots16Bit) {
      M::template dot_products_16_bit<S, R, K>(scratch_.query_bits + row * stride_, stride_, keys + key * head_dim_,
                                               head_dim_, scores);
    } else {
      const int key_stride = sizeof(S) == sizeof(float) && sizeof(C) < sizeof(float) ? stride_ : head_dim_;
      M::template dot_products<S, R, K>(scratch_.query + row * stride_, stride_, keys + key * key_stride, key_stride,
                                        scores);
    }
  }

  void weigh_rows(int first_row, int last_row, const Softmax<Vec, C, D>& softmax, const RowSums<Vec, D>& sums,
                  Lines& lines, int lines_per_row) {
    M::for_row_groups(first_row, last_row, [&](int row, auto group) {
      constexpr int R = decltype(group)::value;
      KeyRange ranges[R];
      for (int r = 0; r < R; ++r) ranges[r] = range_of(row + r);
      lines.fetch(R * lines_per_row);
      softmax.template weigh<R>(row, ranges, scratch_.scores + row * kScoreStride, sums, scratch_.integers);
    });
  }

  template <class S>
  void add_rows(int first_row, int last_row, const S* values, int value_stride, const RowSums<Vec, D>& sums,
                Lines& lines, int lines_per_step) {
    M::for_row_groups(first_row, last_row, [&](int row, auto group) {
      constexpr int R = decltype(group)::value;
      // The keys that all R rows see go together; before and after them each row goes alone.
      int common_begin = row_begin(row + R - 1);
      const int common_end = larger(row_end(row), common_begin);
      const auto add = [&](int r, int begin, int end, auto count) {
        M::template add_values<S, decltype(count)::value>(scratch_.scores + r * kScoreStride, values, begin, end,
                                                          value_stride, sums.output(r), stride_, lines, lines_per_step);
      };
      for (int r = row; r < row + R; ++r) add(r, row_begin(r), smaller(common_begin, row_end(r)), Count<1>());
      add(row, common_begin, common_end, Count<R>());
      for (int r = row; r < row + R; ++r) add(r, larger(common_end, row_begin(r)), row_end(r), Count<1>());
    });
  }

  // All keys that one of R rows sees go together: for the others their weight is zero, and stale integers are finite.
  void add_integer_rows(int first_row, int last_row, const C* values, const RowSums<Vec, D>& sums, Lines& lines,
                        int lines_per_step) {
    M::for_row_groups(first_row, last_row, [&](int row, auto group) {
      constexpr int R = decltype(group)::value;
      Vec::template add_values<D, R>(scratch_.integers, row, values, {row_begin(row), row_end(row + R - 1)}, chunk_len_,
                                     head_dim_, sums.output(row), stride_, lines, lines_per_step);
    });
  }
};

// Heads of 128 are most models'; with a length known to the compiler, loops over dims need no counting.
template <class Vec, class C>
AttentionKernel piece_kernel(int32_t head_dim) {
  if constexpr (Vec::kLanes > 1) {
    if (head_dim == 128) return {PieceKernel<Vec, C, 128>::attend, PieceKernel<Vec, C, 128>::join};
  }
  return {PieceKernel<Vec, C, 0>::attend, PieceKernel<Vec, C, 0>::join};
}

template <class Vec>
AttentionKernel kernel_for_task(const mol_attention_task& task) {
  switch (task.cache_dtype) {
    case MOL_FLOAT32:
      return piece_kernel<Vec, float>(task.head_dim);
    case MOL_BFLOAT16:
      return piece_kernel<Vec, BFloat16>(task.head_dim);
    case MOL_FLOAT16:
      return piece_kernel<Vec, Float16>(task.head_dim);
    case MOL_INT8:
      return piece_kernel<Vec, Int8>(task.head_dim);
    default:
      return piece_kernel<Vec, Fp8>(task.head_dim);
  }
}

}  // namespace mol
