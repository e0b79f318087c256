// Attention with AVX-512 and its bfloat16 dot product: for bfloat16 caches, twice the work per instruction on K and
// nothing to widen. It pays where VDPBF16PS runs at the full rate of an FMA: AMD Zen 4 and 5, not Intel up to
// Sapphire Rapids (half the rate). V stays in fp32, since weights in 16 bits would cost accuracy.
#include "attention_kernel.h"

#if MOL_HAVE_AVX512BF16
#include <immintrin.h>

namespace mol::avx512bf16 {
#include "attention_avx512_vec.h"

struct Vec : VecAvx512 {
  template <class C>
  static constexpr bool kHasDot16Bit = false;
  using Bits = __m512bh;
  static Bits load_bits(const uint16_t* p, int num_elements) {
    if (num_elements == 2 * kLanes) return reinterpret_cast<Bits>(_mm512_loadu_si512(p));
    return reinterpret_cast<Bits>(_mm512_maskz_loadu_epi16((1u << num_elements) - 1, p));
  }
  static V dot(V sum, Bits a, Bits b) { return _mm512_dpbf16_ps(sum, a, b); }
};
template <>
constexpr bool Vec::kHasDot16Bit<BFloat16> = true;

}  // namespace mol::avx512bf16

mol::AttentionKernel mol::attention_kernel_avx512bf16(const mol_attention_task& task) {
  if (task.cache_dtype == MOL_BFLOAT16) {
    return piece_kernel<avx512bf16::Vec, BFloat16>(task.head_dim);
  }
  return attention_kernel_avx512(task);  // nothing in it is made of bfloat16
}
#else
mol::AttentionKernel mol::attention_kernel_avx512bf16(const mol_attention_task&) { return {}; }
#endif
