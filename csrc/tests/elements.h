// The element types of the kernels, decoded independently of the library: to double, exactly.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>

#include "check.h"

inline int64_t element_bytes(int32_t dtype) {
  return dtype == MOL_FLOAT32 ? 4 : dtype == MOL_BFLOAT16 || dtype == MOL_FLOAT16 ? 2 : 1;
}

// A number of sign, exponent and mantissa fields; the greatest exponent's are infinity or NaN.
inline double decoded(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const int exponent = static_cast<int>(bits >> mantissa_bits & ((1u << exponent_bits) - 1));
  const double units = exponent == 0 ? mantissa : mantissa + std::ldexp(1.0, mantissa_bits);
  const double magnitude = std::ldexp(units, (exponent == 0 ? 1 : exponent) - bias - mantissa_bits);
  return bits >> (exponent_bits + mantissa_bits) & 1 ? -magnitude : magnitude;
}

inline double decoded(const void* element, int32_t dtype) {
  uint8_t byte;
  uint16_t half;
  float single;
  switch (dtype) {
    case MOL_FLOAT32:
      std::memcpy(&single, element, sizeof single);
      return single;
    case MOL_BFLOAT16:
      std::memcpy(&half, element, sizeof half);
      return (half & 0x7f80) == 0x7f80 ? NAN : decoded(half, 8, 7);
    case MOL_FLOAT16:
      std::memcpy(&half, element, sizeof half);
      return (half & 0x7c00) == 0x7c00 ? NAN : decoded(half, 5, 10);
    case MOL_INT8:
      std::memcpy(&byte, element, sizeof byte);
      return static_cast<int8_t>(byte);
    default:  // e4m3 has no infinity, and one NaN of each sign
      std::memcpy(&byte, element, sizeof byte);
      return (byte & 0x7f) == 0x7f ? NAN : decoded(byte, 4, 3);
  }
}

// In (-2, 2); a 16-bit type gets any of its numbers between 2^-6 and 2 in magnitude.
inline void write_random(void* element, int32_t dtype, std::mt19937& random) {
  if (dtype == MOL_FLOAT32) {
    const float value = std::uniform_real_distribution<float>(-2.0f, 2.0f)(random);
    std::memcpy(element, &value, sizeof value);
    return;
  }
  const int mantissa_bits = dtype == MOL_BFLOAT16 ? 7 : 10, bias = dtype == MOL_BFLOAT16 ? 127 : 15;
  const uint32_t bits = random(), exponent = bias - 6 + (bits >> 16) % 7;
  const uint16_t half =
      static_cast<uint16_t>((bits & 0x8000) | exponent << mantissa_bits | (bits & ((1u << mantissa_bits) - 1)));
  std::memcpy(element, &half, sizeof half);
}

// How far a result of this type may lie from the exact one: half a unit in its last place, and what fp32 sums lose.
inline double tolerance(double exact, int32_t dtype) {
  const double unit = dtype == MOL_FLOAT32 ? 0.0 : dtype == MOL_BFLOAT16 ? 0x1p-8 : 0x1p-11;
  return std::fabs(exact) * unit + 2e-5 * (1.0 + std::fabs(exact));
}
