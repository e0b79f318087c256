"""What experts that a sweep need not stream ask of vLLM's modules, wherever they are computed then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.platforms import current_platform

from vllm_moe_lightning.config import ExpertsPlace
from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.integration.experts import call_experts_directly
from vllm_moe_lightning.integration.offloader import paged_modules
from vllm_moe_lightning.integration.plain_experts import require_plain
from vllm_moe_lightning.pipeline.executor import PipelineExecutor


def prepare_modules(
    executor: PipelineExecutor, decoder_layers: Sequence[torch.nn.Module], option: ExpertsPlace
) -> dict[int, Any]:
    """The expert container of each streamed layer, which asks the executor from now on where its experts are.

    Raises UnsupportedError for experts that our kernels do not compute.
    """
    modules = {layer: _only_experts_of(layer, decoder_layers[layer]) for layer in sorted(executor.store.layers)}
    for layer, module in modules.items():
        require_plain(module, f"experts: {option!r}")
        module.is_elsewhere = lambda layer=layer: layer in executor.expert_places.layers
    if not current_platform.is_cpu():
        for decoder_layer in decoder_layers:
            for runner in (module for module in decoder_layer.modules() if isinstance(module, MoERunner)):
                call_experts_directly(runner)
    return modules


def host_weights(executor: PipelineExecutor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(w13 [E, 2 I, H], w2 [E, H, I]) of a streamed layer, where they lie in the host pages."""
    streamed = executor.store.layers[layer]
    views = {place.name.rpartition(".")[2]: place.view_in(streamed.host.tensor) for place in streamed.layout.places}
    return views["w13_weight"], views["w2_weight"]


def _only_experts_of(index: int, decoder_layer: torch.nn.Module) -> Any:
    modules = list(paged_modules(decoder_layer))
    if len(modules) != 1:
        raise UnsupportedError(
            f"moe_lightning.experts: decoder layer {index} has {len(modules)} blocks of experts, and exactly 1 is "
            "supported; drop the option"
        )
    return modules[0]
