// The expert FFN with AVX2, FMA and F16C.
#include "ffn_kernel.h"

#if MOL_HAVE_AVX2
#include <immintrin.h>

namespace mol::avx2 {
#include "avx2_vec.h"
}

mol::FfnKernel mol::ffn_kernel_avx2(int32_t dtype) { return ffn_kernel_for<avx2::VecAvx2>(dtype); }
#else
mol::FfnKernel mol::ffn_kernel_avx2(int32_t) { return {}; }
#endif
