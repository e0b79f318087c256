// AVX-512 with its bfloat16 dot product (VDPBF16PS): exact products of two elements at a time, summed in fp32. Included
// like avx512_vec.h.
#include "avx512_vec.h"

struct VecAvx512Bf16 : VecAvx512 {
  template <class C>
  static constexpr bool kHasDot16Bit = __is_same(C, mol::BFloat16);
  using Bits = __m512bh;
  static Bits load_bits(const uint16_t* p, int num_elements) {
    if (num_elements == 2 * kLanes) return reinterpret_cast<Bits>(_mm512_loadu_si512(p));
    return reinterpret_cast<Bits>(_mm512_maskz_loadu_epi16((1u << num_elements) - 1, p));
  }
  using VecAvx512::keep_in_register;
  static void keep_in_register(Bits& a) { __asm__("" : "+v"(a)); }
  static V dot(V sum, Bits a, Bits b) { return _mm512_dpbf16_ps(sum, a, b); }
};
