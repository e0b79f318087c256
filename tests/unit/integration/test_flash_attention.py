# SPDX-License-Identifier: Apache-2.0
"""vLLM's FlashAttention is called as its docstring says, and one that does anything else is found at start."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.helpers.varlen_attention import VarlenAttention
from vllm_moe_lightning.integration.flash_attention import FlashPrefill, LayerShape, found_wrong
from vllm_moe_lightning.pipeline.attention import AttentionOptions
from vllm_moe_lightning.pipeline.device_prefill import TorchPrefill

FULL = AttentionOptions(0.2)
WINDOWED = AttentionOptions(0.2, sliding_window=4096)


def shape(options: AttentionOptions = WINDOWED, heads: int = 6, dtype: torch.dtype = torch.bfloat16) -> LayerShape:
    return LayerShape(heads, 2, 32, 16, dtype, options)


def fault(varlen: Callable[..., torch.Tensor], of: LayerShape) -> str | None:
    return found_wrong(FlashPrefill(varlen, torch.clone), TorchPrefill(), of, torch.clone)


@pytest.mark.parametrize("options", [FULL, WINDOWED, AttentionOptions(0.2, sliding_window=1)])
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_agrees_with_torchs_kernels(options: AttentionOptions, heads: int, dtype: torch.dtype) -> None:
    assert fault(VarlenAttention(), shape(options, heads, dtype)) is None


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (VarlenAttention(window_off_by=1), "off by"),
        (VarlenAttention(window_off_by=-1), "off by"),
        (VarlenAttention(window_off_by=1000), "off by"),
        (VarlenAttention(is_causal=False), "off by"),
        (VarlenAttention(aligns_top_left=True), "prompts with context are off by"),
        (VarlenAttention(ignores_block_table=True), "prompts with context are off by"),
        (VarlenAttention(interleaves_groups=True), "off by"),
        (VarlenAttention(writes=False), "off by nan"),
        (VarlenAttention(refuses=True), "this head size is not supported"),
    ],
    ids=repr,
)
def test_one_that_does_something_else_is_found(wrong: VarlenAttention, what: str) -> None:
    found = fault(wrong, shape())
    assert found is not None
    assert what in found


def test_the_lengths_of_a_step_go_to_the_device_once_for_all_layers() -> None:
    copies = 0

    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal copies
        copies += 1
        return tensor.clone()

    flash = FlashPrefill(VarlenAttention(), to_device)
    query, key, value = torch.randn(3, 5, 2, 32).unbind()
    first, second = [2, 3], [1, 4]
    for _ in range(3):
        for lengths in (first, second):
            flash(query, key, value, torch.empty_like(query), lengths, FULL)
    assert copies == 2
    third = [2, 3]
    flash(query, key, value, torch.empty_like(query), third, FULL)
    assert copies == 3
