"""Attention over a paged cache in device memory, in torch operations: what schedule S4 runs on a GPU, and prompts with
context where nothing better is at hand.

Rows of equally many new tokens are taken together, without a wait of the host. Its temporaries are bounded
(attention_memory.py). The CPU's kernel is kernels/attention.py. Letters in shapes: T tokens, S sequences, L queries of
each, Hq query heads, Hk key/value heads, D head_dim, B block_size, N blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from vllm_moe_lightning.attention_memory import KEY_BYTES
from vllm_moe_lightning.kernels.sdpa import QueryStarts, attend


@dataclass(frozen=True)
class _Batch:
    """Rows that follow each other, each with L new tokens."""

    first_token: int
    num_queries: int
    block_table: torch.Tensor  # int64 [S, blocks]
    starts: QueryStarts


@dataclass(frozen=True)
class RowsAtOnce:
    """The same rows for a kernel that takes sequences of all lengths together."""

    query_start: torch.Tensor  # int32 [S + 1]
    seq_lens: torch.Tensor  # int32 [S]
    block_table: torch.Tensor  # int32 [S, blocks]
    longest_query: int
    longest_seq: int


@dataclass(frozen=True)
class PagedRows:
    """Where a micro-batch's tokens and context lie: indices on the device, sizes in host memory."""

    batches: tuple[_Batch, ...]
    at_once: RowsAtOnce
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
        key_bytes: int,  # of K and V of one token and head
        to_device: Callable[[torch.Tensor], torch.Tensor],
    ) -> PagedRows:
        """From rows in host memory, in two copies to the device."""
        first_tokens = query_start.tolist()
        first_positions = (seq_lens - query_start.diff()).tolist()
        lengths = seq_lens.tolist()
        groups = list(_groups(query_start.diff().tolist(), lengths, KEY_BYTES // key_bytes))
        written = (slot_mapping >= 0).nonzero()[:, 0]
        slots = slot_mapping[written]
        host = [written, slots // block_size, slots % block_size]
        for begin, end in groups:
            num_blocks = -(-max(lengths[begin:end]) // block_size)
            host.append(block_table[begin:end, :num_blocks].long())
            host.append(torch.tensor(first_positions[begin:end], dtype=torch.int64))
        at_hand = _moved(host, to_device)
        batches = tuple(
            _Batch(
                first_tokens[begin],
                first_tokens[begin + 1] - first_tokens[begin],
                table,
                QueryStarts(positions, min(first_positions[begin:end]), max(first_positions[begin:end])),
            )
            for (begin, end), table, positions in zip(groups, at_hand[3::2], at_hand[4::2], strict=True)
        )
        seqs = [query_start, seq_lens, block_table[:, : -(-max(lengths) // block_size)]]
        starts, lens, table = _moved(seqs, to_device)
        at_once = RowsAtOnce(starts, lens, table, int(query_start.diff().max()), max(lengths))
        return cls(batches, at_once, *at_hand[:3])


def _moved(tensors: Sequence[torch.Tensor], to_device: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Of one type, in one copy."""
    packed = to_device(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    parts = packed.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _groups(query_lens: Sequence[int], seq_lens: Sequence[int], most_keys: int) -> Iterator[tuple[int, int]]:
    """[begin, end) of rows with equally many new tokens, whose keys, padded to the longest row's, are `most_keys` at
    most; rows without new tokens are left out."""
    begin, longest = 0, 0
    for row, (queries, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        longest_with = max(longest, length)
        if row > begin and (queries != query_lens[begin] or longest_with * (row + 1 - begin) > most_keys):
            if query_lens[begin]:
                yield begin, row
            begin, longest_with = row, length
        longest = longest_with
    if begin < len(query_lens) and query_lens[begin]:
        yield begin, len(query_lens)


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
    output: torch.Tensor,  # [T, Hq, D]
    *,
    scale: float,
    sliding_window: int = 0,  # 0: none; else a query sees itself and the window - 1 tokens before it
) -> None:
    """Causal attention of each token over its sequence's context."""
    num_kv_heads, _, block_size, head_dim = blocks.shape[1:]
    for batch in rows.batches:
        num_seqs, num_blocks = batch.block_table.shape
        tokens = slice(batch.first_token, batch.first_token + num_seqs * batch.num_queries)
        shape = (num_seqs, batch.num_queries, num_kv_heads, -1, head_dim)
        q, out = query[tokens].reshape(shape), output[tokens].view(shape)
        out_of_sight = max(0, batch.starts.lowest - sliding_window + 1) // block_size if sliding_window else 0
        table = batch.block_table[:, out_of_sight:]
        head_bytes = num_seqs * (num_blocks - out_of_sight) * 2 * block_size * head_dim * blocks.element_size()
        step = max(1, min(num_kv_heads, KEY_BYTES // head_bytes))
        for begin in range(0, num_kv_heads, step):
            heads = slice(begin, begin + step)
            key, value = (_gathered(blocks[:, heads, half], table) for half in (0, 1))
            attend(
                q[:, :, heads],
                key,
                value,
                out[:, :, heads],
                batch.starts,
                scale=scale,
                sliding_window=sliding_window,
                first_key=out_of_sight * block_size,
            )


def _gathered(half: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """[S, Hk, blocks * B, D] of [N, Hk, B, D], in one copy. What no query sees may be NaN or infinite (poison): its
    weight is zero, and zero times those is not."""
    num_seqs, (_, heads, _, head_dim) = table.shape[0], half.shape
    copied = half.transpose(0, 1).index_select(1, table.reshape(-1)).nan_to_num_(0.0, 0.0, 0.0)
    return copied.view(heads, num_seqs, -1, head_dim).transpose(0, 1)
