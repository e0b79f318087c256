// Attention with AVX-512 (F, BW, VL, DQ): 16 lanes, 32 registers. bfloat16 is widened to fp32 and multiplied there:
// VDPBF16PS runs at half the rate of fp32 FMA on the server CPUs we measured.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own intrinsics start from an "undefined" register and are warned about (GCC PR 105593); remove with GCC 13.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include "attention_kernel.h"

#if MOL_HAVE_AVX512
#include <immintrin.h>

namespace mol::avx512 {

struct Vec {
  using V = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kMaxRows = 4;

  static V set(float x) { return _mm512_set1_ps(x); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V add(V a, V b) { return _mm512_add_ps(a, b); }
  static V sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V div(V a, V b) { return _mm512_div_ps(a, b); }
  static V max(V a, V b) { return _mm512_max_ps(a, b); }
  static V abs(V a) { return _mm512_abs_ps(a); }
  static V copy_sign(V magnitude, V sign) {
    const V sign_bit = _mm512_set1_ps(-0.0f);
    return _mm512_or_ps(_mm512_andnot_ps(sign_bit, magnitude), _mm512_and_ps(sign_bit, sign));
  }
  static V round(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static V times_power_of_two(V a, V n) { return _mm512_scalef_ps(a, n); }
  static V zero_if_less(V x, V limit, V a) {
    return _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), _mm512_setzero_ps());
  }

  static V load(const float* p) { return _mm512_loadu_ps(p); }
  static V load(const BFloat16* p) { return widen(load_bits(p)); }
  static V load(const Float16* p) { return _mm512_cvtph_ps(load_bits(p)); }
  // 8 elements; the upper lanes are 0.
  static V load_half(const float* p) { return _mm512_zextps256_ps512(_mm256_loadu_ps(p)); }
  static V load_half(const BFloat16* p) { return widen(_mm256_zextsi128_si256(load_half_bits(p))); }
  static V load_half(const Float16* p) { return _mm512_cvtph_ps(_mm256_zextsi128_si256(load_half_bits(p))); }

  static void store(float* p, V a) { _mm512_storeu_ps(p, a); }
  static void store(BFloat16* p, V a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a)); }
  static void store(Float16* p, V a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_float16(a)); }
  static void store_half(float* p, V a) { _mm256_storeu_ps(p, _mm512_castps512_ps256(a)); }
  static void store_half(BFloat16* p, V a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(narrow(a)));
  }
  static void store_half(Float16* p, V a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(to_float16(a)));
  }

  static float first(V a) { return _mm512_cvtss_f32(a); }
  static float reduce_sum(V a) { return _mm512_reduce_add_ps(a); }
  static float reduce_max(V a) { return _mm512_reduce_max_ps(a); }
  // p[k] = sum of the lanes of sums[k], each by the same tree.
  static void store_sums(float* p, const V (&sums)[4]) {
    const V s01 = _mm512_add_ps(_mm512_unpacklo_ps(sums[0], sums[1]), _mm512_unpackhi_ps(sums[0], sums[1]));
    const V s23 = _mm512_add_ps(_mm512_unpacklo_ps(sums[2], sums[3]), _mm512_unpackhi_ps(sums[2], sums[3]));
    const V quads = _mm512_add_ps(_mm512_shuffle_ps(s01, s23, _MM_SHUFFLE(1, 0, 1, 0)),
                                  _mm512_shuffle_ps(s01, s23, _MM_SHUFFLE(3, 2, 3, 2)));
    const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quads), _mm512_extractf32x8_ps(quads, 1));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
  }

 private:
  static __m256i load_bits(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static __m128i load_half_bits(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static V widen(__m256i bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)); }
  static __m256i to_float16(V a) { return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // To bfloat16, nearest even; any NaN becomes the quiet one.
  static __m256i narrow(V a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  }
};

}  // namespace mol::avx512

mol::AttendTile mol::attend_tile_avx512(int32_t dtype) { return tile_kernel_for<avx512::Vec>(dtype); }
#else
mol::AttendTile mol::attend_tile_avx512(int32_t) { return nullptr; }
#endif
