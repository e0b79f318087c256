// The read probe's loops with AVX-512: a cache line in one load.
#include "read_probe_loop.h"

#if MOL_HAVE_AVX512
#include <immintrin.h>

namespace mol {
namespace {

struct Vec {
  using V = __m512i;

  static V zero() { return _mm512_setzero_si512(); }
  static V add(V a, V b) { return _mm512_add_epi64(a, b); }
  static V load(const char* p) { return _mm512_loadu_si512(p); }
  static uint64_t reduce(V a) {
    alignas(V) uint64_t lanes[8];
    _mm512_store_si512(lanes, a);
    uint64_t total = 0;
    for (uint64_t lane : lanes) total += lane;
    return total;
  }
};

}  // namespace

SumWords sum_words_avx512(int32_t pattern) { return sum_words_for<Vec>(pattern); }

}  // namespace mol
#else
namespace mol {
SumWords sum_words_avx512(int32_t) { return nullptr; }
}  // namespace mol
#endif
