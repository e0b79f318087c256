"""Attention over a paged cache in device memory, in torch operations: what schedule S4 runs on a GPU.

A baseline's kernel: padded to the longest query and context of the micro-batch, without a copy of what it need not
copy, and without a wait of the host. The CPU's kernel is kernels/attention.py. Letters in shapes: T tokens, S
sequences, L longest query, Hq query heads, Hk key/value heads, D head_dim, B block_size, N blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F


@dataclass(frozen=True)
class PagedRows:
    """Where a micro-batch's tokens and context lie, as tensors on the device."""

    block_table: torch.Tensor  # int64 [S, blocks]
    tokens: torch.Tensor  # int64 [S, L], padded with the sequence's last
    positions: torch.Tensor  # int64 [S, L], of these tokens
    places: torch.Tensor  # int64 [T], of each token in [S * L]
    written_tokens: torch.Tensor  # int64 [W], those whose keys and values are written
    written_blocks: torch.Tensor  # int64 [W]
    written_offsets: torch.Tensor  # int64 [W]

    @classmethod
    def of(
        cls,
        block_table: torch.Tensor,  # int32 [S, blocks]
        query_start: torch.Tensor,  # int32 [S + 1]
        seq_lens: torch.Tensor,  # int32 [S], new tokens included
        slot_mapping: torch.Tensor,  # int64 [T], negative: not written
        block_size: int,
        to_device: Callable[[torch.Tensor], torch.Tensor],
    ) -> PagedRows:
        """From rows in host memory."""
        starts, lens = query_start[:-1].long(), query_start.diff().long()
        longest = int(lens.max())
        num_tokens = int(lens.sum())
        steps = torch.minimum(torch.arange(longest)[None, :], lens[:, None] - 1).clamp(min=0)  # [S, L]
        row_of_token = torch.repeat_interleave(torch.arange(len(lens)), lens)
        places = row_of_token * longest + torch.arange(num_tokens) - starts[row_of_token]
        num_blocks = -(-int(seq_lens.max()) // block_size)
        written = (slot_mapping >= 0).nonzero()[:, 0]
        slots = slot_mapping[written]
        host = (
            block_table[:, :num_blocks].long(),
            (starts[:, None] + steps).clamp(max=num_tokens - 1),
            (seq_lens.long() - lens)[:, None] + steps,
            places,
            written,
            slots // block_size,
            slots % block_size,
        )
        return cls(*map(to_device, host))


def append(
    blocks: torch.Tensor,  # [N, Hk, 2 (K, V), B, D]
    key: torch.Tensor,  # [T, Hk, D]
    value: torch.Tensor,  # [T, Hk, D]
    rows: PagedRows,
) -> None:
    """Writes the tokens' keys and values into the cache."""
    for half, new in enumerate((key, value)):
        blocks[rows.written_blocks, :, half, rows.written_offsets] = new[rows.written_tokens]


def paged_attention(
    query: torch.Tensor,  # [T, Hq, D]
    blocks: torch.Tensor,  # [N, Hk, 2 (K, V), B, D]
    rows: PagedRows,
    *,
    scale: float,
    sliding_window: int = 0,  # 0: none; else a query sees itself and the window - 1 tokens before it
) -> torch.Tensor:
    """[T, Hq, D]: causal attention of each token over its sequence's context."""
    context = blocks[rows.block_table]  # [S, blocks, Hk, 2, B, D]
    key, value = (context[:, :, :, half].transpose(1, 2).flatten(2, 3) for half in (0, 1))  # [S, Hk, blocks * B, D]
    key_positions = torch.arange(key.shape[2], device=key.device)
    is_seen = key_positions <= rows.positions[:, :, None]  # [S, L, blocks * B]
    if sliding_window:
        is_seen &= key_positions > rows.positions[:, :, None] - sliding_window
    padded = query[rows.tokens].transpose(1, 2)  # [S, Hq, L, D]
    # What no query sees may be NaN (poison): its weight is zero, and zero times NaN is not.
    value = value.nan_to_num()
    output = F.scaled_dot_product_attention(
        padded, key.nan_to_num(), value, attn_mask=is_seen[:, None], scale=scale, enable_gqa=True
    )
    return output.transpose(1, 2).flatten(0, 1)[rows.places]
