// What the dispatcher of the read probe (read_probe.cpp) and its loops for each instruction set (read_probe_loop.h)
// agree on.
#pragma once
#include <stdint.h>

#include "moe_lightning.h"

namespace mol {

// The sum of the 64-bit words of data[0 .. num_bytes), a last partial word filled up with zeros.
using SumWords = uint64_t (*)(const char* data, int64_t num_bytes);
// The loop for a MOL_READ_* pattern, or nullptr if this ISA is not compiled in.
SumWords sum_words_scalar(int32_t pattern);
SumWords sum_words_avx2(int32_t pattern);
SumWords sum_words_avx512(int32_t pattern);

}  // namespace mol
