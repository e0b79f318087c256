"""Paged attention in plain torch and fp32, without tricks: what the kernels are compared with, no more.

Letters in shapes: T tokens, S sequences, Hq query heads, Hk key/value heads, D head_dim, B block_size,
N blocks.
"""

import torch


def append(
    kv_cache: torch.Tensor,  # [N, Hk, 2 (K, V), B, D]
    key: torch.Tensor,  # [T, Hk, D]
    value: torch.Tensor,  # [T, Hk, D]
    slot_mapping: torch.Tensor,  # [T] block * B + offset; negative: not written
) -> None:
    """Writes the tokens' keys and values into the cache."""
    block_size = kv_cache.shape[3]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            kv_cache[slot // block_size, :, 0, slot % block_size] = key[token]
            kv_cache[slot // block_size, :, 1, slot % block_size] = value[token]


def paged_attention(
    query: torch.Tensor,  # [T, Hq, D]
    kv_cache: torch.Tensor,  # [N, Hk, 2 (K, V), B, D]
    block_table: torch.Tensor,  # [S, >= blocks of the longest sequence]
    query_start: torch.Tensor,  # [S + 1]
    seq_lens: torch.Tensor,  # [S] context length, the query tokens included
    *,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,  # [Hq]
) -> torch.Tensor:
    """The output [T, Hq, D] in float32; zeros for a token that belongs to no sequence or has no context."""
    output = torch.zeros(query.shape, dtype=torch.float32)
    for seq, seq_len in enumerate(seq_lens.tolist()):
        tokens = slice(int(query_start[seq]), int(query_start[seq + 1]))
        query_len = tokens.stop - tokens.start
        if query_len == 0 or seq_len == 0:
            continue
        positions = torch.arange(seq_len - query_len, seq_len)
        begin = max(0, int(positions[0]) + 1 - sliding_window) if sliding_window else 0
        key, value = gather(kv_cache, block_table[seq], begin, seq_len)  # [keys, Hk, D]
        group = query.shape[1] // kv_cache.shape[1]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)

        logits = torch.einsum("thd,khd->htk", query[tokens].float(), key) * scale
        if soft_cap:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        key_positions = torch.arange(begin, seq_len)
        is_seen = key_positions <= positions[:, None]
        if sliding_window:
            is_seen &= key_positions > positions[:, None] - sliding_window
        logits = logits.masked_fill(~is_seen, -torch.inf)
        if sinks is not None:
            sink_logits = sinks.float()[:, None, None].expand(-1, query_len, 1)
            logits = torch.cat([logits, sink_logits], dim=-1)
        weights = torch.softmax(logits, dim=-1)[..., : seq_len - begin]
        output[tokens] = torch.einsum("htk,khd->thd", weights, value)
    return output


def gather(kv_cache: torch.Tensor, blocks: torch.Tensor, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence's keys and values at positions begin..end-1, each [end - begin, Hk, D] in float32."""
    block_size = kv_cache.shape[3]
    positions = torch.arange(begin, end)
    rows = kv_cache[blocks[positions // block_size].long(), :, :, positions % block_size].float()
    return rows[:, :, 0], rows[:, :, 1]
