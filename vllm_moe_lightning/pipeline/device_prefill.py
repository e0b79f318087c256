"""Attention of prompts on the device, from the keys and values just computed, without a cache.

For rows whose context is empty: all that they attend to is at hand. Their keys and values go to the host cache beside,
for the steps to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from vllm_moe_lightning.pipeline.attention import AttentionOptions


class DevicePrefill(Protocol):
    """Causal attention of whole prompts, one after the other in T tokens, enqueued on the compute stream."""

    def supports(self, options: AttentionOptions) -> bool: ...

    def __call__(
        self,
        query: torch.Tensor,  # [T, num_heads, head_dim]
        key: torch.Tensor,  # [T, num_kv_heads, head_dim]
        value: torch.Tensor,  # [T, num_kv_heads, head_dim]
        output: torch.Tensor,  # [T, num_heads, head_dim]
        lengths: Sequence[int],  # tokens of each prompt, T in all
        options: AttentionOptions,
    ) -> None: ...


class TorchPrefill:
    """By torch's scaled_dot_product_attention, prompt by prompt: on CUDA its flash or memory-efficient kernels, which
    every GPU that vLLM supports has one of."""

    def supports(self, options: AttentionOptions) -> bool:
        return options.sinks is None and options.soft_cap == 0.0

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
            end = begin + length
            q, k, v = (tensor[begin:end].transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
            windowed = 0 < options.sliding_window < length
            mask = _band(length, options.sliding_window, query.device) if windowed else None
            attended = torch.nn.functional.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=options.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            output[begin:end].copy_(attended.squeeze(0).transpose(0, 1))
            begin = end


def _band(length: int, window: int, device: torch.device) -> torch.Tensor:
    """bool [length, length]: a token sees itself and the window - 1 tokens before it."""
    token = torch.arange(length, device=device)
    distance = token[:, None] - token[None, :]
    return (distance >= 0) & (distance < window)
