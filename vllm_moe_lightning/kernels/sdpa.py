"""torch's scaled_dot_product_attention with its kernel chosen by name, in slices of queries whose temporaries are
bounded (attention_memory.py).

Left alone it falls to MATH, which writes every score to memory in float32, whenever no other kernel takes the call. On
CUDA the flash kernel takes groups of query heads, but no mask and only 16-bit elements from compute capability 8.0 on;
the memory-efficient one takes masks, on every GPU, but no groups. So groups become queries of their own there.
Letters in shapes: S sequences, L queries of each, C keys, Hk key/value heads, G query heads of each, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from vllm_moe_lightning.attention_memory import MASK_BYTES, QUERY_BYTES, QUERY_COPIES, mask_bytes_per_pair

FLASH_CAPABILITY = (8, 0)
SCORE_BYTES = 12  # of MATH: a score in float32, its softmax, and that in the elements' type
LEAST_WINDOWED_QUERIES = 256  # of a slice: half of its pairs may lie outside of a narrower window


@dataclass(frozen=True)
class SdpaKernels:
    """What a device runs."""

    causal: tuple[SDPBackend, ...]
    """For whole prompts, any number of query heads per key head; none: they go the way of masks."""
    masked: tuple[SDPBackend, ...]

    @property
    def writes_scores(self) -> bool:
        return SDPBackend.MATH in self.masked


ON_CPU = SdpaKernels((SDPBackend.FLASH_ATTENTION, SDPBackend.MATH), (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH))


def cuda_kernels(capability: tuple[int, int], dtype: torch.dtype, *, takes_masks: bool) -> SdpaKernels:
    """takes_masks: this torch's memory-efficient kernel does for elements of this kind, as all builds for CUDA that we
    know do. Without it MATH is what remains, in slices small enough for its scores."""
    has_flash = capability >= FLASH_CAPABILITY and dtype in (torch.float16, torch.bfloat16)
    return SdpaKernels(
        (SDPBackend.FLASH_ATTENTION,) if has_flash else (),
        (SDPBackend.EFFICIENT_ATTENTION,) if takes_masks else (SDPBackend.MATH,),
    )


@cache
def kernels_of(device: torch.device, dtype: torch.dtype, head_dim: int) -> SdpaKernels:
    if device.type != "cuda":
        return ON_CPU
    query = torch.empty(1, 1, 16, head_dim, dtype=dtype, device=device)
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool, device=device)
    params = torch.backends.cuda.SDPAParams(query, query, query, mask, 0.0, False, False)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):  # as it is called, whoever else may have switched it off
        takes_masks = torch.backends.cuda.can_use_efficient_attention(params)
    return cuda_kernels(torch.cuda.get_device_capability(device), dtype, takes_masks=takes_masks)


@dataclass(frozen=True)
class QueryStarts:
    """Positions of each sequence's first query; the others follow it."""

    positions: torch.Tensor  # int64 [S], beside the queries
    lowest: int
    highest: int


def attend(
    query: torch.Tensor,  # [S, L, Hk, G, D]
    key: torch.Tensor,  # [S, Hk, C, D], at positions from first_key on; of ordinary size, seen or not
    value: torch.Tensor,  # [S, Hk, C, D]; likewise
    output: torch.Tensor,  # [S, L, Hk, G, D]
    starts: QueryStarts,
    *,
    scale: float,
    sliding_window: int = 0,  # 0: none; else a query sees itself and the window - 1 tokens before it
    first_key: int = 0,
) -> None:
    """Causal attention, by queries and the keys that one of them sees."""
    num_seqs, num_queries, num_kv_heads, group, head_dim = query.shape
    kernels = kernels_of(query.device, query.dtype, head_dim)
    step = _queries_of_slice(query, key.shape[2], starts, sliding_window, writes_scores=kernels.writes_scores)
    for begin, end in _slices(num_queries, step):
        last = min(key.shape[2], starts.highest + end - first_key)
        first = max(0, starts.lowest + begin - first_key - sliding_window + 1) if sliding_window else 0
        seen = _seen(starts.positions + begin, end - begin, first_key + first, first_key + last, sliding_window)
        folded = query[:, begin:end].permute(0, 2, 3, 1, 4).reshape(num_seqs, num_kv_heads, -1, head_dim)
        mask = seen[:, None, None].expand(-1, 1, group, -1, -1).reshape(num_seqs, 1, -1, last - first)
        with sdpa_kernel(list(kernels.masked)):
            attended = F.scaled_dot_product_attention(
                folded, key[:, :, first:last], value[:, :, first:last], attn_mask=mask, scale=scale
            )
        output[:, begin:end] = attended.unflatten(2, (group, -1)).permute(0, 3, 1, 2, 4)


def attend_to_prompt(
    query: torch.Tensor,  # [L, Hk * G, D]
    key: torch.Tensor,  # [L, Hk, D]
    value: torch.Tensor,  # [L, Hk, D]
    output: torch.Tensor,  # [L, Hk * G, D]
    *,
    scale: float,
    sliding_window: int = 0,
) -> None:
    """Causal attention of a whole prompt."""
    length, num_kv_heads = query.shape[0], key.shape[1]
    group = query.shape[1] // num_kv_heads
    kernels = kernels_of(query.device, query.dtype, query.shape[2])
    windowed = 0 < sliding_window < length
    backends = kernels.causal or (kernels.masked if group == 1 and not kernels.writes_scores else ())
    if windowed or not backends:
        starts = QueryStarts(torch.zeros(1, dtype=torch.int64, device=query.device), 0, 0)
        k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (key, value))
        q, out = (tensor.unflatten(1, (num_kv_heads, group)).unsqueeze(0) for tensor in (query, output))
        attend(q, k, v, out, starts, scale=scale, sliding_window=sliding_window if windowed else 0)
        return
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    with sdpa_kernel(list(backends)):
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=group > 1)
    output.copy_(attended.squeeze(0).transpose(0, 1))


def _queries_of_slice(
    query: torch.Tensor, num_keys: int, starts: QueryStarts, sliding_window: int, *, writes_scores: bool
) -> int:
    num_seqs, num_queries, num_kv_heads, group, head_dim = query.shape
    most = num_queries
    if sliding_window:
        most = min(most, max(sliding_window, LEAST_WINDOWED_QUERIES))
        num_keys = min(num_keys, most + sliding_window + starts.highest - starts.lowest)
    width = query.element_size()
    pair_bytes = group * (mask_bytes_per_pair(width) + (SCORE_BYTES * num_kv_heads if writes_scores else 0))
    query_bytes = QUERY_COPIES * num_kv_heads * group * head_dim * width
    fitting = min(MASK_BYTES // (num_seqs * num_keys * pair_bytes), QUERY_BYTES // (num_seqs * query_bytes))
    return max(1, min(most, fitting))


def _slices(total: int, step: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, total, step):
        yield begin, min(total, begin + step)


def _seen(
    first_queries: torch.Tensor, num_queries: int, begin_key: int, end_key: int, sliding_window: int
) -> torch.Tensor:
    """bool [S, L, C]"""
    queries = first_queries[:, None] + torch.arange(num_queries, device=first_queries.device)
    keys = torch.arange(begin_key, end_key, device=first_queries.device)
    seen = keys <= queries[:, :, None]
    if sliding_window:
        seen &= keys > queries[:, :, None] - sliding_window
    return seen
