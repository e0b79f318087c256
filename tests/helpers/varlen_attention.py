"""Stands in for vLLM's flash_attn_varlen_func, which only a GPU runs: what its docstring says, sequence by sequence."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True)
class VarlenAttention:
    """As documented, or wrong in one of the ways that a build might be."""

    window_off_by: int = 0
    is_causal: bool = True
    aligns_top_left: bool = False
    interleaves_groups: bool = False
    ignores_block_table: bool = False
    writes: bool = True
    refuses: bool = False

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        max_seqlen_q: int,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_k: int,
        cu_seqlens_k: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: list[int] | None = None,
        block_table: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        num_splits: int = 0,
        fa_version: int = 2,
    ) -> torch.Tensor:
        if self.refuses:
            raise RuntimeError("this head size is not supported")
        assert out is not None
        assert window_size is not None
        assert causal
        assert (fa_version, num_splits) == (2, 1)
        assert (cu_seqlens_k is None) != (seqused_k is None)
        assert (block_table is None) == (seqused_k is None)
        for tensor in (cu_seqlens_q, cu_seqlens_k, seqused_k, block_table):
            assert tensor is None or tensor.dtype == torch.int32
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        starts = cu_seqlens_q.tolist()
        for row, (begin, end) in enumerate(pairwise(starts)):
            assert end - begin <= max_seqlen_q
            if block_table is None:
                keys, values = k[begin:end], v[begin:end]
            else:
                assert seqused_k is not None
                assert k.shape[1] % 16 == 0
                length = int(seqused_k[row])
                table = block_table[row, : -(-length // k.shape[1])]
                table = table.sort().values if self.ignores_block_table else table
                keys, values = (half[table].flatten(0, 1)[:length] for half in (k, v))
            assert len(keys) <= max_seqlen_k
            if self.writes:
                assert softmax_scale is not None
                out[begin:end] = self._attended(q[begin:end], keys, values, softmax_scale, window_size)
        return out

    def _attended(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: list[int]
    ) -> torch.Tensor:
        queries, keys, group = len(query), len(key), query.shape[1] // key.shape[1]
        if self.interleaves_groups:
            key, value = (tensor.repeat(1, group, 1) for tensor in (key, value))
        else:
            key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * scale
        place = torch.arange(queries)[:, None] + (0 if self.aligns_top_left else keys - queries)
        distance = place - torch.arange(keys)
        unseen = distance < 0 if self.is_causal else torch.zeros_like(distance, dtype=torch.bool)
        if window[0] >= 0:
            unseen = unseen | (distance > window[0] + self.window_off_by)
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1).nan_to_num()
        return torch.einsum("hqk,khd->qhd", weights, value.float()).to(query.dtype)
