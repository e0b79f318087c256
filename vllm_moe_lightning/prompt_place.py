"""Where attention of prompts runs in an engine with decode attention on the CPU: by its options, its device, its model.

The engine asks the same two questions of the layers that it loaded (integration/prefill_place); here they are asked of
what is known before.
"""

from __future__ import annotations

from vllm_moe_lightning.config import MoeLightningConfig
from vllm_moe_lightning.context_place import context_query_tokens
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


def prompts_on_device(options: MoeLightningConfig, spec: MoeModelSpec, machine: HardwareProfile) -> bool:
    """Whether the device attends to prompts without context: it knows no sinks."""
    return wants_device(options, is_emulated=_is_emulated(machine)) and not spec.has_sinks


def planned_context_query_tokens(options: MoeLightningConfig, spec: MoeModelSpec, machine: HardwareProfile) -> int:
    """New tokens of a prompt's later chunk from which on the device attends to it; 0: never. It knows no sinks, no
    quantised caches, and not several kinds of cache in one model."""
    is_quantised = spec.kv_bytes_per_element != spec.widths.activation_bytes
    if spec.has_sinks or is_quantised or spec.num_windowed_layers not in (0, spec.num_layers):
        return 0
    planned = context_query_tokens(spec, machine)
    return least_query_tokens(options, planned, is_emulated=_is_emulated(machine))


def _is_emulated(machine: HardwareProfile) -> bool:
    return machine.gpu.name == EMULATED_GPU_NAME
