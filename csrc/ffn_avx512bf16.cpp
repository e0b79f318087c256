// The expert FFN with AVX-512 and its bfloat16 dot product, which has twice the FLOP of an FMA and leaves nothing to
// widen: 16 tokens at the speed of memory need it. Pays where it runs at the full rate, see attention_avx512bf16.cpp.
#include "ffn_kernel.h"

#if MOL_HAVE_AVX512BF16
#include <immintrin.h>

namespace mol::avx512bf16 {
#include "avx512bf16_vec.h"
}

mol::FfnKernel mol::ffn_kernel_avx512bf16(int32_t dtype) {
  if (dtype == MOL_BFLOAT16) return ffn_piece_kernel<avx512bf16::VecAvx512Bf16, BFloat16>();
  return ffn_kernel_avx512(dtype);  // nothing in it is made of bfloat16
}
#else
mol::FfnKernel mol::ffn_kernel_avx512bf16(int32_t) { return {}; }
#endif
