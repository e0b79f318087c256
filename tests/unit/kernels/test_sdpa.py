# SPDX-License-Identifier: Apache-2.0
"""Attention of prompts asks torch only for what its kernels for CUDA take, and never for more memory than is stated.
What they take is written down here from torch's sdp_utils.cpp; the numbers are those of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from vllm_moe_lightning.attention_memory import KEY_BYTES, MASK_BYTES, QUERY_BYTES, mask_bytes_per_pair
from vllm_moe_lightning.kernels import sdpa, torch_attention
from vllm_moe_lightning.kernels.sdpa import cuda_kernels
from vllm_moe_lightning.kernels.torch_attention import PagedRows
from vllm_moe_lightning.pipeline.attention import AttentionOptions
from vllm_moe_lightning.pipeline.device_prefill import TorchPrefill

TURING, AMPERE = (7, 5), (8, 0)
BACKEND_FLAGS = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
}


@dataclass(frozen=True)
class Call:
    backend: SDPBackend
    mask_pairs: int
    """Of queries, folded heads too, and keys."""
    score_pairs: int
    query_bytes: int


class Gpu:
    """Stands in for a GPU: refuses what its kernels refuse, and notes each call."""

    def __init__(self, capability: tuple[int, int], *, takes_masks: bool, is_run: bool = True) -> None:
        self.capability, self.takes_masks, self.is_run = capability, takes_masks, is_run
        self.calls: list[Call] = []
        self._sdpa = torch.nn.functional.scaled_dot_product_attention

    def kernels_of(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> sdpa.SdpaKernels:
        return cuda_kernels(self.capability, dtype, takes_masks=self.takes_masks)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        (backend,) = [backend for backend, is_enabled in BACKEND_FLAGS.items() if is_enabled()]
        if backend is SDPBackend.FLASH_ATTENTION:
            assert self.capability >= AMPERE
            assert query.dtype in (torch.float16, torch.bfloat16)
            assert attn_mask is None
            assert not is_causal or query.shape[2] == key.shape[2]
        else:
            assert query.shape[1] == key.shape[1] == value.shape[1], f"{backend} knows no groups"
        assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        queries, keys = query.shape[2], key.shape[2]
        mask_pairs = 0 if attn_mask is None else query.shape[0] * queries * keys
        if attn_mask is not None:
            assert attn_mask.shape == (query.shape[0], 1, queries, keys)
            assert attn_mask.stride(-1) == 1
        self.calls.append(Call(backend, mask_pairs, query[..., 0].numel() * keys, query.nbytes))
        if not self.is_run:
            return torch.empty_like(query)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            return self._sdpa(
                query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Gpu]:
    def make(capability: tuple[int, int], *, takes_masks: bool = True, is_run: bool = True) -> Gpu:
        stand_in = Gpu(capability, takes_masks=takes_masks, is_run=is_run)
        monkeypatch.setattr(sdpa, "kernels_of", stand_in.kernels_of)
        monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", stand_in)
        return stand_in

    return make


def prompt(length: int, group: int, dtype: torch.dtype, head_dim: int = 32) -> list[torch.Tensor]:
    """query, key, value, output; the first three as views of one tensor, as models make them."""
    heads = 2
    packed = torch.randn(length, heads * (group + 2), head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    query, key, value = packed.split([heads * group, heads, heads], dim=1)
    return [query, key, value, torch.full((length, heads * group, head_dim), float("nan"), dtype=dtype)]


def expected(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, scale: float) -> torch.Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.float().repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    place = torch.arange(len(query))
    distance = place[:, None] - place
    unseen = (distance < 0) | (distance >= window if window else False)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, float("-inf")).softmax(-1), value)


@pytest.mark.parametrize("window", [0, 1, 7, 40])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("takes_masks", [True, False])
@pytest.mark.parametrize("capability", [TURING, AMPERE])
@pytest.mark.parametrize("most_bytes", [MASK_BYTES, 5_000])
def test_prompts_are_attended_to_by_kernels_that_take_the_call(
    gpu: Callable[..., Gpu],
    capability: tuple[int, int],
    takes_masks: bool,
    dtype: torch.dtype,
    group: int,
    window: int,
    most_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sdpa, "MASK_BYTES", most_bytes)
    used = gpu(capability, takes_masks=takes_masks)
    query, key, value, output = prompt(61, group, dtype)
    TorchPrefill()(query, key, value, output, [60, 1], AttentionOptions(scale=0.2, sliding_window=window))
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    for begin, end in ((0, 60), (60, 61)):
        want = expected(query[begin:end], key[begin:end], value[begin:end], window, 0.2)
        torch.testing.assert_close(output[begin:end].float(), want, rtol=tolerance, atol=tolerance)
    has_flash = capability >= AMPERE and dtype == torch.float16
    first = used.calls[0].backend
    assert first is (
        SDPBackend.FLASH_ATTENTION
        if has_flash and not window
        else SDPBackend.EFFICIENT_ATTENTION
        if takes_masks
        else SDPBackend.MATH
    )


@pytest.mark.parametrize(
    ("length", "window", "context"),
    [(4096, 0, 0), (32768, 4096, 0), (32768, 128, 0), (2048, 0, 30000), (2048, 500, 30000)],
)
@pytest.mark.parametrize("takes_masks", [True, False])
def test_no_prompt_takes_more_memory_than_is_stated(
    gpu: Callable[..., Gpu], length: int, window: int, context: int, takes_masks: bool
) -> None:
    """On a chip without flash, with groups of four: what took two 2 GB temporaries and more."""
    used = gpu(TURING, takes_masks=takes_masks, is_run=False)
    heads, group, head_dim, width, block_size = 4, 4, 128, 2, 128
    query, output = (torch.empty(length, heads * group, head_dim, dtype=torch.float16) for _ in range(2))
    if context:
        num_blocks = -(-(context + length) // block_size)
        blocks = torch.zeros(num_blocks, heads, 2, block_size, head_dim, dtype=torch.float16)
        rows = PagedRows.of(
            torch.arange(num_blocks, dtype=torch.int32)[None],
            torch.tensor([0, length], dtype=torch.int32),
            torch.tensor([context + length], dtype=torch.int32),
            torch.arange(context, context + length),
            block_size,
            2 * head_dim * width,
            torch.clone,
        )
        torch_attention.paged_attention(query, blocks, rows, output, scale=1.0, sliding_window=window)
    else:
        key, value = torch.zeros(2, length, heads, head_dim, dtype=torch.float16).unbind()
        sdpa.attend_to_prompt(query, key, value, output, scale=1.0, sliding_window=window)
    assert used.calls
    for call in used.calls:
        scores = 0 if takes_masks else call.score_pairs * sdpa.SCORE_BYTES
        assert call.mask_pairs * mask_bytes_per_pair(width) + scores <= MASK_BYTES
        assert call.query_bytes * sdpa.QUERY_COPIES <= QUERY_BYTES
    if window:  # what is masked away is computed too, so there must not be much of it
        pairs_per_head = sum(call.mask_pairs for call in used.calls) / group / (heads if context else 1)
        assert pairs_per_head <= 2.1 * length * max(window, sdpa.LEAST_WINDOWED_QUERIES)


def test_keys_are_copied_from_the_cache_a_few_heads_and_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch, gpu: Callable[..., Gpu]
) -> None:
    """Rows of very different contexts are not all padded to the longest."""
    gpu(AMPERE, is_run=False)
    copied: list[int] = []
    gathered = torch_attention._gathered

    def note(half: torch.Tensor, table: torch.Tensor) -> Any:
        result = gathered(half, table)
        copied.append(2 * result.nbytes)
        return result

    monkeypatch.setattr(torch_attention, "_gathered", note)
    heads, head_dim, block_size, rows = 4, 128, 128, 40
    blocks = torch.zeros(10, heads, 2, block_size, head_dim, dtype=torch.float16)
    table = torch.zeros(rows, 256, dtype=torch.int32)
    lens = torch.full((rows,), 300, dtype=torch.int32)
    lens[7] = 32768
    paged = PagedRows.of(
        table,
        torch.arange(rows + 1, dtype=torch.int32),
        lens,
        torch.full((rows,), -1),
        block_size,
        2 * head_dim * 2,
        torch.clone,
    )
    query = torch.zeros(rows, 8, head_dim, dtype=torch.float16)
    torch_attention.paged_attention(query, blocks, paged, torch.empty_like(query), scale=1.0)
    assert max(copied) <= KEY_BYTES
    assert sum(copied) < 2 * 32768 * 2 * heads * head_dim * 2 * 3
    assert len(paged.batches) <= 4


def test_a_window_over_rows_that_start_far_apart_keeps_the_bound(gpu: Callable[..., Gpu]) -> None:
    used = gpu(TURING, takes_masks=True, is_run=False)
    context, length, window, group, head_dim = 32_768, 512, 4096, 4, 64
    query = torch.empty(2, length, 1, group, head_dim, dtype=torch.float16)
    key, value = torch.empty(2, 2, 1, context, head_dim, dtype=torch.float16).unbind()
    starts = sdpa.QueryStarts(torch.tensor([100, 30_000]), 100, 30_000)
    sdpa.attend(query, key, value, torch.empty_like(query), starts, scale=1.0, sliding_window=window)
    assert all(call.mask_pairs * mask_bytes_per_pair(2) <= MASK_BYTES for call in used.calls)


@pytest.mark.parametrize("rest", [float("nan"), float("inf"), float("-inf")])
def test_what_nobody_wrote_in_a_block_spoils_nothing(rest: float) -> None:
    block_size, head_dim = 16, 32
    blocks = torch.randn(2, 1, 2, block_size, head_dim, generator=torch.Generator().manual_seed(0))
    blocks[1, :, :, 4:] = rest
    rows = PagedRows.of(
        torch.tensor([[0, 1]], dtype=torch.int32),
        torch.tensor([0, 2], dtype=torch.int32),
        torch.tensor([20], dtype=torch.int32),
        torch.full((2,), -1),
        block_size,
        2 * head_dim * 4,
        torch.clone,
    )
    output = torch.empty(2, 1, head_dim)
    torch_attention.paged_attention(torch.ones(2, 1, head_dim), blocks, rows, output, scale=0.1)
    assert output.isfinite().all()
