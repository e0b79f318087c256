"""The decode batches that benchmarks/cpu_attention.py measures, and what one pass over each of them reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MIB = 2**20
# A decode step goes through the layers' caches one after the other, so none of them is in the CPU's cache when its
# turn comes. As many layers as reach this, many times a server's share of last-level cache per core.
WORKING_SET_BYTES = 512 * MIB


@dataclass(frozen=True)
class Shape:
    """num_seqs sequences with context_len tokens of context each decode one token, layer after layer."""

    num_seqs: int
    context_len: int
    block_size: int
    dtype: torch.dtype = torch.bfloat16
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    working_set_bytes: int = WORKING_SET_BYTES

    @property
    def layer_bytes(self) -> int:
        """Keys and values that one layer's task attends to."""
        return self.num_seqs * self.context_len * self.num_kv_heads * 2 * self.head_dim * self.dtype.itemsize

    @property
    def num_layers(self) -> int:
        return max(1, -(-self.working_set_bytes // self.layer_bytes))

    @property
    def pass_bytes(self) -> int:
        """All layers once: what a measured pass reads."""
        return self.num_layers * self.layer_bytes

    @property
    def blocks_per_seq(self) -> int:
        return -(-self.context_len // self.block_size)

    @property
    def num_blocks(self) -> int:
        return self.num_layers * self.num_seqs * self.blocks_per_seq
