"""Layers of routed experts in a device's host memory, their residency, and what should come out."""

from __future__ import annotations

from contextlib import closing
from typing import Any, NamedTuple

import torch

from vllm_moe_lightning.device.base import Device
from vllm_moe_lightning.kernels.reference_ffn import expert_ffn
from vllm_moe_lightning.pipeline.paged_experts import PagedKernel, paged_step
from vllm_moe_lightning.weights.expert_residency import ExpertResidency, ExpertSource

HIDDEN_SIZE, INTERMEDIATE_SIZE = 32, 24
DTYPE = torch.float16


class Batch(NamedTuple):
    hidden: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    host_topk_ids: torch.Tensor


class HostedExperts:
    def __init__(
        self,
        device: Device,
        *,
        num_layers: int,
        num_experts: int,
        num_slots: int,
        page_bytes: int = 512,
        **options: Any,  # of ExpertResidency
    ) -> None:
        """page_bytes: by default a page boundary falls inside of w13 and of w2, and the last pages are not full."""
        self.device, self.num_experts = device, num_experts
        rng = torch.Generator().manual_seed(num_layers)
        self.layers = []
        for layer in range(num_layers):
            weights = []
            for matrix, shape in (
                ("w13", (num_experts, 2 * INTERMEDIATE_SIZE, HIDDEN_SIZE)),
                ("w2", (num_experts, HIDDEN_SIZE, INTERMEDIATE_SIZE)),
            ):
                values = (torch.randn(shape, generator=rng) / shape[2] ** 0.5).to(DTYPE)
                buffer = device.allocate_host(values.nbytes, f"host[{layer}].{matrix}")
                weights.append(buffer.tensor.view(DTYPE).view(shape))
                weights[-1].copy_(values)
            self.layers.append(ExpertSource(layer, f"host[{layer}]", *weights))
        self.residency = ExpertResidency(self.layers, device, num_slots=num_slots, page_bytes=page_bytes, **options)

    def batch(self, num_tokens: int, top_k: int, seed: int, experts: list[int] | None = None) -> Batch:
        """Random tokens; experts: those that they choose among."""
        rng = torch.Generator().manual_seed(seed)
        among = torch.tensor(range(self.num_experts) if experts is None else experts)
        chosen = torch.rand(num_tokens, len(among), generator=rng).topk(top_k).indices
        ids = among[chosen].int()
        hidden = torch.randn(num_tokens, HIDDEN_SIZE, generator=rng).to(DTYPE)
        weights, place = torch.rand(num_tokens, top_k, generator=rng), self.device.torch_device
        return Batch(hidden.to(place), weights.to(place), ids.to(place), ids.clone())

    def expected(self, layer: int, batch: Batch) -> torch.Tensor:
        source = self.layers[layer]
        return expert_ffn(batch.hidden.cpu(), source.w13, source.w2, batch.host_topk_ids, batch.topk_weights.cpu())

    def run(self, layer: int, batch: Batch, kernel: PagedKernel = "reference") -> torch.Tensor:
        """[T, H] through the residency: in hidden's dtype from the kernel, in float32 from the reference."""
        return run_resident(self.residency, layer, batch, kernel)


def run_resident(
    residency: ExpertResidency, layer: int, batch: Batch, kernel: PagedKernel = "reference"
) -> torch.Tensor:
    hidden, topk_weights, topk_ids, host_topk_ids = batch
    step = paged_step(kernel, hidden, topk_weights, topk_ids, residency.shape(layer))
    with closing(residency.waves(layer, host_topk_ids)) as waves:
        for wave in waves:
            with residency.use(wave, f"experts({layer})") as table:
                step.add(table, None if wave.is_whole_step else wave.experts)
    return step.finish()
