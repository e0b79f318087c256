"""Experts that our own kernels compute: which those are, and on which GPUs one of ours takes the place of vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform

from vllm_moe_lightning.config import ExpertKernel
from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.integration.offloader import paged_modules
from vllm_moe_lightning.integration.platform import is_cuda
from vllm_moe_lightning.kernels.torch_experts import torch_experts

logger = init_logger("vllm.vllm_moe_lightning.plain_experts")

LAYOUT_BACKEND = "TRITON"  # of vLLM's on CUDA: the one that leaves w13 [E, 2 I, H] and w2 [E, H, I] as they are loaded
FIRST_WITH_TRITON_TENSOR_CORES = 80  # compute capability


def reason_not_plain(module: Any) -> str | None:
    """What our kernels don't know about an expert container; None: they compute it."""
    activation = getattr(module.activation, "value", module.activation)
    is_quantised = not isinstance(module.quant_method, UnquantizedFusedMoEMethod)
    backend = None if is_quantised or current_platform.is_cpu() else module.quant_method.unquantized_backend.value
    reasons = (
        (is_quantised, "quantised experts"),
        (activation != "silu", f"the activation {activation}"),
        (hasattr(module, "w13_bias") or hasattr(module, "w2_bias"), "experts with biases"),
        (module.apply_router_weight_on_input, "router weights on the experts' input"),
        (not module.is_unpacked and current_platform.is_cpu(), "packed experts"),
        (backend not in (None, LAYOUT_BACKEND), f"the weights' order of vLLM's MoE backend {backend}"),
    )
    return next((what for found, what in reasons if found), None)


def require_plain(module: Any, option: str) -> None:
    """Raises UnsupportedError, naming the option that asks for our kernels."""
    if what := reason_not_plain(module):
        raise UnsupportedError(
            f"moe_lightning.{option} does not know {what}, which {module.layer_name} has; drop the option"
        )


def put_kernel_in_place(decoder_layers: Sequence[torch.nn.Module], option: ExpertKernel) -> None:
    """`auto`: torch's matrix products where Triton, in which vLLM's kernel is written, has no tensor-core code."""
    if option == "vllm" or (option == "auto" and not _is_before_triton_s_tensor_cores()):
        return
    modules: list[Any] = [module for layer in decoder_layers for module in paged_modules(layer)]
    if option == "torch":
        for module in modules:
            require_plain(module, "expert_kernel: 'torch'")
    plain = [module for module in modules if reason_not_plain(module) is None]
    for module in plain:
        module.own_kernel = torch_experts
    if plain:
        logger.info("moe_lightning: experts on the device by torch's matrix products, in %d layers", len(plain))


def _is_before_triton_s_tensor_cores() -> bool:
    return is_cuda() and not current_platform.has_device_capability(FIRST_WITH_TRITON_TENSOR_CORES)
