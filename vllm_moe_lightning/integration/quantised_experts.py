"""Refuses quantised experts that vLLM's CPU build cannot compute on this machine, before any weight is read.

vLLM itself finds out while it builds the model, deep inside the worker, or for some formats after loading.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.oracle import fp8, int8, int_wna16, mxfp4
from vllm.platforms import current_platform

from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.weight_quantisation import ExpertFormat, ExpertScheme, expert_format

CURE = "run it on a GPU, or take the checkpoint that is not quantised"


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
        backends = (fp8.Fp8MoeBackend.CPU, fp8.Fp8MoeBackend.CPU_W8A8)
        return [kernel for backend in backends for kernel in fp8.backend_to_kernel_cls(backend)]
    if scheme is ExpertScheme.INT8:
        return list(int8.backend_to_kernel_cls(int8.Int8MoeBackend.CPU))
    if scheme is ExpertScheme.INT4:
        backends_4bit = (int_wna16.WNA16MoEBackend.CPU, int_wna16.WNA16MoEBackend.ZEN_CPU)
        return [kernel for backend in backends_4bit for kernel in int_wna16.backend_to_kernel_cls(backend)]
    if scheme is ExpertScheme.MXFP4:
        return list(mxfp4.backend_to_kernel_cls(mxfp4.Mxfp4MoeBackend.CPU))
    return []
