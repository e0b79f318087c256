"""Experts on the CPU inside vLLM: which layers a sweep computes there, and the kernel over their host pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from vllm_moe_lightning.integration.experts import ffn_over
from vllm_moe_lightning.integration.unstreamed_experts import host_weights
from vllm_moe_lightning.kernels.attention import AttentionPool
from vllm_moe_lightning.pipeline.executor import PipelineExecutor
from vllm_moe_lightning.pipeline.expert_places import ExpertPlaces
from vllm_moe_lightning.pipeline.host_experts import HostExperts
from vllm_moe_lightning.policy.policy import evenly_spread


class CpuExperts:
    """modules: the expert container of each streamed layer. table: layers on the CPU by the tokens of a sweep
    (EnginePlan), None: all of them always."""

    def __init__(
        self,
        executor: PipelineExecutor,
        modules: Mapping[int, Any],
        pool: AttentionPool,
        max_tokens: int,
        table: Sequence[tuple[int, int]] | None,
    ) -> None:
        self._table = table
        self._streamed = tuple(sorted(modules))
        module = next(iter(modules.values()))
        executor.host_experts = HostExperts(
            executor.device,
            pool,
            max_tokens,
            module.w2_weight.shape[1],
            module.moe_config.experts_per_token,
            module.w2_weight.dtype,
            cache(lambda layer: ffn_over(*host_weights(executor, layer))),
        )

    def places(self, num_tokens: int) -> ExpertPlaces:
        """Of a sweep of so many tokens; layers on the CPU are spread over the depth."""
        if self._table is None:
            return ExpertPlaces(on_cpu=frozenset(self._streamed))
        count = next((layers for most, layers in self._table if num_tokens <= most), 0)
        layers = (self._streamed[index] for index in evenly_spread(count, len(self._streamed)))
        return ExpertPlaces(on_cpu=frozenset(layers))
