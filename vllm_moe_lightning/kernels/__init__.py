"""CPU attention over the paged host KV cache and the expert FFN: the C++ kernels' Python faces, their references."""
