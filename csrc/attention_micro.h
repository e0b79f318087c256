// The innermost loops of attention over one chunk of keys, for any instruction set: a template over Vec, the few vector
// operations that each attention_<isa>.cpp defines in its own namespace (attention_scalar.cpp has the plainest one).
//
// Vectors come in pairs, in the order in which Vec::load_pair finds it cheapest to widen elements (bfloat16: even ones,
// odd ones). Query, keys, values and sums all have that order; only store_pair puts it right.
//
// Neither this header nor attention.h includes a C++ library: an inline function of it, compiled with AVX-512 here,
// could replace the baseline's copy at link time.
#pragma once
#include "attention.h"
#include "vec_math.h"

namespace mol {

template <int N>
struct Count {
  static constexpr int value = N;
};

namespace {  // a copy for each instruction set

int smaller(int a, int b) { return a < b ? a : b; }
int larger(int a, int b) { return a < b ? b : a; }

// The lines of a chunk that comes next, fetched a few at a time while another is computed, so that the memory is never
// idle and never asked for more than it can have in flight. K and V in turns: two streams reach more than one; but in
// order where they are one run of memory.
class Lines {
 public:
  Lines() = default;
  Lines(const void* key, const void* value, int64_t num_bytes)
      : key_(static_cast<const char*>(key)),
        value_(static_cast<const char*>(value)),
        is_one_run_(key_ + num_bytes == value_),
        num_left_(static_cast<int>(2 * ((num_bytes + 63) / 64))) {}

  void fetch(int count) {
    count = smaller(count, num_left_);
    num_left_ -= count;
    const char *key = key_, *value = value_;  // else each prefetch waits for the pointer that the last one stored
    if (is_one_run_) {
      for (int line = 0; line < count; ++line) __builtin_prefetch(key + line * 64);
      key_ = key + count * 64;
      return;
    }
    for (; count >= 2; count -= 2, key += 64, value += 64) {
      __builtin_prefetch(key);
      __builtin_prefetch(value);
    }
    if (count == 1) {
      __builtin_prefetch(key);
      key_ = value, value_ = key + 64;
    } else {
      key_ = key, value_ = value;
    }
  }
  int num_left() const { return num_left_; }

 private:
  const char* key_ = nullptr;
  const char* value_ = nullptr;
  bool is_one_run_ = false;
  int num_left_ = 0;
};

}  // namespace

// D: head_dim, where it is known when this is compiled and whole pairs; else 0.
template <class Vec, int D>
struct Micro {
  using V = typename Vec::V;
  static_assert(D % (2 * Vec::kLanes) == 0);
  static constexpr int kLanes = Vec::kLanes, kPair = 2 * Vec::kLanes;
  static constexpr int kSums = Vec::kSums;  // accumulators: what the registers hold beside the operands

  // Calls body(first_row, Count<R>) for groups of R = 4, 2 or 1 of rows [begin, end).
  template <class Body>
  static void for_row_groups(int begin, int end, Body body) {
    int row = begin;
    if constexpr (kSums >= 4) {
      for (; row + 4 <= end; row += 4) body(row, Count<4>());
      for (; row + 2 <= end; row += 2) body(row, Count<2>());
    }
    for (; row < end; ++row) body(row, Count<1>());
  }

  // Calls body(dim, num_elements): whole pairs, then what is left of head_dim, a multiple of 8.
  template <class Body>
  static void for_pairs(int head_dim, Body body) {
    if constexpr (D > 0) {
#pragma GCC unroll 8
      for (int dim = 0; dim < D; dim += kPair) body(dim, kPair);
    } else {
      int dim = 0;
      for (; dim + kPair <= head_dim; dim += kPair) body(dim, kPair);
      if (dim < head_dim) body(dim, head_dim - dim);
    }
  }
  template <class S>
  static void load_pair(const S* p, int num_elements, V& a, V& b) {
    if (D > 0 || num_elements == kPair) {
      Vec::load_pair(p, a, b);
    } else {
      Vec::load_part(p, num_elements, a, b);
    }
  }
  template <class T>
  static void store_pair(T* p, int num_elements, V a, V b) {
    if (D > 0 || num_elements == kPair) {
      Vec::store_pair(p, a, b);
    } else {
      Vec::store_part(p, num_elements, a, b);
    }
  }

  // scores[r][k] = query[r] . keys[k] for R rows and K keys. query: [R, stride] fp32, in load_pair's order;
  // keys: [K, head_dim]. With K = kSums / R: AVX-512 16 sums + 8 query + 2 keys of 32 registers, AVX2 8 + 2 of 16 and
  // the query from L1. In decode bound by DRAM reads of K (sizeof(S) bytes per 2 R FLOP), in prefill by FMAs.
  template <class S, int R, int K>
  static void dot_products(const float* query, int stride, const S* keys, int head_dim, float* scores) {
    V sums[kSums];
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) sums[i] = Vec::set(0.0f);
    const auto add = [&](int dim, int num_elements) {
      V q[R][2];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        q[r][0] = Vec::load(query + r * stride + dim);
        q[r][1] = Vec::load(query + r * stride + dim + kLanes);
      }
#pragma GCC unroll 16
      for (int k = 0; k < K; ++k) {
        V a, b;
        load_pair(keys + k * head_dim + dim, num_elements, a, b);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          sums[r * K + k] = Vec::fma(q[r][0], a, sums[r * K + k]);
          sums[r * K + k] = Vec::fma(q[r][1], b, sums[r * K + k]);
        }
      }
    };
    for_pairs(head_dim, add);
    store_sums<R, K>(sums, scores);
  }

  // The same with query and keys in 16 bits, [R, stride] and [K, head_dim]: exact products, summed in fp32.
  template <class S, int R, int K>
  static void dot_products_16_bit(const uint16_t* query, int stride, const S* keys, int head_dim, float* scores) {
    V sums[kSums];
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) sums[i] = Vec::set(0.0f);
    const auto add = [&](int dim, int num_elements) {
      typename Vec::Bits q[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) q[r] = Vec::load_bits(query + r * stride + dim, kPair);
#pragma GCC unroll 16
      for (int k = 0; k < K; ++k) {
        const int num_bits = D > 0 ? kPair : num_elements;
        const typename Vec::Bits part = Vec::load_bits(&keys[k * head_dim + dim].bits, num_bits);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[r * K + k] = Vec::dot(sums[r * K + k], q[r], part);
      }
    };
    for_pairs(head_dim, add);
    store_sums<R, K>(sums, scores);
  }

  // Each sum of lanes by the same tree, whatever its place, so that a score's bits are its row's and key's alone.
  template <int R, int K>
  static void store_sums(const V (&sums)[kSums], float* scores) {
    alignas(64) float totals[kSums];
    Vec::sum_lanes(sums, totals);
    for (int r = 0; r < R; ++r) __builtin_memcpy(scores + r * kScoreStride, totals + r * K, K * sizeof(float));
  }

  // output[r] += sum over keys [begin, end) of weights[r][key] * values[key], key after key. weights:
  // [R, kScoreStride]; values: [keys, head_dim]; output: [R, stride]. The sums of R rows times N pairs of vectors stay
  // in registers over the keys: AVX-512 16 sums + 4 values + 1 weight of 32, AVX2 8 + 2 + 1 of 16.
  // Fetches up to lines_per_step lines every 4 keys.
  template <class S, int R>
  static void add_values(const float* weights, const S* values, int begin, int end, int head_dim, float* output,
                         int stride, Lines& lines, int lines_per_step) {
    if (begin >= end) return;
    constexpr int N = R == 1 ? at_least_1(kSums / 4) : at_least_1(kSums / (2 * R));
    if constexpr (D > 0) head_dim = D;
    int dim = 0;
    for (; dim + N * kPair <= head_dim; dim += N * kPair) {
      add_value_part<S, R, N>(weights, values + dim, begin, end, head_dim, kPair, output + dim, stride, lines,
                              lines_per_step * N);
    }
    for (; dim < head_dim; dim += kPair) {
      add_value_part<S, R, 1>(weights, values + dim, begin, end, head_dim, smaller(kPair, head_dim - dim), output + dim,
                              stride, lines, lines_per_step);
    }
  }
  static constexpr int at_least_1(int n) { return n < 1 ? 1 : n; }

  template <class S, int R, int N>
  static void add_value_part(const float* weights, const S* values, int begin, int end, int head_dim, int num_elements,
                             float* output, int stride, Lines& lines, int lines_per_step) {
    V sums[R][2 * N];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < 2 * N; ++n) sums[r][n] = Vec::load(output + r * stride + n * kLanes);
    }
    const auto add = [&](int key) {
      V value[2 * N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        load_pair(values + static_cast<int64_t>(key) * head_dim + n * kPair, num_elements, value[2 * n],
                  value[2 * n + 1]);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const V weight = Vec::set(weights[r * kScoreStride + key]);
#pragma GCC unroll 8
        for (int n = 0; n < 2 * N; ++n) sums[r][n] = Vec::fma(weight, value[n], sums[r][n]);
      }
    };
    int key = begin;
    for (; key + 4 <= end; key += 4) {
      lines.fetch(lines_per_step);
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) add(key + k);
    }
    for (; key < end; ++key) add(key);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < 2 * N; ++n) Vec::store(output + r * stride + n * kLanes, sums[r][n]);
    }
  }
  // exp(logit - reference); 0 for a logit of minus infinity, 1 for logit = reference.
  static float weight(float logit, float reference) {
    if (logit == -__builtin_inff()) return 0.0f;
    return Vec::first(exp_not_above_0<Vec>(Vec::set(logit - reference)));
  }
};

}  // namespace mol
