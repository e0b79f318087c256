"""A paged KV cache of 8-bit elements with one scale per token and head, for keys and values apart.

Per block and key/value head, one run of memory: K of all the block's tokens, their V, then the tokens' K scales and V
scales in fp32 (csrc/moe_lightning.h). The kernels quantise on append; relative RMS error of attention against the cache
before quantisation is about 0.01 for int8 and 0.04 for fp8 on Gaussian keys and values (tests/unit/kernels).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_moe_lightning.kv_cache_type import ElementKind, quantised_row_bytes


def head_block_bytes(block_size: int, head_dim: int) -> int:
    """Bytes of one key/value head in one block: 8-bit K and V, and a scale for each."""
    return 2 * block_size * quantised_row_bytes(head_dim)


@dataclass(frozen=True)
class QuantisedCache:
    blocks: torch.Tensor
    """[num_blocks, num_kv_heads, head_block_bytes] uint8, contiguous, in host memory."""
    kind: ElementKind
    block_size: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.kind not in ("int8", "fp8"):
            raise ValueError(f"kind of a quantised cache must be 'int8' or 'fp8', got {self.kind!r}")
        expected = head_block_bytes(self.block_size, self.head_dim)
        if self.blocks.dim() != 3 or self.blocks.dtype != torch.uint8 or self.blocks.shape[2] != expected:
            raise ValueError(
                f"a {self.kind} cache of {self.block_size} tokens of {self.head_dim} must be "
                f"[num_blocks, num_kv_heads, {expected}] of uint8, got {list(self.blocks.shape)} of {self.blocks.dtype}"
            )

    @classmethod
    def empty(
        cls, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, kind: ElementKind
    ) -> QuantisedCache:
        shape = (num_blocks, num_kv_heads, head_block_bytes(block_size, head_dim))
        return cls(torch.empty(shape, dtype=torch.uint8), kind, block_size, head_dim)

    def dequantised(self) -> torch.Tensor:
        """[num_blocks, num_kv_heads, 2 (K, V), block_size, head_dim] float32: what the kernels attend to."""
        num_blocks, num_kv_heads, _ = self.blocks.shape
        num_elements = 2 * self.block_size * self.head_dim
        elements = self.blocks[..., :num_elements].contiguous()
        elements = elements.view(torch.int8 if self.kind == "int8" else torch.float8_e4m3fn)
        scales = self.blocks[..., num_elements:].contiguous().view(torch.float32)
        shape = (num_blocks, num_kv_heads, 2, self.block_size)
        return elements.float().view(*shape, self.head_dim) * scales.view(*shape, 1)
