"""The decode batches that benchmarks/cpu_attention.py measures, and what one pass over each of them reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from vllm_moe_lightning.host_limits import usable_cpus

MIB = 2**20
# A decode step goes through the layers' caches one after the other, so none of them is in the CPU's cache when its
# turn comes. As many layers as reach this, many times a server's share of last-level cache per core.
WORKING_SET_BYTES = 512 * MIB
# A smaller task is no judge of memory bandwidth: what starts and ends it weighs too much.
LEAST_LAYER_BYTES = 128 * MIB
QUICK_WORKING_SET_BYTES = 256 * MIB
LONG_PASS_BYTES, LONG_PASS_ROUNDS = 1024 * MIB, 5
# A stolen core is given back every few milliseconds: a measured pass must see many of these turns.
STOLEN_CORE_PASSES = 2
CACHE_WARM_SAMPLE_BYTES = 128 * MIB


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

    def __post_init__(self) -> None:
        if self.context_len % self.block_size:
            raise ValueError(f"context_len {self.context_len} must be whole blocks of {self.block_size} tokens")

    @property
    def layer_bytes(self) -> int:
        """Keys and values that one layer's task attends to."""
        return self.num_seqs * self.context_len * self.num_kv_heads * 2 * self.head_dim * self.dtype.itemsize

    @property
    def num_layers(self) -> int:
        return max(1, -(-self.working_set_bytes // self.layer_bytes))

    @property
    def pass_bytes(self) -> int:
        """All layers once."""
        return self.num_layers * self.layer_bytes

    @property
    def blocks_per_seq(self) -> int:
        return self.context_len // self.block_size

    @property
    def num_blocks(self) -> int:
        return self.num_layers * self.num_seqs * self.blocks_per_seq

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.num_seqs} x {self.context_len} tokens, blocks of {self.block_size}, {dtype}"


@dataclass(frozen=True)
class Setting:
    """One Shape and how it is run. A sample is `num_passes` passes over all its layers."""

    group: str
    """"memory", "cache-warm", "stolen core" or "one sequence"."""
    shape: Shape
    thread_counts: tuple[int, ...]
    num_passes: int = 1
    has_quantised: bool = False
    """Whether caches of 8-bit elements are measured beside it."""

    @property
    def memory_bytes(self) -> int:
        """Our cache, the contiguous one and up to two of vLLM's; and three with elements of half the size."""
        return self.shape.pass_bytes * (4 + 2 * self.has_quantised)

    def num_rounds(self, asked: int) -> int:
        """Passes over gigabytes are long enough to be steady."""
        return min(asked, LONG_PASS_ROUNDS) if self.shape.pass_bytes > LONG_PASS_BYTES else asked

    @property
    def is_warm(self) -> bool:
        return self.group == "cache-warm"

    @property
    def is_stolen(self) -> bool:
        return self.group == "stolen core"


def usable_thread_counts() -> tuple[int, ...]:
    """One, and all."""
    return tuple(sorted({1, usable_cpus()}))


def memory_settings(thread_counts: tuple[int, ...]) -> list[Setting]:
    settings = []
    for block_size in (32, 128):
        for num_seqs in (16, 64, 256):
            for context_len in (128, 512, 2048):
                shape = Shape(num_seqs, context_len, block_size)
                if shape.layer_bytes >= LEAST_LAYER_BYTES:
                    has_quantised = (num_seqs, context_len) == (64, 2048)
                    settings.append(Setting("memory", shape, thread_counts, has_quantised=has_quantised))
    settings.append(Setting("memory", Shape(64, 2048, 32, dtype=torch.float16), thread_counts))
    # Blocks of 16 are vLLM's default on a GPU; its CPU kernels have one of their own for them.
    settings.append(Setting("memory", Shape(64, 2048, 16), thread_counts))
    return settings


def warm_settings(sizes: list[tuple[int, int]]) -> list[Setting]:
    settings = []
    for block_size in (32, 128):
        for num_seqs, context_len in sizes:
            shape = Shape(num_seqs, context_len, block_size, working_set_bytes=0)
            num_passes = -(-CACHE_WARM_SAMPLE_BYTES // shape.layer_bytes)
            settings.append(Setting("cache-warm", shape, (1,), num_passes))
    return settings


def stolen_settings(sizes: list[tuple[int, int]]) -> list[Setting]:
    num_threads = usable_thread_counts()[-1]
    return [
        Setting("stolen core", Shape(num_seqs, context_len, block_size), (num_threads,), STOLEN_CORE_PASSES)
        for num_seqs, context_len in sizes
        for block_size in (32, 128)
    ]


def full_settings() -> list[Setting]:
    two_threads = tuple(count for count in (1, 2) if count <= usable_thread_counts()[-1])
    return [
        *memory_settings(usable_thread_counts()),
        *warm_settings([(16, 128), (1, 2048), (16, 512)]),
        *stolen_settings([(16, 2048), (64, 2048)]),
        Setting("one sequence", Shape(1, 65536, 128), two_threads),
    ]


def quick_settings() -> list[Setting]:
    """The same groups on less memory."""
    quick = [
        *(Setting("memory", Shape(64, 512, block), usable_thread_counts(), has_quantised=True) for block in (32, 128)),
        *warm_settings([(16, 128)]),
        *stolen_settings([(64, 512)])[1:],
        Setting("one sequence", Shape(1, 32768, 128), usable_thread_counts()[:2]),
    ]
    return [
        replace(
            setting, shape=replace(setting.shape, working_set_bytes=0 if setting.is_warm else QUICK_WORKING_SET_BYTES)
        )
        for setting in quick
    ]
