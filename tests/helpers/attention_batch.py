"""Random batches for the CPU attention, with traps around them.

Memory that a kernel must not read holds NaN (0xFF bytes), memory that it must not write holds a sentinel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_moe_lightning.kernels import reference
from vllm_moe_lightning.kernels.attention import AttentionPool, AttentionTask
from vllm_moe_lightning.kernels.quantised_cache import QuantisedCache

SENTINEL = 123.0
GUARD = 64  # elements between tokens, before the first and behind the last


@dataclass(frozen=True)
class Case:
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    sliding_window: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False
    seed: int = 0


class Batch:
    """One case's tensors: the context is in the cache, the query tokens' keys and values are yet to be."""

    def __init__(self, case: Case) -> None:
        self.case = case
        rng = torch.Generator().manual_seed(case.seed)
        num_tokens = sum(case.query_lens)
        blocks_per_seq = [-(-n // case.block_size) for n in case.seq_lens]
        num_blocks = sum(blocks_per_seq) + 2
        shape = (num_blocks, case.num_kv_heads, 2, case.block_size, case.head_dim)
        self.kv_cache = nan_bytes(shape, case.dtype)

        # Ids that must not be read are out of range; the real ones are dealt out at random.
        self.block_table = torch.full((len(case.seq_lens), max(blocks_per_seq, default=0) + 3), -7, dtype=torch.int32)
        free = torch.randperm(num_blocks, generator=rng).to(torch.int32)
        self.query_start = torch.tensor([0, *case.query_lens]).cumsum(0).to(torch.int32)
        self.seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32)
        self.slot_mapping = torch.empty(num_tokens, dtype=torch.int64)
        for seq, (seq_len, query_len) in enumerate(zip(case.seq_lens, case.query_lens, strict=True)):
            blocks, free = free[: blocks_per_seq[seq]], free[blocks_per_seq[seq] :]
            self.block_table[seq, : len(blocks)] = blocks
            slots = [int(blocks[p // case.block_size]) * case.block_size + p % case.block_size for p in range(seq_len)]
            first_seen = max(0, seq_len - query_len + 1 - case.sliding_window) if case.sliding_window else 0
            for slot in slots[first_seen : max(0, seq_len - query_len)]:
                context = torch.randn(case.num_kv_heads, 2, case.head_dim, generator=rng)
                self.kv_cache[slot // case.block_size, :, :, slot % case.block_size] = context.to(case.dtype)
            self.block_table[seq, : first_seen // case.block_size] = -1  # freed by a sliding-window cache
            new_slots = slots[seq_len - query_len :] if seq_len else [-1] * query_len
            self.slot_mapping[self.query_start[seq] : self.query_start[seq + 1]] = torch.tensor(
                new_slots, dtype=torch.int64
            )

        # Query, key and value side by side, as a fused projection leaves them.
        num_rows = case.num_heads + 2 * case.num_kv_heads
        fused = torch.randn(num_tokens, num_rows, case.head_dim, generator=rng).to(case.dtype)
        heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads)
        self.query, self.key, self.value = fused.split(heads, dim=1)
        self.sinks = torch.randn(case.num_heads, generator=rng) if case.has_sinks else None
        self.options = {
            "scale": case.head_dim**-0.5,
            "sliding_window": case.sliding_window,
            "soft_cap": case.soft_cap,
            "sinks": self.sinks,
        }

    def expected(self) -> torch.Tensor:
        cache = self.kv_cache.clone()
        reference.append(cache, self.key, self.value, self.slot_mapping)
        return reference.paged_attention(
            self.query, cache, self.block_table, self.query_start, self.seq_lens, **self.options
        )

    def task(
        self,
        output: torch.Tensor,
        isa: str,
        pool: AttentionPool | None = None,
        *,
        kv_cache: QuantisedCache | None = None,  # in place of the batch's own
        log_sum_exp: torch.Tensor | None = None,
    ) -> AttentionTask:
        return AttentionTask(
            self.kv_cache if kv_cache is None else kv_cache,
            query=self.query,
            output=output,
            block_table=self.block_table,
            query_start=self.query_start,
            seq_lens=self.seq_lens,
            key=self.key,
            value=self.value,
            slot_mapping=self.slot_mapping,
            log_sum_exp=log_sum_exp,
            isa=isa,
            pool=pool,
            **self.options,
        )

    def run(self, isa: str, pool: AttentionPool | None = None) -> torch.Tensor:
        """The output, once it is sure that nothing else was written."""
        num_tokens, row = self.query.shape[0], self.case.num_heads * self.case.head_dim
        stride = row + GUARD
        buffer = torch.full((GUARD + num_tokens * stride,), SENTINEL, dtype=self.case.dtype)
        tokens = buffer[GUARD:].view(num_tokens, stride)
        output = tokens[:, :row].view(num_tokens, self.case.num_heads, self.case.head_dim)
        cache_after = self.kv_cache.clone()
        reference.append(cache_after, self.key, self.value, self.slot_mapping)
        self.task(output, isa, pool).run()
        assert (buffer[:GUARD] == SENTINEL).all()
        assert (tokens[:, row:] == SENTINEL).all()
        assert torch.equal(bits(self.kv_cache), bits(cache_after))
        return output.clone()


def nan_bytes(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """0xFF everywhere, which is NaN in all our dtypes."""
    tensor = torch.empty(shape, dtype=dtype)
    bits(tensor).fill_(-1)
    return tensor


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
