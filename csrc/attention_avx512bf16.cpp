// Attention with AVX-512 and its bfloat16 dot product: for bfloat16 caches, twice the work per instruction on K and
// nothing to widen. It pays where VDPBF16PS runs at the full rate of an FMA: AMD Zen 4 and 5, not Intel up to
// Sapphire Rapids (half the rate). V stays in fp32, since weights in 16 bits would cost accuracy.
#include "attention_kernel.h"

#if MOL_HAVE_AVX512BF16
#include <immintrin.h>

namespace mol::avx512bf16 {
#include "avx512bf16_vec.h"
}

mol::AttentionKernel mol::attention_kernel_avx512bf16(const mol_attention_task& task) {
  if (task.cache_dtype == MOL_BFLOAT16) {
    return piece_kernel<avx512bf16::VecAvx512Bf16, BFloat16>(task.head_dim);
  }
  return attention_kernel_avx512(task);  // nothing in it is made of bfloat16
}
#else
mol::AttentionKernel mol::attention_kernel_avx512bf16(const mol_attention_task&) { return {}; }
#endif
