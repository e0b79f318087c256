// The expert FFN with AVX-512 (F, BW, VL, DQ).
#include "ffn_kernel.h"

#if MOL_HAVE_AVX512
#include <immintrin.h>

namespace mol::avx512 {
#include "avx512_vec.h"
}

mol::FfnKernel mol::ffn_kernel_avx512(int32_t dtype) { return ffn_kernel_for<avx512::VecAvx512>(dtype); }
#else
mol::FfnKernel mol::ffn_kernel_avx512(int32_t) { return {}; }
#endif
