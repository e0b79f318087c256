"""Which prompts the device attends to, where attention is on the CPU: by the options, the plan and what layers have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.logger import init_logger

from vllm_moe_lightning.attention_memory import CONTEXT_FRAME_BYTES, MIB
from vllm_moe_lightning.config import MoeLightningConfig
from vllm_moe_lightning.engine_plan import plan_of
from vllm_moe_lightning.integration.forward import ContextLimits
from vllm_moe_lightning.kv_cache import kv_bytes_per_token
from vllm_moe_lightning.pipeline.device_prefill import DevicePrefill, TorchPrefill
from vllm_moe_lightning.prompt_place import least_query_tokens, wants_device

logger = init_logger("vllm.vllm_moe_lightning.prefill_place")


def prefill_of(options: MoeLightningConfig, device_kind: str, attention_layers: Sequence[Any]) -> DevicePrefill | None:
    """Attention of prompts without context on the device; None: the CPU's."""
    if not wants_device(options, is_emulated=device_kind == "emulated"):
        return None
    prefill = TorchPrefill()
    unfit = [layer.layer_name for layer in attention_layers if not prefill.supports(layer.impl.options)]
    if not unfit:
        return prefill
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
    plan = plan_of(vllm_config)
    planned = plan.context_query_tokens if plan is not None else 0
    least = least_query_tokens(options, planned, is_emulated=device_kind == "emulated")
    if not least:
        return None
    impls = [layer.impl for layer in attention_layers]
    for is_so, what in (
        (any(impl.cache_kind is not None for impl in impls), "quantised caches"),
        (not all(TorchPrefill().supports(impl.options) for impl in impls), "sinks or soft caps"),
        (len({impl.sliding_window for impl in impls}) > 1, "several kinds of KV cache"),
    ):
        if is_so:
            logger.warning(
                "moe_lightning: prompts with context are attended to on the CPU: the device does not know %s", what
            )
            return None
    block_size, longest = vllm_config.cache_config.block_size, vllm_config.model_config.max_model_len
    element_bytes = vllm_config.model_config.dtype.itemsize
    token_bytes = max(kv_bytes_per_token(1, impl.num_kv_heads, impl.head_size, element_bytes) for impl in impls)
    num_blocks = min(-(-longest // block_size), CONTEXT_FRAME_BYTES // (token_bytes * block_size))
    if num_blocks * block_size < longest:
        logger.warning(
            "moe_lightning: prompts are attended to on the CPU from %d tokens on, since their context takes more than "
            "%d MiB of the device in each layer",
            num_blocks * block_size + 1,
            CONTEXT_FRAME_BYTES // MIB,
        )
    return ContextLimits(least, num_blocks)
