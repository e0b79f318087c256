// Attention with AVX-512 (F, BW, VL, DQ).
#include "attention_kernel.h"

#if MOL_HAVE_AVX512
#include <immintrin.h>

namespace mol::avx512 {
#include "avx512_vec.h"
}

mol::AttentionKernel mol::attention_kernel_avx512(const mol_attention_task& task) {
  return kernel_for_task<avx512::VecAvx512>(task);
}
#else
mol::AttentionKernel mol::attention_kernel_avx512(const mol_attention_task&) { return {}; }
#endif
