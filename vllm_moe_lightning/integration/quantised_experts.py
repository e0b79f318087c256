"""Refuses quantised experts that vLLM's CPU build cannot compute on this machine, before any weight is read.

vLLM itself finds out while it builds the model, deep inside the worker, or for some formats after loading.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.fp8 import backend_to_kernel_cls as fp8_kernels
from vllm.model_executor.layers.fused_moe.oracle.int8 import Int8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.int8 import backend_to_kernel_cls as int8_kernels
from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import backend_to_kernel_cls as int4_kernels
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import backend_to_kernel_cls as mxfp4_kernels
from vllm.platforms import current_platform

from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.weight_quantisation import ExpertFormat, ExpertScheme, expert_format

CURE = "run it on a GPU, or take the checkpoint that is not quantised"


def has_quantised_experts(model_config: Any) -> bool:
    return expert_format(model_config.hf_config.to_dict()) is not None


def refuse_experts_without_kernel(model_config: Any) -> None:
    """Raises UnsupportedError with the format and what it needs. On the CPU build only: the CUDA build has kernels for
    all of them, on one GPU or another, and says itself which."""
    if not current_platform.is_cpu():
        return
    form = expert_format(model_config.hf_config.to_dict())
    if form is None or form.scheme is ExpertScheme.UNKNOWN:
        return
    if missing := _missing(form, model_config.dtype):
        raise UnsupportedError(f"moe_lightning: the experts of {model_config.model} are {form.name}; {missing}")


def _missing(form: ExpertFormat, dtype: torch.dtype) -> str | None:
    kernels = cpu_kernels(form.scheme)
    if not kernels:
        return f"vLLM's CPU build has no kernel for them: {CURE}"
    if not any(kernel._supports_current_device() for kernel in kernels):
        return f"vLLM's CPU build needs AMX for them (Intel Xeon, Sapphire Rapids or later), which is not here: {CURE}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"vLLM's CPU build computes them in bfloat16 or float16, not in {dtype}: pass --dtype bfloat16"
    return None


def cpu_kernels(scheme: ExpertScheme) -> list[Any]:
    """The classes that vLLM would try for a scheme; none if it has none for the CPU."""
    if scheme is ExpertScheme.FP8_BLOCK:
        return [*fp8_kernels(Fp8MoeBackend.CPU), *fp8_kernels(Fp8MoeBackend.CPU_W8A8)]
    if scheme is ExpertScheme.INT8:
        return list(int8_kernels(Int8MoeBackend.CPU))
    if scheme is ExpertScheme.INT4:
        return [*int4_kernels(WNA16MoEBackend.CPU), *int4_kernels(WNA16MoEBackend.ZEN_CPU)]
    if scheme is ExpertScheme.MXFP4:
        return list(mxfp4_kernels(Mxfp4MoeBackend.CPU))
    return []
