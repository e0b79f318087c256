// Elements that are narrower than a float, as they lie in memory.
#pragma once
#include <stdint.h>

namespace mol {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
// Elements of a quantised cache: times the scale of their token and head. Int8 holds -127..127, Fp8 is e4m3.
struct Int8 {
  int8_t bits;
};
struct Fp8 {
  uint8_t bits;
};

}  // namespace mol
