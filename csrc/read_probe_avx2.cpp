// The read probe's loops with AVX2.
#include "read_probe_loop.h"

#if MOL_HAVE_AVX2
#include <immintrin.h>

namespace mol {
namespace {

struct Vec {
  using V = __m256i;

  static V zero() { return _mm256_setzero_si256(); }
  static V add(V a, V b) { return _mm256_add_epi64(a, b); }
  static V load(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const V*>(p)); }
  static uint64_t reduce(V a) {
    alignas(V) uint64_t lanes[4];
    _mm256_store_si256(reinterpret_cast<V*>(lanes), a);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
  }
};

}  // namespace

SumWords sum_words_avx2(int32_t pattern) { return sum_words_for<Vec>(pattern); }

}  // namespace mol
#else
namespace mol {
SumWords sum_words_avx2(int32_t) { return nullptr; }
}  // namespace mol
#endif
