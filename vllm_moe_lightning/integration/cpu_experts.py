"""Experts on the CPU inside vLLM: which layers a sweep computes there, and the kernel over their host pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.platforms import current_platform

from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.integration.experts import call_experts_directly, ffn_over, require_cpu_experts
from vllm_moe_lightning.integration.offloader import paged_modules
from vllm_moe_lightning.kernels.attention import AttentionPool
from vllm_moe_lightning.kernels.expert_ffn import ExpertFfn
from vllm_moe_lightning.pipeline.executor import PipelineExecutor
from vllm_moe_lightning.pipeline.host_experts import HostExperts
from vllm_moe_lightning.policy.policy import evenly_spread


class CpuExperts:
    """Prepares the streamed layers of a model. `table`: layers on the CPU by the tokens of a sweep (EnginePlan), None:
    all of them always."""

    def __init__(
        self,
        executor: PipelineExecutor,
        decoder_layers: Sequence[torch.nn.Module],
        pool: AttentionPool,
        max_tokens: int,
        table: Sequence[tuple[int, int]] | None,
    ) -> None:
        self._executor, self._table = executor, table
        self._streamed = tuple(sorted(executor.store.layers))
        modules = {layer: _only_experts_of(layer, decoder_layers[layer]) for layer in self._streamed}
        for layer, module in modules.items():
            require_cpu_experts(module)
            module.runs_on_cpu = lambda layer=layer: layer in executor.cpu_experts
        if not current_platform.is_cpu():
            for decoder_layer in decoder_layers:
                for runner in (module for module in decoder_layer.modules() if isinstance(module, MoERunner)):
                    call_experts_directly(runner)
        module = next(iter(modules.values()))
        executor.host_experts = HostExperts(
            executor.device,
            pool,
            max_tokens,
            module.w2_weight.shape[1],
            module.moe_config.experts_per_token,
            module.w2_weight.dtype,
            cache(self._kernel),
        )

    def _kernel(self, layer: int) -> ExpertFfn:
        streamed = self._executor.store.layers[layer]
        views = {place.name.rpartition(".")[2]: place.view_in(streamed.host.tensor) for place in streamed.layout.places}
        return ffn_over(views["w13_weight"], views["w2_weight"])

    def layers_of(self, num_tokens: int) -> frozenset[int]:
        """Decoder layers whose experts the CPU computes in a sweep of so many tokens, spread over the depth."""
        if self._table is None:
            return frozenset(self._streamed)
        count = next((layers for most, layers in self._table if num_tokens <= most), 0)
        return frozenset(self._streamed[index] for index in evenly_spread(count, len(self._streamed)))


def _only_experts_of(index: int, decoder_layer: torch.nn.Module) -> Any:
    modules = list(paged_modules(decoder_layer))
    if len(modules) != 1:
        raise UnsupportedError(
            f"moe_lightning.experts: decoder layer {index} has {len(modules)} blocks of experts, and the CPU computes "
            "exactly 1; drop the option"
        )
    return modules[0]
