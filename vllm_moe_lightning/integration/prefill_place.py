"""Which prompts the device attends to, where attention is on the CPU: by the options, the plan and what layers have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_moe_lightning.attention_memory import CONTEXT_FRAME_BYTES, MIB
from vllm_moe_lightning.config import MoeLightningConfig
from vllm_moe_lightning.device.base import Device
from vllm_moe_lightning.engine_plan import plan_of
from vllm_moe_lightning.integration.flash_attention import FLASH_VERSION, FlashPrefill, LayerShape, found_wrong
from vllm_moe_lightning.integration.forward import ContextLimits
from vllm_moe_lightning.integration.platform import is_cuda
from vllm_moe_lightning.kernels.sdpa import FLASH_CAPABILITY, kernels_of
from vllm_moe_lightning.kv_cache import PREFERRED_BLOCK_SIZE, kv_bytes_per_token
from vllm_moe_lightning.pipeline.device_prefill import DevicePrefill, TorchPrefill
from vllm_moe_lightning.prompt_place import least_query_tokens, wants_device

logger = init_logger("vllm.vllm_moe_lightning.prefill_place")


def prefill_kernel(
    options: MoeLightningConfig, device: Device, attention_layers: Sequence[Any], vllm_config: Any
) -> DevicePrefill:
    """vLLM's FlashAttention where it is there and right, else torch's kernels; the log says which. Torch's where the
    device attends to no prompts."""
    plain, dtype = TorchPrefill(), vllm_config.model_config.dtype
    if not is_cuda():
        return plain
    if not wants_device(options, is_emulated=False) and not _least_query_tokens(options, device.kind, vllm_config):
        return plain
    block_size = vllm_config.cache_config.block_size
    impls = [layer.impl for layer in attention_layers]
    shapes = {
        (impl.num_heads, impl.num_kv_heads, impl.head_size, impl.options.sliding_window): LayerShape(
            impl.num_heads, impl.num_kv_heads, impl.head_size, block_size, dtype, impl.options
        )
        for impl in impls
        if impl.options.is_plain
    }
    if not shapes:
        return plain
    flash, reason = flash_attention_of(device, list(shapes.values()), plain)
    if flash is not None:
        logger.info("moe_lightning: prompts on the device are attended to by vLLM's FlashAttention 2")
        return flash
    scores = any(kernels_of(device.torch_device, dtype, impl.head_size).writes_scores for impl in impls)
    logger.warning(
        "moe_lightning: prompts on the device are attended to by torch's kernels%s: %s",
        ", and those that write every score to memory, which are several times slower" if scores else "",
        reason,
    )
    return plain


def flash_attention_of(
    device: Device, shapes: Sequence[LayerShape], plain: DevicePrefill
) -> tuple[FlashPrefill | None, str]:
    """On CUDA; or why not."""
    capability = torch.cuda.get_device_capability(device.torch_device)
    if capability < FLASH_CAPABILITY:
        return None, f"FlashAttention needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
    if shapes[0].dtype not in (torch.float16, torch.bfloat16):
        return None, f"FlashAttention knows 16-bit elements, not {shapes[0].dtype}"
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, is_fa_version_supported

    if not is_fa_version_supported(FLASH_VERSION):
        return None, f"this build of vLLM has no FlashAttention {FLASH_VERSION} for this GPU"
    flash = FlashPrefill(flash_attn_varlen_func, device.to_device)
    for shape in shapes:
        if (fault := found_wrong(flash, plain, shape, device.to_device)) is not None:
            return None, f"vLLM's FlashAttention {FLASH_VERSION} is not used, since {fault}"
    return flash, ""


def prefill_of(
    options: MoeLightningConfig, device_kind: str, attention_layers: Sequence[Any], kernel: DevicePrefill
) -> DevicePrefill | None:
    """Attention of prompts without context on the device; None: the CPU's."""
    if not wants_device(options, is_emulated=device_kind == "emulated"):
        return None
    unfit = [layer.layer_name for layer in attention_layers if not layer.impl.options.is_plain]
    if not unfit:
        return kernel
    logger.warning(
        "moe_lightning: prompts are attended to on the CPU, since attention on the device knows neither sinks nor a "
        "soft cap, which %d layers have (%s, ...)",
        len(unfit),
        unfit[0],
    )
    return None


def context_limits_of(
    options: MoeLightningConfig, device_kind: str, attention_layers: Sequence[Any], vllm_config: Any
) -> ContextLimits | None:
    """For prompts with context; None: the CPU's."""
    least = _least_query_tokens(options, device_kind, vllm_config)
    if not least:
        return None
    impls = [layer.impl for layer in attention_layers]
    for is_so, what in (
        (any(impl.cache_kind is not None for impl in impls), "quantised caches"),
        (not all(impl.options.is_plain for impl in impls), "sinks or soft caps"),
        (len({impl.sliding_window for impl in impls}) > 1, "several kinds of KV cache"),
    ):
        if is_so:
            logger.warning(
                "moe_lightning: prompts with context are attended to on the CPU: the device does not know %s", what
            )
            return None
    longest = vllm_config.model_config.max_model_len
    element_bytes = vllm_config.model_config.dtype.itemsize
    token_bytes = max(kv_bytes_per_token(1, impl.num_kv_heads, impl.head_size, element_bytes) for impl in impls)
    # vLLM may come to the size of a block that our backend prefers only after the model is loaded.
    block_size = max(vllm_config.cache_config.block_size, PREFERRED_BLOCK_SIZE)
    num_tokens = min(-(-longest // block_size), CONTEXT_FRAME_BYTES // token_bytes // block_size) * block_size
    if num_tokens < longest:
        logger.warning(
            "moe_lightning: prompts are attended to on the CPU from %d tokens on, since their context takes more than "
            "%d MiB of the device in each layer",
            num_tokens + 1,
            CONTEXT_FRAME_BYTES // MIB,
        )
    return ContextLimits(least, num_tokens)


def _least_query_tokens(options: MoeLightningConfig, device_kind: str, vllm_config: Any) -> int:
    """Of a row whose context comes up to the device; 0: of none."""
    plan = plan_of(vllm_config)
    planned = plan.context_query_tokens if plan is not None else 0
    return least_query_tokens(options, planned, is_emulated=device_kind == "emulated")
