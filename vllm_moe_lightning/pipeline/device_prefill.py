"""Attention of prompts on the device, from the keys and values just computed, without a cache.

For rows whose context is empty: all that they attend to is at hand. Their keys and values go to the host cache beside,
for the steps to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from vllm_moe_lightning.kernels.sdpa import attend_to_prompt
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
    """By torch's scaled_dot_product_attention, prompt by prompt (kernels/sdpa.py)."""

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
