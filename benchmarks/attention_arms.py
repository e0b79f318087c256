"""The competitors of benchmarks/cpu_attention.py: each makes one pass over the caches of a Shape's layers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.attention_shapes import MIB, Shape
from vllm_moe_lightning.kernels.attention import AttentionPool, AttentionTask
from vllm_moe_lightning.kernels.read_probe import READ_PATTERNS, read_once

# Random values are drawn for this much and repeated: drawing gigabytes would take longer than measuring.
DRAWN_BYTES = 32 * MIB

Arm = Callable[[], object]


class Batch:
    """One Shape's tensors, filled and so touched: a plain allocation, as vLLM makes its caches."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        rng = torch.Generator().manual_seed(0)
        cache_shape = (shape.num_blocks, shape.num_kv_heads, 2, shape.block_size, shape.head_dim)
        self.kv_cache = torch.empty(cache_shape, dtype=shape.dtype)
        block_bytes = self.kv_cache[0].nbytes
        drawn = torch.randn((max(1, min(shape.num_blocks, DRAWN_BYTES // block_bytes)), *cache_shape[1:]), generator=rng)
        for first in range(0, shape.num_blocks, len(drawn)):
            part = self.kv_cache[first : first + len(drawn)]
            part.copy_(drawn[: len(part)])
        self.query = torch.randn(shape.num_seqs, shape.num_heads, shape.head_dim, generator=rng).to(shape.dtype)
        # [layers, sequences, blocks]: dealt out at random, as a block manager's free list is after a while.
        self.block_tables = (
            torch.randperm(shape.num_blocks, generator=rng)
            .to(torch.int32)
            .view(shape.num_layers, shape.num_seqs, shape.blocks_per_seq)
        )
        self.query_start = torch.arange(shape.num_seqs + 1, dtype=torch.int32)
        self.seq_lens = torch.full((shape.num_seqs,), shape.context_len, dtype=torch.int32)


def read_arm(batch: Batch, pattern: str, pool: AttentionPool | None) -> Arm:
    """The anchor: reads the very buffer that our kernel reads."""
    return lambda: read_once(batch.kv_cache, pattern, pool=pool)


def our_arm(batch: Batch, isa: str, pool: AttentionPool | None) -> Arm:
    output = torch.empty_like(batch.query)
    tasks = [
        AttentionTask(
            batch.kv_cache,
            query=batch.query,
            output=output,
            block_table=block_table,
            query_start=batch.query_start,
            seq_lens=batch.seq_lens,
            isa=isa,
            pool=pool,
        )
        for block_table in batch.block_tables
    ]

    def run() -> None:
        for task in tasks:
            task.run()

    return run


def anchor_arms(batch: Batch, pool: AttentionPool | None) -> dict[str, Arm]:
    return {f"read: {pattern}": read_arm(batch, pattern, pool) for pattern in READ_PATTERNS}
