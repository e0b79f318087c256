"""Attention of prompts on the device: without context from the keys and values just computed, with context over a frame
that it was brought up to.

Their keys and values go to the host cache beside, for the steps to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from vllm_moe_lightning.kernels.sdpa import attend_to_prompt
from vllm_moe_lightning.kernels.torch_attention import PagedRows, paged_attention
from vllm_moe_lightning.pipeline.attention import AttentionOptions


class DevicePrefill(Protocol):
    """Causal attention, enqueued on the compute stream. Called for whole prompts, one after the other in T tokens."""

    def __call__(
        self,
        query: torch.Tensor,  # [T, num_heads, head_dim]
        key: torch.Tensor,  # [T, num_kv_heads, head_dim]
        value: torch.Tensor,  # [T, num_kv_heads, head_dim]
        output: torch.Tensor,  # [T, num_heads, head_dim]
        lengths: Sequence[int],  # tokens of each prompt, T in all
        options: AttentionOptions,
    ) -> None: ...

    def with_context(
        self,
        query: torch.Tensor,  # [T, num_heads, head_dim]
        blocks: torch.Tensor,  # [num_blocks, num_kv_heads, 2 (K, V), block_size, head_dim], new tokens included
        rows: PagedRows,
        output: torch.Tensor,  # [T, num_heads, head_dim]
        options: AttentionOptions,
    ) -> None: ...


class TorchPrefill:
    """By torch's scaled_dot_product_attention (kernels/sdpa.py)."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lengths: Sequence[int],
        options: AttentionOptions,
    ) -> None:
        begin = 0
        for length in lengths:
            prompt = slice(begin, begin + length)
            attend_to_prompt(
                query[prompt],
                key[prompt],
                value[prompt],
                output[prompt],
                scale=options.scale,
                sliding_window=options.sliding_window,
            )
            begin += length

    def with_context(
        self,
        query: torch.Tensor,
        blocks: torch.Tensor,
        rows: PagedRows,
        output: torch.Tensor,
        options: AttentionOptions,
    ) -> None:
        paged_attention(query, blocks, rows, output, scale=options.scale, sliding_window=options.sliding_window)
