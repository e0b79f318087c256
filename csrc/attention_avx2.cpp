// Attention with AVX2, FMA and F16C: 8 lanes, 16 registers.
#include "attention_kernel.h"

#if MOL_HAVE_AVX2
#include <immintrin.h>

namespace mol::avx2 {

struct Vec {
  using V = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kMaxRows = 2;

  static V set(float x) { return _mm256_set1_ps(x); }
  static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V add(V a, V b) { return _mm256_add_ps(a, b); }
  static V sub(V a, V b) { return _mm256_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static V div(V a, V b) { return _mm256_div_ps(a, b); }
  static V max(V a, V b) { return _mm256_max_ps(a, b); }
  static V abs(V a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  static V copy_sign(V magnitude, V sign) {
    const V sign_bit = _mm256_set1_ps(-0.0f);
    return _mm256_or_ps(_mm256_andnot_ps(sign_bit, magnitude), _mm256_and_ps(sign_bit, sign));
  }
  static V round(V a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static V times_power_of_two(V a, V n) {  // n >= -126, else zero_if_less drops the result
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
  }
  static V zero_if_less(V x, V limit, V a) { return _mm256_andnot_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ), a); }

  static V load(const float* p) { return _mm256_loadu_ps(p); }
  static V load(const BFloat16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_bits(p)), 16));
  }
  static V load(const Float16* p) { return _mm256_cvtph_ps(load_bits(p)); }

  static void store(float* p, V a) { _mm256_storeu_ps(p, a); }
  // To bfloat16, nearest even; any NaN becomes the quiet one.
  static void store(BFloat16* p, V a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), is_nan);
    rounded = _mm256_srli_epi32(rounded, 16);
    store_bits(p, _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1)));
  }
  static void store(Float16* p, V a) {
    store_bits(p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  static float first(V a) { return _mm256_cvtss_f32(a); }
  static float reduce_sum(V a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  static float reduce_max(V a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
  }
  // p[k] = sum of the lanes of sums[k], each by the same tree.
  static void store_sums(float* p, const V (&sums)[4]) {
    const V quads = _mm256_hadd_ps(_mm256_hadd_ps(sums[0], sums[1]), _mm256_hadd_ps(sums[2], sums[3]));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps(quads, 1)));
  }

 private:
  static __m128i load_bits(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static void store_bits(void* p, __m128i bits) { _mm_storeu_si128(static_cast<__m128i*>(p), bits); }
};

}  // namespace mol::avx2

mol::AttendTile mol::attend_tile_avx2(int32_t dtype) { return tile_kernel_for<avx2::Vec>(dtype); }
#else
mol::AttendTile mol::attend_tile_avx2(int32_t) { return nullptr; }
#endif
