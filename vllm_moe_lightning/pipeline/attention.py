"""What a micro-batch asks for when it yields at attention, independent of where the attention will run; and the
kernel's task for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from vllm_moe_lightning.kernels.attention import AttentionPool, AttentionTask
from vllm_moe_lightning.kv_cache import HostKvCache


@dataclass(frozen=True)
class AttentionRows:
    """The rows of one micro-batch, in host memory. S rows, T tokens; after them those that the device attends to."""

    block_table: torch.Tensor  # int32 [S, max_blocks]
    query_start: torch.Tensor  # int32 [S + 1]
    seq_lens: torch.Tensor  # int32 [S], new tokens included
    slot_mapping: torch.Tensor  # int64 [T], block * block_size + offset; negative: not written
    with_context: AttentionRows | None = None
    """Whose attention the device computes, over context that comes up for it: only their keys and values go down."""
    on_device: AttentionRows | None = None
    """The same for prompts without context, which needs nothing of the host."""

    @property
    def num_tokens(self) -> int:
        return self.num_attended_tokens + sum(rows.num_attended_tokens for rows in self.on_device_in_order)

    @property
    def num_attended_tokens(self) -> int:
        """Those that the CPU attends to."""
        return self.slot_mapping.shape[0]

    @property
    def on_device_in_order(self) -> list[AttentionRows]:
        """As their tokens follow the CPU's."""
        return [rows for rows in (self.with_context, self.on_device) if rows is not None]

    @cached_property
    def query_lens(self) -> list[int]:
        """Tokens of each row; asked for in every layer."""
        return self.query_start.diff().tolist()


@dataclass(frozen=True)
class AttentionOptions:
    """Constant per layer."""

    scale: float
    sliding_window: int = 0  # 0: none; else a query sees itself and the window - 1 tokens before it
    soft_cap: float = 0.0  # 0: none
    sinks: torch.Tensor | None = None  # float32 [num_heads], in host memory

    @property
    def is_plain(self) -> bool:
        """Without sinks and soft cap, which the kernels on the device do not know."""
        return self.sinks is None and self.soft_cap == 0.0


@dataclass(frozen=True)
class AttentionRequest:
    """Yielded by a micro-batch: attention over `cache` with the new tokens, the result into `output`."""

    query: torch.Tensor  # device [T, num_heads, head_dim]
    key: torch.Tensor  # device [T, num_kv_heads, head_dim]
    value: torch.Tensor  # device [T, num_kv_heads, head_dim]
    output: torch.Tensor  # device [T, num_heads, head_dim]
    cache: HostKvCache
    rows: AttentionRows
    options: AttentionOptions

    @property
    def values_per_query(self) -> int:
        """Elements of Q of one token, and of its output."""
        return self.query.shape[1] * self.query.shape[2]

    @property
    def values_per_token(self) -> int:
        """Elements of Q, K and V of one token."""
        return (self.query.shape[1] + 2 * self.key.shape[1]) * self.query.shape[2]


def attention_task(
    cache: HostKvCache,
    rows: AttentionRows,
    options: AttentionOptions,
    *,
    key: torch.Tensor,  # [T, num_kv_heads, head_dim]
    value: torch.Tensor,  # [T, num_kv_heads, head_dim]
    query: torch.Tensor | None = None,  # [T, num_heads, head_dim]; without it (and output) the task only appends
    output: torch.Tensor | None = None,  # [T, num_heads, head_dim]
    pool: AttentionPool | None = None,
    check_contents: bool = True,
) -> AttentionTask:
    """Append `key` and `value` to `cache`, then attend, for the tokens of `rows`. Raises as AttentionTask does."""
    return AttentionTask(
        cache.for_kernels,
        query=query,
        output=output,
        block_table=rows.block_table,
        query_start=rows.query_start,
        seq_lens=rows.seq_lens,
        key=key,
        value=value,
        slot_mapping=rows.slot_mapping,
        scale=options.scale,
        sliding_window=options.sliding_window,
        soft_cap=options.soft_cap,
        sinks=options.sinks,
        pool=pool,
        check_contents=check_contents,
    )
