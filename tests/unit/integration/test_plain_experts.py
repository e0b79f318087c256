# SPDX-License-Identifier: Apache-2.0
"""Where torch's matrix products take the place of vLLM's kernel, and for which experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from vllm_moe_lightning.config import ExpertKernel
from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.integration import plain_experts
from vllm_moe_lightning.integration.experts import PagedExperts
from vllm_moe_lightning.kernels.torch_experts import torch_experts


class Experts(PagedExperts, torch.nn.Module):
    """As much of vLLM's container as is looked at."""

    def __init__(self, activation: str = "silu", backend: str = "TRITON") -> None:
        super().__init__()
        self.activation, self.layer_name = activation, "layers.0.experts"
        self.apply_router_weight_on_input = False
        self.is_unpacked = True
        self.quant_method: Any = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
        torch.nn.Module.__init__(self.quant_method)
        self.quant_method.unquantized_backend = type("Backend", (), {"value": backend})


@pytest.mark.parametrize(
    ("option", "capability", "is_ours"),
    [
        ("auto", 75, True),
        ("auto", 70, True),
        ("auto", 80, False),
        ("auto", 120, False),
        ("auto", None, False),  # the CPU build
        ("vllm", 75, False),
        ("torch", 90, True),
        ("torch", None, True),
    ],
)
def test_auto_is_by_what_triton_makes_of_the_chip(
    option: ExpertKernel, capability: int | None, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_experts, "is_cuda", lambda: capability is not None)
    monkeypatch.setattr(
        plain_experts.current_platform,
        "has_device_capability",
        lambda least: capability is not None and capability >= least,
    )
    experts = Experts()
    plain_experts.put_kernel_in_place([torch.nn.Sequential(experts)], option)
    assert experts.own_kernel is (torch_experts if is_ours else None)


def test_auto_leaves_other_experts_to_vllm_and_torch_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_experts, "_is_before_triton_s_tensor_cores", lambda: True)
    plain, other = Experts(), Experts(activation="gelu")
    layers = [torch.nn.Sequential(plain), torch.nn.Sequential(other)]
    plain_experts.put_kernel_in_place(layers, "auto")
    assert (plain.own_kernel, other.own_kernel) == (torch_experts, None)
    with pytest.raises(
        UnsupportedError, match=r"expert_kernel: 'torch' does not know the activation gelu, which layers"
    ):
        plain_experts.put_kernel_in_place(layers, "torch")


def test_weights_that_a_backend_has_put_in_another_order_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_experts.current_platform, "is_cpu", lambda: False)
    assert plain_experts.reason_not_plain(Experts()) is None
    reordered = Experts(backend="FlashInfer CUTLASS")
    assert plain_experts.reason_not_plain(reordered) == "the weights' order of vLLM's MoE backend FlashInfer CUTLASS"
