// The vector operations of AVX-512 (F, BW, VL, DQ): 16 lanes, 32 registers. bfloat16 is widened to fp32 and multiplied
// there; attention_avx512bf16.cpp adds the dot product in 16 bits. Included by one translation unit per instruction
// set, into its own namespace, so that no code of one runs in the other.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own intrinsics start from an "undefined" register and are warned about (GCC PR 105593); remove with GCC 13.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
struct VecAvx512 : mol::VecDefaults {
  using V = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kSums = 16;
  template <class T>
  static constexpr bool kIsInterleaved = __is_same(T, mol::BFloat16);

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
  static void store(float* p, V a) { _mm512_storeu_ps(p, a); }
  // Else the compiler reads it from memory again for each of its uses, and the loads become the bottleneck.
  static void keep_in_register(V& a) { __asm__("" : "+v"(a)); }

  static void load_pair(const float* p, V& a, V& b) { a = _mm512_loadu_ps(p), b = _mm512_loadu_ps(p + 16); }
  static void load_pair(const mol::BFloat16* p, V& a, V& b) { widen_bfloat16(_mm512_loadu_si512(p), a, b); }
  static void load_pair(const mol::Float16* p, V& a, V& b) { widen_float16(_mm512_loadu_si512(p), a, b); }
  static void load_pair(const mol::Int8* p, V& a, V& b) {
    a = widen_int8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    b = widen_int8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)));
  }
  static void load_pair(const mol::Fp8* p, V& a, V& b) {
    widen_fp8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), a, b);
  }

  // num_elements 8, 16 or 24: the rest is 0.
  static void load_part(const float* p, int num_elements, V& a, V& b) {
    a = _mm512_maskz_loadu_ps(mask16(num_elements), p);
    b = _mm512_maskz_loadu_ps(mask16(num_elements - 16), p + 16);
  }
  static void load_part(const mol::BFloat16* p, int num_elements, V& a, V& b) {
    widen_bfloat16(_mm512_maskz_loadu_epi16(mask32(num_elements), p), a, b);
  }
  static void load_part(const mol::Float16* p, int num_elements, V& a, V& b) {
    widen_float16(_mm512_maskz_loadu_epi16(mask32(num_elements), p), a, b);
  }
  static void load_part(const mol::Int8* p, int num_elements, V& a, V& b) {
    const __m256i bytes = _mm256_maskz_loadu_epi8(mask32(num_elements), p);
    a = widen_int8(_mm256_castsi256_si128(bytes)), b = widen_int8(_mm256_extracti128_si256(bytes, 1));
  }
  static void load_part(const mol::Fp8* p, int num_elements, V& a, V& b) {
    widen_fp8(_mm256_maskz_loadu_epi8(mask32(num_elements), p), a, b);
  }

  static void store_pair(float* p, V a, V b) { _mm512_storeu_ps(p, a), _mm512_storeu_ps(p + 16, b); }
  static void store_pair(mol::BFloat16* p, V a, V b) { _mm512_storeu_si512(p, narrow_bfloat16(a, b)); }
  static void store_pair(mol::Float16* p, V a, V b) { _mm512_storeu_si512(p, narrow_float16(a, b)); }
  static void store_part(float* p, int num_elements, V a, V b) {
    _mm512_mask_storeu_ps(p, mask16(num_elements), a);
    _mm512_mask_storeu_ps(p + 16, mask16(num_elements - 16), b);
  }
  static void store_part(mol::BFloat16* p, int num_elements, V a, V b) {
    _mm512_mask_storeu_epi16(p, mask32(num_elements), narrow_bfloat16(a, b));
  }
  static void store_part(mol::Float16* p, int num_elements, V a, V b) {
    _mm512_mask_storeu_epi16(p, mask32(num_elements), narrow_float16(a, b));
  }

  // Between even and odd elements, as load_pair gives for bfloat16, and the first and second half.
  static void interleave(V& a, V& b) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const V first = _mm512_permutex2var_ps(a, low, b);
    b = _mm512_permutex2var_ps(a, high, b), a = first;
  }
  static void deinterleave(V& a, V& b) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const V first = _mm512_permutex2var_ps(a, even, b);
    b = _mm512_permutex2var_ps(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b), a = first;
  }

  static float first(V a) { return _mm512_cvtss_f32(a); }
  static float reduce_sum(V a) { return _mm512_reduce_add_ps(a); }
  static float reduce_max(V a) { return _mm512_reduce_max_ps(a); }

  // totals[i] = sum of the lanes of sums[i], each by the same tree: a transposition by halves, adding as it goes.
  static void sum_lanes(const V (&sums)[kSums], float* totals) {
    _mm512_storeu_ps(totals, sum_lanes_by(sums, [](V a, V b) { return _mm512_add_ps(a, b); }));
  }

 protected:
  template <class Add>
  static V sum_lanes_by(const V (&sums)[kSums], Add add) {
    V pairs[8], quads[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      pairs[i] =
          add(_mm512_unpacklo_ps(sums[2 * i], sums[2 * i + 1]), _mm512_unpackhi_ps(sums[2 * i], sums[2 * i + 1]));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      quads[i] = add(_mm512_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], _MM_SHUFFLE(1, 0, 1, 0)),
                     _mm512_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], _MM_SHUFFLE(3, 2, 3, 2)));
    }
    const V low = add(_mm512_shuffle_f32x4(quads[0], quads[1], 0x88), _mm512_shuffle_f32x4(quads[0], quads[1], 0xdd));
    const V high = add(_mm512_shuffle_f32x4(quads[2], quads[3], 0x88), _mm512_shuffle_f32x4(quads[2], quads[3], 0xdd));
    return add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
  }

  static __mmask16 mask16(int n) { return n <= 0 ? 0 : n >= 16 ? 0xffff : static_cast<__mmask16>((1u << n) - 1); }
  static __mmask32 mask32(int n) { return (1u << n) - 1; }
  // Even elements, odd elements.
  static void widen_bfloat16(__m512i bits, V& a, V& b) {
    a = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    b = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static void widen_float16(__m512i bits, V& a, V& b) {
    a = _mm512_cvtph_ps(_mm512_castsi512_si256(bits)), b = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1));
  }
  static V widen_int8(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
  // Sign, exponent and mantissa moved to their places in float16, which makes it 2^-8 of the value (kElementUnit).
  static void widen_fp8(__m256i bytes, V& a, V& b) {
    const __m512i shifted = _mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 7);
    widen_float16(_mm512_and_si512(shifted, _mm512_set1_epi16(static_cast<short>(0xbfff))), a, b);
  }
  // To the upper halves of 32 bits, nearest even; any NaN becomes the quiet one.
  static __m512i round_to_bfloat16(V a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
  }
  static __m512i narrow_bfloat16(V a, V b) {
    return _mm512_mask_mov_epi16(_mm512_srli_epi32(round_to_bfloat16(a), 16), 0xaaaaaaaa, round_to_bfloat16(b));
  }
  static __m512i narrow_float16(V a, V b) {
    const __m256i low = _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256i high = _mm512_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
};
