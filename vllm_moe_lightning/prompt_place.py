"""Where attention of prompts runs in an engine with decode attention on the CPU: by its options, its device, its model.

The engine asks the same two questions of the layers that it loaded (integration/prefill_place); here they are asked of
what is known before.
"""

from __future__ import annotations

from typing import TypedDict

from vllm_moe_lightning.config import MoeLightningConfig
from vllm_moe_lightning.context_place import context_query_tokens
from vllm_moe_lightning.engine_plan import GIVEN
from vllm_moe_lightning.hardware import EMULATED_GPU_NAME, HardwareProfile
from vllm_moe_lightning.model_spec import MoeModelSpec

DEFAULT_CONTEXT_QUERY_TOKENS = 8  # where no plan says


def wants_device(options: MoeLightningConfig, *, is_emulated: bool) -> bool:
    """For prompts without context. The emulated device is a core like the CPU's own, with a slower kernel."""
    wanted = options.prefill_attention
    return wanted == "device" or (wanted == "auto" and not is_emulated)


def least_query_tokens(options: MoeLightningConfig, planned: int, *, is_emulated: bool) -> int:
    """New tokens of a row with context from which on the device is asked for; 0: never. `planned`: what the cost model
    says, 0 without a plan. Of the emulated device it says nothing."""
    if options.prefill_context == "cpu":
        return 0
    return (0 if is_emulated else planned) or (DEFAULT_CONTEXT_QUERY_TOKENS if options.prefill_context == "link" else 0)


class PromptPlaces(TypedDict):
    """Fields of HrmPolicy and of PlanLimits."""

    prompts_on_gpu: bool
    context_query_tokens: int


def prompt_places(options: MoeLightningConfig, spec: MoeModelSpec, machine: HardwareProfile) -> PromptPlaces:
    """The device knows no sinks; of prompts with a context, no quantised caches either, nor a model whose layers have
    several kinds of cache."""
    is_emulated = machine.gpu.name == EMULATED_GPU_NAME
    is_quantised = spec.kv_bytes_per_element != spec.widths.activation_bytes
    is_unfit = spec.has_sinks or is_quantised or spec.num_windowed_layers not in (0, spec.num_layers)
    planned = context_query_tokens(spec, machine)
    return PromptPlaces(
        prompts_on_gpu=wants_device(options, is_emulated=is_emulated) and not spec.has_sinks,
        context_query_tokens=0 if is_unfit else least_query_tokens(options, planned, is_emulated=is_emulated),
    )


def why_prompts_are_there(options: MoeLightningConfig, spec: MoeModelSpec) -> str:
    """For the plan's table."""
    if spec.has_sinks and options.prefill_attention != "cpu":
        return f"{spec.model_type} has sinks, which the device does not know"
    return "auto: on CUDA the device, on the emulated device the CPU" if options.prefill_attention == "auto" else GIVEN
