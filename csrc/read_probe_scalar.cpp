// The read probe's loops for any CPU.
#include "read_probe_loop.h"

namespace mol {
namespace {

struct Vec {
  using V = uint64_t;

  static V zero() { return 0; }
  static V add(V a, V b) { return a + b; }
  static V load(const char* p) {
    V word;
    memcpy(&word, p, sizeof word);
    return word;
  }
  static uint64_t reduce(V a) { return a; }
};

}  // namespace

SumWords sum_words_scalar(int32_t pattern) { return sum_words_for<Vec>(pattern); }

}  // namespace mol
