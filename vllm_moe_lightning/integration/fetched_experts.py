"""Experts that are fetched one by one inside vLLM: in sweeps of how many tokens, and into how many slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.logger import init_logger

from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.experts_place import tokens_asking_for
from vllm_moe_lightning.integration.unstreamed_experts import host_weights
from vllm_moe_lightning.pipeline.executor import PipelineExecutor
from vllm_moe_lightning.pipeline.expert_places import ALL_STREAMED, ExpertPlaces
from vllm_moe_lightning.pipeline.paged_experts import FetchedExperts, PagedKernel
from vllm_moe_lightning.policy.policy import MIB
from vllm_moe_lightning.weights.expert_residency import ExpertResidency, ExpertSource

logger = init_logger("vllm.vllm_moe_lightning.fetched_experts")

UNPLANNED_SHARE = 0.5
"""Of a layer's experts: without a plan, sweeps that ask for no more are worth fetching for."""


class FetchedExpertPlaces:
    """modules: the expert container of each streamed layer. num_slots: None: as many as a layer has experts.
    most_tokens: of a sweep that fetches; None: as many as ask for half of a layer's experts."""

    def __init__(
        self,
        executor: PipelineExecutor,
        modules: Mapping[int, Any],
        max_tokens: int,
        num_slots: int | None,
        most_tokens: int | None,
    ) -> None:
        device = executor.device
        sources = [
            ExpertSource(layer, executor.store.layers[layer].host.name, *host_weights(executor, layer))
            for layer in modules
        ]
        try:
            num_experts = sources[0].shape.num_experts
        except ValueError as error:  # rows that the kernel has no loads for
            raise UnsupportedError(f"moe_lightning.experts: 'fetched' does not go: {error}; drop the option") from error
        if num_slots is not None and num_slots > len(modules) * num_experts:
            raise ValueError(
                f"moe_lightning.expert_slots: {num_slots} is more than the {len(modules) * num_experts} experts of the "
                f"{len(modules)} layers that are not resident; give fewer"
            )
        top_k = next(iter(modules.values())).moe_config.experts_per_token
        residency = ExpertResidency(sources, device, num_slots=num_slots or num_experts)
        kernel: PagedKernel = "triton" if device.torch_device.type == "cuda" else "reference"
        fetched = executor.fetched_experts = FetchedExperts(device, residency, max_tokens, top_k, kernel)
        self._layers = ExpertPlaces(fetched=frozenset(modules))
        self._most_tokens = (
            tokens_asking_for(UNPLANNED_SHARE, num_experts, top_k) if most_tokens is None else most_tokens
        )
        fetched.warm_up(self._most_tokens)
        logger.info(
            "moe_lightning: sweeps of up to %d tokens fetch the experts that they ask for; the hottest of %d stay in "
            "%d slots (%.1f MiB; computed by %s)",
            self._most_tokens,
            len(modules) * num_experts,
            residency.num_slots,
            residency.device_bytes / MIB,
            "Triton" if kernel == "triton" else "plain torch, as the device is emulated",
        )

    def places(self, num_tokens: int) -> ExpertPlaces:
        """Of a sweep of so many tokens."""
        return self._layers if num_tokens <= self._most_tokens else ALL_STREAMED
