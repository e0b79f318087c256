"""The competitors of benchmarks/cpu_attention.py over one Shape's caches, and the check that they compute the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from benchmarks.attention_shapes import MIB, Shape
from benchmarks.round_figures import reads
from vllm_moe_lightning.kernels import reference
from vllm_moe_lightning.kernels.attention import AttentionPool, AttentionTask, available_isas, resolve_isa
from vllm_moe_lightning.kernels.quantised_cache import ElementKind, QuantisedCache
from vllm_moe_lightning.kernels.read_probe import read_once

# Random values are drawn for this much and repeated: drawing gigabytes would take longer than measuring.
DRAWN_BYTES = 32 * MIB
OURS = "ours"
# Largest relative error over the rows (sequence, head) of an output: some times what rounding explains, of bfloat16
# weights and outputs or of 8-bit keys and values. Another batch's output is at 1.4.
ROW_TOLERANCE = 0.02
QUANTISED_ROW_TOLERANCE: dict[ElementKind, float] = {"int8": 0.1, "fp8": 0.35}


@dataclass(frozen=True)
class Arm:
    """run_layer(layer) attends once in one layer and returns the output [num_seqs, num_heads, head_dim], which may be
    overwritten by the next call. None, with the reason, where this machine or package cannot."""

    run_layer: Callable[[int], torch.Tensor] | None
    null_reason: str = ""
    note: str = ""
    bytes_share: float = 1.0
    """Bytes of its keys and values over those of the batch's cache: 0.5 for 8-bit elements."""
    row_tolerance: float = ROW_TOLERANCE

    def run_pass(self, num_layers: int, num_passes: int) -> None:
        assert self.run_layer is not None, self.null_reason
        for _ in range(num_passes):
            for layer in range(num_layers):
                self.run_layer(layer)


class Batch:
    """One Shape's tensors, filled and so touched. The cache is a plain torch allocation, as vLLM's is."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        rng = torch.Generator().manual_seed(0)
        cache_shape = (shape.num_blocks, shape.num_kv_heads, 2, shape.block_size, shape.head_dim)
        self.kv_cache = torch.empty(cache_shape, dtype=shape.dtype)
        num_drawn = max(1, min(shape.num_blocks, DRAWN_BYTES // self.kv_cache[0].nbytes))
        drawn = torch.randn((num_drawn, *cache_shape[1:]), generator=rng).to(shape.dtype)
        for part in self.kv_cache.split(num_drawn):
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

    def slots(self, layer: int, seq: int) -> torch.Tensor:
        """Where a sequence's tokens lie, as a slot mapping says it."""
        blocks = self.block_tables[layer, seq].long()
        return (blocks[:, None] * self.shape.block_size + torch.arange(self.shape.block_size)).flatten()

    def context(self, layer: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A sequence's keys and values, each [num_kv_heads, context_len, head_dim], in a new place."""
        blocks = self.kv_cache[self.block_tables[layer, seq].long()].permute(2, 1, 0, 3, 4)
        key, value = blocks.reshape(2, self.shape.num_kv_heads, self.shape.context_len, self.shape.head_dim)
        return key, value


def read_passes(batch: Batch, pool: AttentionPool | None, num_passes: int) -> dict[str, Callable[[], object]]:
    """The anchor: each pattern reads the very buffer that our kernel reads, all layers at once."""

    def reader(pattern: str) -> Callable[[], None]:
        def run() -> None:
            for _ in range(num_passes):
                read_once(batch.kv_cache, pattern, pool=pool)

        return run

    return reads(reader)


def _task_arm(
    batch: Batch,
    kv_cache: torch.Tensor | QuantisedCache,
    isa: str,
    pool: AttentionPool | None,
    *,
    bytes_share: float = 1.0,
    row_tolerance: float = ROW_TOLERANCE,
) -> Arm:
    if isa != "auto" and isa not in available_isas():
        return Arm(None, f"this CPU has no {isa}")
    output = torch.empty_like(batch.query)
    tasks = [
        AttentionTask(
            kv_cache,
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

    def run_layer(layer: int) -> torch.Tensor:
        tasks[layer].run()
        return output

    cache_type = kv_cache.kind if isinstance(kv_cache, QuantisedCache) else kv_cache.dtype
    note = resolve_isa(isa, cache_type)
    return Arm(run_layer, note=note, bytes_share=bytes_share, row_tolerance=row_tolerance)


def our_arms(batch: Batch, pool: AttentionPool | None) -> dict[str, Arm]:
    return {name: _task_arm(batch, batch.kv_cache, isa, pool) for name, isa in ((OURS, "auto"), ("ours avx2", "avx2"))}


class QuantisedContext:
    """A Batch's context in one of our caches of 8-bit elements, written by our own append."""

    def __init__(self, batch: Batch, kind: ElementKind) -> None:
        shape = batch.shape
        self.batch = batch
        self.cache = QuantisedCache.empty(shape.num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim, kind)
        for layer in range(shape.num_layers):
            for seq in range(shape.num_seqs):
                key, value = (each.transpose(0, 1).contiguous() for each in batch.context(layer, seq))
                AttentionTask(self.cache, key=key, value=value, slot_mapping=batch.slots(layer, seq)).run()

    def arm(self, pool: AttentionPool | None) -> Arm:
        return _task_arm(
            self.batch,
            self.cache,
            "auto",
            pool,
            bytes_share=self.cache.blocks.nbytes / self.batch.kv_cache.nbytes,
            row_tolerance=QUANTISED_ROW_TOLERANCE[self.cache.kind],
        )


class ContiguousContext:
    """Each layer's keys and values gathered in order, [layers, num_seqs, num_kv_heads, context_len, head_dim] each."""

    def __init__(self, batch: Batch) -> None:
        shape = batch.shape
        size = (shape.num_layers, shape.num_seqs, shape.num_kv_heads, shape.context_len, shape.head_dim)
        self.batch = batch
        self.keys, self.values = torch.empty(size, dtype=shape.dtype), torch.empty(size, dtype=shape.dtype)
        for layer in range(shape.num_layers):
            for seq in range(shape.num_seqs):
                self.keys[layer, seq], self.values[layer, seq] = batch.context(layer, seq)

    def sdpa_arm(self) -> Arm:
        """torch's own attention on what a gather would have brought, without the time that the gather takes. The heads
        of a group are rows of one query: with enable_gqa torch 2.13 is 4 to 8 times slower on a CPU."""
        shape, batch = self.batch.shape, self.batch
        query = batch.query.view(shape.num_seqs, shape.num_kv_heads, -1, shape.head_dim)

        def run_layer(layer: int) -> torch.Tensor:
            output = torch.nn.functional.scaled_dot_product_attention(query, self.keys[layer], self.values[layer])
            return output.view(batch.query.shape)

        return Arm(run_layer)


def row_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of a row, the last dimension."""
    difference = (output.float() - expected.float()).norm(dim=-1)
    return float((difference / expected.float().norm(dim=-1)).max())


def reference_error(batch: Batch, arm: Arm, layer: int) -> float:
    """Against kernels/reference.py, for the first and the last sequence and key/value head: it takes its time."""
    assert arm.run_layer is not None, arm.null_reason
    shape, output, errors = batch.shape, arm.run_layer(layer), []
    group = shape.num_heads // shape.num_kv_heads
    for seq, head in {(0, 0), (shape.num_seqs - 1, shape.num_kv_heads - 1)}:
        heads = slice(head * group, (head + 1) * group)
        expected = reference.paged_attention(
            batch.query[seq : seq + 1, heads],
            batch.kv_cache[:, head : head + 1],
            batch.block_tables[layer, seq : seq + 1],
            torch.tensor([0, 1]),
            batch.seq_lens[seq : seq + 1],
            scale=shape.head_dim**-0.5,
        )
        errors.append(row_error(output[seq : seq + 1, heads], expected))
    return _worst(errors)


def _worst(errors: list[float]) -> float:
    """The largest, and NaN if there is one, which Python's max may overlook."""
    return float(torch.tensor(errors).max())


def check_agreement(batch: Batch, arms: Mapping[str, Arm]) -> dict[str, float]:
    """Largest relative row errors in the first and the last layer: ours to the reference, the others' to ours.

    Raises ValueError when an arm computes something else, so that nobody compares speeds with it.
    """
    ours = arms[OURS]
    assert ours.run_layer is not None, ours.null_reason
    found: dict[str, list[float]] = {}
    for layer in sorted({0, batch.shape.num_layers - 1}):
        found.setdefault(OURS, []).append(reference_error(batch, ours, layer))
        expected = ours.run_layer(layer).clone()
        for name, arm in arms.items():
            if arm.run_layer is not None and name != OURS:
                found.setdefault(name, []).append(row_error(arm.run_layer(layer), expected))
    errors = {name: _worst(layers) for name, layers in found.items()}
    for name, error in errors.items():
        if not error <= arms[name].row_tolerance:  # NaN is refused too
            raise ValueError(f"{batch.shape}: {name!r} is off by {error:.2g} of a row, more than rounding explains")
    return errors
