// The expert FFN in plain C++, one lane; runs only when it is asked for by name.
#include <math.h>
#include <string.h>

#include "ffn_kernel.h"

namespace mol::scalar {
#include "scalar_vec.h"
}

mol::FfnKernel mol::ffn_kernel_scalar(int32_t dtype) { return ffn_kernel_for<scalar::VecScalar>(dtype); }
