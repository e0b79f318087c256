// What all instruction sets' vector operations share (scalar_vec.h has the plainest ones).
#pragma once
#include "elements.h"

namespace mol {

// What an instruction set need not have; one that has it says so under the same name.
struct VecDefaults {
  // Whether dot products are taken from elements of C in 16 bits, by dot(); from bytes, by whole numbers.
  template <class C>
  static constexpr bool kHasDot16Bit = false;
  template <class C>
  static constexpr bool kMultipliesIntegers = false;
  // Fp8 elements are widened through float16, whose exponent is biased by 8 more.
  template <class C>
  static constexpr float kElementUnit = __is_same(C, Fp8) ? 256.0f : 1.0f;
};

// exp(x) for x <= 0, to 2 units in the last place; 0 below the smallest normal number; NaN stays NaN.
// x = n ln 2 + r, the polynomial is the classic Cephes one for exp(r), |r| <= ln(2) / 2.
template <class Vec>
typename Vec::V exp_not_above_0(typename Vec::V x) {
  using V = typename Vec::V;
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

}  // namespace mol
