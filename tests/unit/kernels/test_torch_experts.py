# SPDX-License-Identifier: Apache-2.0
"""Experts by torch's matrix products give what the plain reference gives."""

import pytest
import torch

from vllm_moe_lightning.kernels.reference_ffn import expert_ffn
from vllm_moe_lightning.kernels.torch_experts import torch_experts

HIDDEN, INTERMEDIATE = 48, 40


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"), [(1, 1, 1), (1, 2, 8), (17, 2, 8), (64, 8, 128), (33, 3, 3), (5, 4, 60)]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_any_shape_is_right(
    num_tokens: int, top_k: int, num_experts: int, dtype: torch.dtype, tolerance: float
) -> None:
    rng = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, HIDDEN, generator=rng).to(dtype)
    w13 = (torch.randn(num_experts, 2 * INTERMEDIATE, HIDDEN, generator=rng) / HIDDEN**0.5).to(dtype)
    w2 = (torch.randn(num_experts, HIDDEN, INTERMEDIATE, generator=rng) / INTERMEDIATE**0.5).to(dtype)
    ids = torch.rand(num_tokens, num_experts, generator=rng).topk(top_k).indices.int()
    weights = torch.rand(num_tokens, top_k, generator=rng)
    before = hidden.clone()
    output = torch_experts(hidden, weights, ids, w13, w2)
    assert output.dtype == dtype
    assert torch.equal(hidden, before)
    expected = expert_ffn(hidden, w13, w2, ids, weights)
    assert (output.float() - expected).norm() <= tolerance * expected.norm()


def test_experts_without_tokens_are_not_read() -> None:
    hidden, weights = torch.ones(3, HIDDEN), torch.ones(3, 1)
    w13, w2 = torch.full((4, 2 * INTERMEDIATE, HIDDEN), torch.nan), torch.full((4, HIDDEN, INTERMEDIATE), torch.nan)
    w13[2], w2[2] = 0.1, 0.1
    assert torch_experts(hidden, weights, torch.full((3, 1), 2), w13, w2).isfinite().all()
