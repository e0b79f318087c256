// Attention with AVX-512 and its bfloat16 dot product: for bfloat16 caches, twice the work per instruction on K and
// nothing to widen; for fp8 caches under bfloat16 queries, elements become bfloat16, exactly, by a table in registers.
// It pays where VDPBF16PS runs at the full rate of an FMA: AMD Zen 4 and 5, not Intel up to Sapphire Rapids (half the
// rate). V stays in fp32, since weights in 16 bits would cost accuracy.
#include "attention_kernel.h"

#if MOL_HAVE_AVX512BF16
#include <immintrin.h>

namespace mol::avx512bf16 {
#include "avx512bf16_vec.h"

// The two bytes of the bfloat16 that equals an e4m3 magnitude.
struct alignas(64) Fp8Table {
  uint8_t low[128] = {}, high[128] = {}, halves[64] = {};
  constexpr Fp8Table() {
    for (int magnitude = 1; magnitude < 128; ++magnitude) {
      const int exponent = magnitude >> 3, mantissa = magnitude & 7;
      int bits = (exponent + 120) << 7 | mantissa << 4;
      if (exponent == 0) {  // a multiple of 2^-9
        const int log2 = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;
        bits = (log2 + 118) << 7 | (mantissa << (7 - log2) & 0x7f);
      }
      if (magnitude == 127) bits = 0x7fc0;  // NaN
      low[magnitude] = bits & 0xff, high[magnitude] = bits >> 8;
    }
    for (int byte = 0; byte < 64; ++byte) halves[byte] = byte / 2;
  }
};
constexpr Fp8Table kFp8Table;

struct Vec : VecAvx512Bf16 {
  template <class C>
  static constexpr bool kHasDot16Bit = __is_same(C, BFloat16) || __is_same(C, Fp8);
  template <class T>
  static constexpr bool kIsInterleaved = __is_same(T, BFloat16) || __is_same(T, Fp8);
  template <class C>
  static constexpr float kElementUnit = 1.0f;
  using VecAvx512Bf16::load_bits;
  static Bits load_bits(const uint8_t* p, int num_elements) {
    const bool is_whole = num_elements == 2 * kLanes;
    const __m256i bytes = is_whole ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))
                                   : _mm256_maskz_loadu_epi8((1u << num_elements) - 1, p);
    return reinterpret_cast<Bits>(bfloat16_of_fp8(bytes));
  }

  using VecAvx512Bf16::load_pair, VecAvx512Bf16::load_part;
  static void load_pair(const Fp8* p, V& a, V& b) { load_part(p, 2 * kLanes, a, b); }
  static void load_part(const Fp8* p, int num_elements, V& a, V& b) {
    widen_bfloat16(reinterpret_cast<__m512i>(load_bits(&p->bits, num_elements)), a, b);
  }

 private:
  // Each byte stands in both halves of its 16 bits, to be looked up once for each.
  static __m512i bfloat16_of_fp8(__m256i bytes) {
    const __m512i halves = _mm512_load_si512(kFp8Table.halves);
    const __m512i twice = _mm512_permutexvar_epi8(halves, _mm512_castsi256_si512(bytes));
    const __m512i with_high = _mm512_mask2_permutex2var_epi8(
        _mm512_load_si512(kFp8Table.high), twice, 0xaaaaaaaaaaaaaaaa, _mm512_load_si512(kFp8Table.high + 64));
    const __m512i magnitude = _mm512_mask2_permutex2var_epi8(_mm512_load_si512(kFp8Table.low), with_high,
                                                             0x5555555555555555, _mm512_load_si512(kFp8Table.low + 64));
    // magnitude | (twice & sign)
    return _mm512_ternarylogic_epi32(magnitude, twice, _mm512_set1_epi16(static_cast<short>(0x8000)), 0xf8);
  }
};

}  // namespace mol::avx512bf16

mol::AttentionKernel mol::attention_kernel_avx512bf16(const mol_attention_task& task) {
  if (task.cache_dtype == MOL_BFLOAT16) {
    return piece_kernel<avx512bf16::Vec, BFloat16>(task.head_dim);
  }
  if (task.cache_dtype == MOL_FP8_E4M3 && task.dtype == MOL_BFLOAT16) {
    return piece_kernel<avx512bf16::Vec, Fp8>(task.head_dim);
  }
  return attention_kernel_avx512(task);  // nothing in it is made of bfloat16
}
#else
mol::AttentionKernel mol::attention_kernel_avx512bf16(const mol_attention_task&) { return {}; }
#endif
