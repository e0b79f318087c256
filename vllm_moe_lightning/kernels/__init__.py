"""CPU attention over the paged host KV cache and the expert FFN: the C++ kernels' Python faces, their references.

And paged_fused_moe, in Triton: the experts on a GPU, found through a page table."""
