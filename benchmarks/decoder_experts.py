"""Experts of the plain decoder that a sweep does not stream: on the CPU, or fetched one by one.

What integration/cpu_experts.py and integration/fetched_experts.py do inside vLLM, in its shortest form; and the same
without the engine, with the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal

import torch

from benchmarks.torch_decoder import DecoderConfig, Experts, MoeDecoder
from vllm_moe_lightning.kernels.attention import AttentionPool
from vllm_moe_lightning.kernels.expert_ffn import ExpertFfn
from vllm_moe_lightning.kernels.reference_ffn import expert_ffn
from vllm_moe_lightning.pipeline.coroutine import yield_to_executor
from vllm_moe_lightning.pipeline.executor import PipelineExecutor
from vllm_moe_lightning.pipeline.experts_path import ExpertsRequest
from vllm_moe_lightning.pipeline.host_experts import HostExperts
from vllm_moe_lightning.pipeline.paged_experts import FetchedExperts, PagedKernel
from vllm_moe_lightning.weights.expert_residency import ExpertResidency, ExpertSource
from vllm_moe_lightning.weights.store import PagedWeightStore

Elsewhere = Literal["cpu", "fetched"]


def experts_elsewhere(executor: PipelineExecutor) -> Experts:
    """For the model's forward: yields the experts of layers that the running sweep does not stream."""

    def ask(layer: int, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor | None:
        if layer not in executor.expert_places.layers:
            return None
        output = torch.empty_like(hidden)
        yield_to_executor(ExpertsRequest(hidden, ids, weights, output))
        return output

    return ask


def host_experts(
    executor: PipelineExecutor, config: DecoderConfig, pool: AttentionPool, max_tokens: int
) -> HostExperts:
    """Over the streamed layers' host pages."""
    experts_of = cache(lambda layer: ExpertFfn(*_host_weights(executor.store, layer)))
    return HostExperts(executor.device, pool, max_tokens, config.hidden, config.top_k, config.dtype, experts_of)


def fetched_experts(
    executor: PipelineExecutor, config: DecoderConfig, max_tokens: int, num_slots: int | None
) -> FetchedExperts:
    """Of all streamed layers, into so many slots; None: as many as a layer has experts."""
    device, store = executor.device, executor.store
    sources = [
        ExpertSource(layer, streamed.host.name, *_host_weights(store, layer))
        for layer, streamed in sorted(store.layers.items())
    ]
    residency = ExpertResidency(sources, device, num_slots=num_slots or config.num_experts)
    kernel: PagedKernel = "triton" if device.torch_device.type == "cuda" else "reference"
    return FetchedExperts(device, residency, max_tokens, config.top_k, kernel)


def _host_weights(store: PagedWeightStore, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(w13 [E, 2 I, H], w2 [E, H, I]), where they lie in the host pages."""
    streamed = store.layers[layer]
    views = {place.name: place.view_in(streamed.host.tensor) for place in streamed.layout.places}
    return views["w13"], views["w2"]


def plain_experts(model: MoeDecoder, place: Elsewhere) -> Experts:
    """The same without the engine, at once: bit by bit on the CPU, and if fetched where a micro-batch's experts have
    room all at once."""
    compute: Callable[..., torch.Tensor] = _on_cpu if place == "cpu" else _by_reference

    def ask(layer: int, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        mlp = model.layers[layer].mlp
        return compute(hidden, mlp.w13.data, mlp.w2.data, ids, weights)

    return ask


def _on_cpu(
    hidden: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    return ExpertFfn(w13, w2, max_streamed_tokens=max(1, ids.numel())).run(hidden, ids, weights)


def _by_reference(
    hidden: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    return expert_ffn(hidden, w13, w2, ids, weights).to(hidden.dtype)
