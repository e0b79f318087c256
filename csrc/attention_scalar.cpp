// Attention in plain C++, one lane: runs anywhere, slow, and runs only when it is asked for by name. The place to read
// what the vector operations mean.
#include <math.h>
#include <string.h>

#include "attention_kernel.h"

namespace mol::scalar {
#include "scalar_vec.h"
}

mol::AttentionKernel mol::attention_kernel_scalar(const mol_attention_task& task) {
  return kernel_for_task<scalar::VecScalar>(task);
}
