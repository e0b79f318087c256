"""One layer's routed experts through expert-granular residency: waves of pages, one pass of the kernel for each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import closing
from typing import Literal, Protocol

import torch

from vllm_moe_lightning.kernels.page_table import PageTable
from vllm_moe_lightning.kernels.paged_moe_launch import PagedMoeStep
from vllm_moe_lightning.kernels.reference_paged_moe import ReferencePagedMoeStep
from vllm_moe_lightning.weights.expert_residency import ExpertResidency

PagedKernel = Literal["triton", "reference"]


class _Step(Protocol):
    def add(self, table: PageTable, experts: Collection[int] | None = None) -> None: ...

    def finish(self) -> torch.Tensor: ...


def run_paged_experts(
    residency: ExpertResidency,
    layer: int,
    hidden: torch.Tensor,  # [T, H] on the device
    topk_weights: torch.Tensor,  # [T, K] on the device
    topk_ids: torch.Tensor,  # [T, K] on the device; negative: computed elsewhere
    host_topk_ids: torch.Tensor,  # the same on the host, where it is decided what to fetch
    *,
    kernel: PagedKernel = "triton",
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
) -> torch.Tensor:
    """The experts' output [T, H]: in hidden's dtype from the kernel, in float32 from the reference.

    reads, writes: buffers besides the weights that the compute stream touches in it, for hazard checks. The same bits
    come out for every number of slots, with the kernel.
    """
    make_step = {"triton": PagedMoeStep, "reference": ReferencePagedMoeStep}[kernel]
    step: _Step = make_step(hidden, topk_weights, topk_ids, residency.shape(layer))
    with closing(residency.waves(layer, host_topk_ids)) as waves:
        for wave in waves:
            with residency.use(wave, reads=reads, writes=writes) as table:
                step.add(table, None if wave.is_whole_step else wave.experts)
    return step.finish()
