// The vector operations of AVX2, FMA and F16C: 8 lanes, 16 registers. Included by translation units of that instruction
// set, into a namespace of theirs, so that no code of one runs in the other.
struct VecAvx2 : mol::VecDefaults {
  using V = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kSums = 8;
  template <class T>
  static constexpr bool kIsInterleaved = __is_same(T, mol::BFloat16);

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
  static void store(float* p, V a) { _mm256_storeu_ps(p, a); }
  // Else the compiler reads it from memory again for each of its uses, and the loads become the bottleneck.
  static void keep_in_register(V& a) { __asm__("" : "+x"(a)); }

  static void load_pair(const float* p, V& a, V& b) { a = _mm256_loadu_ps(p), b = _mm256_loadu_ps(p + 8); }
  static void load_pair(const mol::BFloat16* p, V& a, V& b) { widen_bfloat16(load_bits256(p), a, b); }
  static void load_pair(const mol::Float16* p, V& a, V& b) {
    a = _mm256_cvtph_ps(load_bits128(p)), b = _mm256_cvtph_ps(load_bits128(p + 8));
  }
  static void load_pair(const mol::Int8* p, V& a, V& b) { widen_int8(load_bits128(p), a, b); }
  static void load_pair(const mol::Fp8* p, V& a, V& b) { widen_fp8(load_bits128(p), a, b); }

  // Of 16 elements, num_elements is always 8: the rest is 0.
  static void load_part(const float* p, int, V& a, V& b) { a = _mm256_loadu_ps(p), b = _mm256_setzero_ps(); }
  static void load_part(const mol::BFloat16* p, int, V& a, V& b) {
    widen_bfloat16(_mm256_zextsi128_si256(load_bits128(p)), a, b);
  }
  static void load_part(const mol::Float16* p, int, V& a, V& b) {
    a = _mm256_cvtph_ps(load_bits128(p)), b = _mm256_setzero_ps();
  }
  static void load_part(const mol::Int8* p, int, V& a, V& b) { widen_int8(load_bits64(p), a, b); }
  static void load_part(const mol::Fp8* p, int, V& a, V& b) { widen_fp8(load_bits64(p), a, b); }

  static void store_pair(float* p, V a, V b) { _mm256_storeu_ps(p, a), _mm256_storeu_ps(p + 8, b); }
  static void store_pair(mol::BFloat16* p, V a, V b) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bfloat16(a, b));
  }
  static void store_pair(mol::Float16* p, V a, V b) {
    store_bits128(p, narrow_float16(a));
    store_bits128(p + 8, narrow_float16(b));
  }
  static void store_part(float* p, int, V a, V) { _mm256_storeu_ps(p, a); }
  static void store_part(mol::BFloat16* p, int, V a, V b) {
    store_bits128(p, _mm256_castsi256_si128(narrow_bfloat16(a, b)));
  }
  static void store_part(mol::Float16* p, int, V a, V) { store_bits128(p, narrow_float16(a)); }

  // Between even and odd elements, as load_pair gives for bfloat16, and the first and second half.
  static void interleave(V& a, V& b) {
    const V low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
    a = _mm256_permute2f128_ps(low, high, 0x20), b = _mm256_permute2f128_ps(low, high, 0x31);
  }
  static void deinterleave(V& a, V& b) {
    const V low = _mm256_permute2f128_ps(a, b, 0x20), high = _mm256_permute2f128_ps(a, b, 0x31);
    a = _mm256_shuffle_ps(low, high, 0x88), b = _mm256_shuffle_ps(low, high, 0xdd);
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
  // totals[i] = sum of the lanes of sums[i], each by the same tree.
  static void sum_lanes(const V (&sums)[kSums], float* totals) {
    const V low = _mm256_hadd_ps(_mm256_hadd_ps(sums[0], sums[1]), _mm256_hadd_ps(sums[2], sums[3]));
    const V high = _mm256_hadd_ps(_mm256_hadd_ps(sums[4], sums[5]), _mm256_hadd_ps(sums[6], sums[7]));
    _mm256_storeu_ps(totals,
                     _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)));
  }

 private:
  static __m128i load_bits64(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
  static __m128i load_bits128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static __m256i load_bits256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static void store_bits128(void* p, __m128i bits) { _mm_storeu_si128(static_cast<__m128i*>(p), bits); }
  // Even elements, odd elements.
  static void widen_bfloat16(__m256i bits, V& a, V& b) {
    a = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    b = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static void widen_int8(__m128i bytes, V& a, V& b) {
    a = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    b = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)));
  }
  // Sign, exponent and mantissa moved to their places in float16, which makes it 2^-8 of the value (kElementUnit).
  static void widen_fp8(__m128i bytes, V& a, V& b) {
    const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    const __m256i halves = _mm256_and_si256(shifted, _mm256_set1_epi16(static_cast<short>(0xbfff)));
    a = _mm256_cvtph_ps(_mm256_castsi256_si128(halves)), b = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
  }
  // To the upper halves of 32 bits, nearest even; any NaN becomes the quiet one.
  static __m256i round_to_bfloat16(V a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), is_nan);
  }
  static __m256i narrow_bfloat16(V a, V b) {
    return _mm256_blend_epi16(_mm256_srli_epi32(round_to_bfloat16(a), 16), round_to_bfloat16(b), 0xaa);
  }
  static __m128i narrow_float16(V a) { return _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
};
