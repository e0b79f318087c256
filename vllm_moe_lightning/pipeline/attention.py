"""What a micro-batch asks for when it yields at attention, independent of where the attention will run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_moe_lightning.kv_cache import HostKvCache


@dataclass(frozen=True)
class AttentionRows:
    """The rows of one micro-batch, in host memory. S rows, T tokens."""

    block_table: torch.Tensor  # int32 [S, max_blocks]
    query_start: torch.Tensor  # int32 [S + 1]
    seq_lens: torch.Tensor  # int32 [S], new tokens included
    slot_mapping: torch.Tensor  # int64 [T], block * block_size + offset; negative: not written

    @property
    def num_tokens(self) -> int:
        return self.slot_mapping.shape[0]


@dataclass(frozen=True)
class AttentionOptions:
    """Constant per layer."""

    scale: float
    sliding_window: int = 0  # 0: none; else a query sees itself and the window - 1 tokens before it
    soft_cap: float = 0.0  # 0: none
    sinks: torch.Tensor | None = None  # float32 [num_heads], in host memory


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
    def values_per_token(self) -> int:
        """Elements of Q, K and V of one token."""
        return (self.query.shape[1] + 2 * self.key.shape[1]) * self.query.shape[2]
