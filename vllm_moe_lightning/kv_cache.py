"""The paged host KV cache of one attention layer, in our own layout.

Per block and key/value head: K of all the block's tokens, then V, row-major, so that a block is read in one go and a
device-to-host copy stays a plain copy. Allocation and block ids belong to whoever owns the pool (vLLM's block manager).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class HostKvCache:
    name: str
    blocks: torch.Tensor
    """[num_blocks, num_kv_heads, 2 (K, V), block_size, head_dim], contiguous, in host memory."""

    @classmethod
    def over(cls, name: str, storage: torch.Tensor, num_kv_heads: int, block_size: int, head_dim: int) -> HostKvCache:
        """The cache over memory that was allocated elsewhere (any shape; the bytes are ours)."""
        block_numel = num_kv_heads * 2 * block_size * head_dim
        if storage.device.type != "cpu":
            raise ValueError(f"KV cache of {name} must be in host memory, got device {storage.device}")
        if not storage.is_contiguous() or storage.numel() % block_numel:
            raise ValueError(
                f"KV cache of {name}: shape {tuple(storage.shape)}, stride {storage.stride()} is not whole blocks of "
                f"{num_kv_heads} heads x 2 x {block_size} tokens x {head_dim}"
            )
        return cls(name, storage.view(-1, num_kv_heads, 2, block_size, head_dim))

    @property
    def num_blocks(self) -> int:
        return self.blocks.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.blocks.shape[1]

    @property
    def block_size(self) -> int:
        return self.blocks.shape[3]

    @property
    def head_dim(self) -> int:
        return self.blocks.shape[4]

    @property
    def block_bytes(self) -> int:
        return self.blocks[0].numel() * self.blocks.element_size()


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, element_bytes: int) -> int:
    """K and V of one token in all layers: key/value heads, not query heads."""
    return 2 * num_layers * num_kv_heads * head_dim * element_bytes
