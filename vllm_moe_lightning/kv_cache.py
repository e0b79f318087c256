"""The paged host KV cache of one attention layer, in our own layout.

Per block and key/value head: K of all the block's tokens, then V, row-major, so that a block is read in one go and a
device-to-host copy stays a plain copy; in 8 bits with the scales behind them (kernels/quantised_cache.py). Allocation
and block ids belong to whoever owns the pool (vLLM's block manager).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_moe_lightning.kernels.quantised_cache import QuantisedCache
from vllm_moe_lightning.kv_cache_type import ElementKind, row_bytes

PREFERRED_BLOCK_SIZE = 128  # tokens: long runs of K and V for the kernel; what vLLM's CPU platform takes too


@dataclass(frozen=True)
class HostKvCache:
    name: str
    blocks: torch.Tensor
    """[num_blocks, num_kv_heads, 2 (K, V), block_size, head_dim], or quantised [num_blocks, num_kv_heads,
    head_block_bytes] uint8; contiguous, in host memory."""
    block_size: int
    head_dim: int
    kind: ElementKind | None = None
    """Of a quantised cache; None: elements of the blocks' own type."""

    @classmethod
    def over(
        cls,
        name: str,
        storage: torch.Tensor,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        kind: ElementKind | None = None,
    ) -> HostKvCache:
        """The cache over memory that was allocated elsewhere (any shape; the bytes are ours). A quantised one takes
        the storage for bytes, whatever its type."""
        if storage.device.type != "cpu":
            raise ValueError(f"KV cache of {name} must be in host memory, got device {storage.device}")
        head_block_bytes = 2 * block_size * row_bytes(head_dim, storage.element_size(), kind)
        if not storage.is_contiguous() or storage.nbytes % (num_kv_heads * head_block_bytes):
            of_kind = "" if kind is None else f" in {kind} with scales"
            raise ValueError(
                f"KV cache of {name}: shape {tuple(storage.shape)}, stride {storage.stride()} is not whole blocks of "
                f"{num_kv_heads} heads x 2 x {block_size} tokens x {head_dim}{of_kind}"
            )
        if kind is None:
            blocks = storage.view(-1, num_kv_heads, 2, block_size, head_dim)
        else:
            blocks = storage.view(-1).view(torch.uint8).view(-1, num_kv_heads, head_block_bytes)
        return cls(name, blocks, block_size, head_dim, kind)

    def over_copy(self, copy: torch.Tensor) -> HostKvCache:
        """The same layout over whole blocks that were copied elsewhere. copy: [num_bytes] uint8"""
        storage = copy.view(self.blocks.dtype)
        return self.over(self.name, storage, self.num_kv_heads, self.block_size, self.head_dim, self.kind)

    @property
    def for_kernels(self) -> torch.Tensor | QuantisedCache:
        """What AttentionTask takes."""
        if self.kind is None:
            return self.blocks
        return QuantisedCache(self.blocks, self.kind, self.block_size, self.head_dim)

    @property
    def bytes_of_blocks(self) -> torch.Tensor:
        """[num_blocks, block_bytes] uint8: the same memory, to be copied."""
        return self.blocks.view(torch.uint8).view(self.num_blocks, self.block_bytes)

    @property
    def num_blocks(self) -> int:
        return self.blocks.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.blocks.shape[1]

    @property
    def block_bytes(self) -> int:
        return self.blocks[0].nbytes


def kv_bytes_per_token(
    num_layers: int, num_kv_heads: int, head_dim: int, element_bytes: int, kind: ElementKind | None = None
) -> int:
    """K and V of one token in all layers: key/value heads, not query heads."""
    return 2 * num_layers * num_kv_heads * row_bytes(head_dim, element_bytes, kind)
