// Attention with AVX-512 and its products of 8-bit integers: for int8 caches whose head_dim is a multiple of 64, four
// times the work per instruction and nothing to widen. A query is rounded to 15 bits of its greatest element, a chunk's
// weights (times V's scales) to 16 bits of their greatest: the only errors, since sums of integers are exact, in
// whatever order.
#include "attention_kernel.h"

#if MOL_HAVE_AVX512VNNI
#include <immintrin.h>

namespace mol::avx512vnni {
#include "avx512_vec.h"

constexpr float kLargestQuery = 127 * 128;  // high: -127..127, low: -64..63
constexpr float kLargestWeight = 65535;     // high and low byte
constexpr float kLargestFloat = 0x1.fffffep+127f;

struct Vec : VecAvx512 {
  template <class C>
  static constexpr bool kMultipliesIntegers = __is_same(C, Int8);

  static void quantise_query(const float* query, int head_dim, int row, Integers& target) {
    V greatest = set(0.0f);
    for (int dim = 0; dim < head_dim; dim += kLanes) greatest = larger_magnitude(greatest, load(query + dim));
    const float factor = factor_to(kLargestQuery, reduce_magnitude(greatest));
    __m512i sum = _mm512_setzero_si512();
    for (int dim = 0; dim < head_dim; dim += kLanes) {
      const __m512i whole = _mm512_cvtps_epi32(mul(load(query + dim), set(factor)));
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(64)), 7);
      const __m512i low = _mm512_sub_epi32(whole, _mm512_slli_epi32(high, 7));
      store_bytes(target.query_high + row * head_dim + dim, _mm512_cvtepi32_epi8(high));
      store_bytes(target.query_low + row * head_dim + dim, _mm512_cvtepi32_epi8(low));
      sum = _mm512_add_epi32(sum, whole);
    }
    target.query_units[row] = 1.0f / factor;
    target.query_sums[row] = _mm512_reduce_add_epi32(sum);
  }

  // scores[r][k] = query[row + r] . keys[k], without the keys' scales. VPDPBUSD takes one side unsigned: K with 128
  // added, for which 128 times the query's sum is taken off. The sums stay below 2^31 up to a head_dim of 256.
  template <int D, int R, int K>
  static void dot_products(const Integers& integers, int row, const Int8* keys, int head_dim, float* scores) {
    if constexpr (D > 0) head_dim = D;
    __m512i sums[kSums];
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) sums[i] = _mm512_setzero_si512();
    const auto add = [&](const int8_t* query) {
#pragma GCC unroll 4
      for (int dim = 0; dim < head_dim; dim += 64) {
        __m512i key[K];
#pragma GCC unroll 16
        for (int k = 0; k < K; ++k) {
          key[k] = _mm512_xor_si512(_mm512_loadu_si512(keys + k * head_dim + dim), _mm512_set1_epi8(-128));
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const __m512i part = _mm512_loadu_si512(query + r * head_dim + dim);
#pragma GCC unroll 16
          for (int k = 0; k < K; ++k) sums[r * K + k] = _mm512_dpbusd_epi32(sums[r * K + k], key[k], part);
        }
      }
    };
    add(integers.query_high + row * head_dim);
#pragma GCC unroll 16
    for (int i = 0; i < R * K; ++i) sums[i] = _mm512_slli_epi32(sums[i], 7);
    add(integers.query_low + row * head_dim);
    store_scores<R, K>(sums, integers, row, scores);
  }

  // The weights of a row for a chunk, as integers of 16 bits; returns their unit. NaN stays, by way of the unit. 8 bits
  // would do for even weights, but not beside a key that has nearly all the weight, as sink tokens do: the others
  // together count, and each would be rounded to nothing.
  static float quantise_weights(const V (&weights)[kKeysPerChunk / kLanes], uint8_t* high, uint8_t* low) {
    const float factor = factor_to(kLargestWeight, reduce_magnitude(larger_magnitude(weights[0], weights[1])));
    for (int i = 0; i < kKeysPerChunk / kLanes; ++i) {
      const __m512i rounded = _mm512_cvtps_epi32(mul(weights[i], set(factor)));
      const __m512i whole =
          _mm512_min_epu32(_mm512_max_epi32(rounded, _mm512_setzero_si512()), _mm512_set1_epi32(65535));
      store_bytes(high + i * kLanes, _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 8)));
      store_bytes(low + i * kLanes, _mm512_cvtepi32_epi8(whole));
    }
    return 1.0f / factor;
  }

  // output[r] += sum over the keys of weights[row + r][key] * values[key], in put_in_order's order; values:
  // [chunk_len, head_dim]. The bytes of 4 keys are interleaved, one 32-bit lane for 4 keys of a dim, as VPDPBUSD adds
  // them. High bytes first, low bytes in a second pass over the chunk, which is in L1: the sums of both would not fit
  // the registers, and stay below 2^31 (32 keys x 65535 x 127). Fetches up to lines_per_step lines every 4 keys and
  // pass.
  template <int D, int R>
  static void add_values(const Integers& integers, int row, const Int8* values, KeyRange keys, int chunk_len,
                         int head_dim, float* output, int stride, Lines& lines, int lines_per_step) {
    if constexpr (D > 0) head_dim = D;
    for (int dim = 0; dim < head_dim; dim += 64) {
      __m512i sums[R][4];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sums[r][i] = _mm512_setzero_si512();
      }
      const auto add = [&](const uint8_t* weights, int key, int key1, int key2, int key3) {
        const __m512i row0 = load_bytes(values + key * head_dim + dim),
                      row1 = load_bytes(values + key1 * head_dim + dim);
        const __m512i row2 = load_bytes(values + key2 * head_dim + dim),
                      row3 = load_bytes(values + key3 * head_dim + dim);
        const __m512i low01 = _mm512_unpacklo_epi8(row0, row1), high01 = _mm512_unpackhi_epi8(row0, row1);
        const __m512i low23 = _mm512_unpacklo_epi8(row2, row3), high23 = _mm512_unpackhi_epi8(row2, row3);
        const __m512i parts[4] = {_mm512_unpacklo_epi16(low01, low23), _mm512_unpackhi_epi16(low01, low23),
                                  _mm512_unpacklo_epi16(high01, high23), _mm512_unpackhi_epi16(high01, high23)};
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          int32_t four;
          __builtin_memcpy(&four, weights + r * kKeysPerChunk + key, sizeof four);
          const __m512i weight = _mm512_set1_epi32(four);
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) sums[r][i] = _mm512_dpbusd_epi32(sums[r][i], weight, parts[i]);
        }
      };
      const auto add_all = [&](const uint8_t* weights) {
        int key = keys.begin / 4 * 4;
        for (; key < keys.end && key + 4 <= chunk_len; key += 4) {
          lines.fetch(lines_per_step);
          add(weights, key, key + 1, key + 2, key + 3);
        }
        if (key < keys.end) {  // never the memory behind the block: the last key's, with weight zero
          add(weights, key, smaller(key + 1, chunk_len - 1), smaller(key + 2, chunk_len - 1), chunk_len - 1);
        }
      };
      add_all(integers.weights_high + row * kKeysPerChunk);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sums[r][i] = _mm512_slli_epi32(sums[r][i], 8);
      }
      add_all(integers.weights_low + row * kKeysPerChunk);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const V unit = set(integers.weight_units[row + r]);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          float* part = output + r * stride + dim + i * kLanes;
          store(part, fma(_mm512_cvtepi32_ps(sums[r][i]), unit, load(part)));
        }
      }
    }
  }

  // From the order in which add_values leaves the sums of each 64 dims: quarter by quarter of each 16 dims.
  static void put_in_order(float* output, int head_dim) {
    for (int dim = 0; dim < head_dim; dim += 64) {
      const V a = load(output + dim), b = load(output + dim + 16), c = load(output + dim + 32);
      const V d = load(output + dim + 48);
      const V low_ab = _mm512_shuffle_f32x4(a, b, 0x44), high_ab = _mm512_shuffle_f32x4(a, b, 0xee);
      const V low_cd = _mm512_shuffle_f32x4(c, d, 0x44), high_cd = _mm512_shuffle_f32x4(c, d, 0xee);
      store(output + dim, _mm512_shuffle_f32x4(low_ab, low_cd, 0x88));
      store(output + dim + 16, _mm512_shuffle_f32x4(low_ab, low_cd, 0xdd));
      store(output + dim + 32, _mm512_shuffle_f32x4(high_ab, high_cd, 0x88));
      store(output + dim + 48, _mm512_shuffle_f32x4(high_ab, high_cd, 0xdd));
    }
  }

 private:
  // Compared as integers, in which NaN is greater than all numbers.
  static V larger_magnitude(V a, V b) {
    return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(abs(a)), _mm512_castps_si512(abs(b))));
  }
  static float reduce_magnitude(V a) {
    const uint32_t bits = _mm512_reduce_max_epu32(_mm512_castps_si512(a));
    float greatest;
    __builtin_memcpy(&greatest, &bits, sizeof greatest);
    return greatest;
  }
  // What makes the greatest magnitude `largest`; finite, so that zeros stay zero; NaN if one element is NaN or
  // infinite.
  static float factor_to(float largest, float greatest) {
    if (!(greatest <= kLargestFloat)) return __builtin_nanf("");
    const float factor = largest / greatest;
    return factor > kLargestFloat ? kLargestFloat : factor;
  }

  static __m512i load_bytes(const Int8* p) { return _mm512_loadu_si512(p); }
  static void store_bytes(void* p, __m128i bytes) { _mm_storeu_si128(static_cast<__m128i*>(p), bytes); }

  template <int R, int K>
  static void store_scores(const __m512i (&sums)[kSums], const Integers& integers, int row, float* scores) {
    V lanes[kSums];
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) lanes[i] = _mm512_castsi512_ps(sums[i]);
    const __m512i totals = _mm512_castps_si512(sum_lanes_by(lanes, [](V a, V b) {
      return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
    }));
    // Lane r * K + k is of row r.
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i row_of_lane = _mm512_srli_epi32(lane, K == 1 ? 0 : K == 2 ? 1 : K == 4 ? 2 : K == 8 ? 3 : 4);
    const __m512i offsets = _mm512_slli_epi32(_mm512_loadu_si512(integers.query_sums + row), 7);
    const __m512i products = _mm512_sub_epi32(totals, _mm512_permutexvar_epi32(row_of_lane, offsets));
    const V units = _mm512_permutexvar_ps(row_of_lane, load(integers.query_units + row));
    alignas(64) float products_of_rows[kSums];
    store(products_of_rows, mul(_mm512_cvtepi32_ps(products), units));
    for (int r = 0; r < R; ++r) {
      __builtin_memcpy(scores + r * kScoreStride, products_of_rows + r * K, K * sizeof(float));
    }
  }
};

}  // namespace mol::avx512vnni

mol::AttentionKernel mol::attention_kernel_avx512vnni(const mol_attention_task& task) {
  if (task.cache_dtype == MOL_INT8 && task.head_dim % 64 == 0) {
    return piece_kernel<avx512vnni::Vec, Int8>(task.head_dim);
  }
  return attention_kernel_avx512(task);
}
#else
mol::AttentionKernel mol::attention_kernel_avx512vnni(const mol_attention_task&) { return {}; }
#endif
