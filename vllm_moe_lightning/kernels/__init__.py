"""CPU attention over the paged host KV cache: the C++ kernels' Python face and their fp32 reference."""
