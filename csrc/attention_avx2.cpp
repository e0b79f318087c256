// Attention with AVX2, FMA and F16C.
#include "attention_kernel.h"

#if MOL_HAVE_AVX2
#include <immintrin.h>

namespace mol::avx2 {
#include "avx2_vec.h"
}

mol::AttentionKernel mol::attention_kernel_avx2(const mol_attention_task& task) {
  return kernel_for_task<avx2::VecAvx2>(task);
}
#else
mol::AttentionKernel mol::attention_kernel_avx2(const mol_attention_task&) { return {}; }
#endif
