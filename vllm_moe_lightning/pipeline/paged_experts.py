"""Experts of a micro-batch on the device, one by one: those that its tokens ask for and that are not there come up, the
hottest stay. For sweeps with so few tokens that they leave most experts of a layer alone.

The launching thread has to know who is asked for: it waits for the routing, and for nothing else. Owns the staging
buffers of the routing, and what is on its way between the fetch and its use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from typing import Literal, Protocol

import torch

from vllm_moe_lightning.device.base import Buffer, Device
from vllm_moe_lightning.kernels.page_table import ExpertShape, PageTable
from vllm_moe_lightning.kernels.paged_moe_launch import PagedMoeStep
from vllm_moe_lightning.kernels.reference_paged_moe import ReferencePagedMoeStep
from vllm_moe_lightning.pipeline.experts_path import ExpertsPath, ExpertsRequest, TokenRegions
from vllm_moe_lightning.pipeline.tasks import TaskKey, TaskName
from vllm_moe_lightning.weights.expert_residency import ExpertResidency, Wave

PagedKernel = Literal["triton", "reference"]
ID_BYTES = 4  # an expert's number in the staging buffers: int32


class _Step(Protocol):
    def add(self, table: PageTable, experts: Collection[int] | None = None) -> None: ...

    def finish(self, output: torch.Tensor | None = None) -> torch.Tensor: ...


def paged_step(
    kernel: PagedKernel,
    hidden: torch.Tensor,  # [T, H] on the device
    topk_weights: torch.Tensor,  # [T, K] on the device
    topk_ids: torch.Tensor,  # [T, K] on the device
    shape: ExpertShape,
) -> _Step:
    make_step = PagedMoeStep if kernel == "triton" else ReferencePagedMoeStep
    return make_step(hidden, topk_weights, topk_ids, shape)


class FetchedExperts(ExpertsPath):
    """The tasks routing_offload and experts_fetch, and the experts' part of post_experts.

    max_tokens: most tokens of a step. The same bits come out for every number of slots, with the Triton kernel.
    """

    def __init__(
        self, device: Device, residency: ExpertResidency, max_tokens: int, top_k: int, kernel: PagedKernel
    ) -> None:
        self.residency = residency
        self._device, self._kernel, self._top_k, self._max_tokens = device, kernel, top_k, max_tokens
        self._bytes_per_token = top_k * ID_BYTES
        self._down_device = device.allocate(max_tokens * self._bytes_per_token, "routing staging (device)")
        self._down_host = device.allocate_host(max_tokens * self._bytes_per_token, "routing staging (host)")
        self._regions = TokenRegions()
        self._open: dict[int, _Fetch] = {}

    def warm_up(self, most_tokens: int) -> None:
        """Runs the kernel over one expert, at tokens 1, 2, 4, ... of a micro-batch: what has to be compiled, or cannot
        run here, shows at the start and not in the middle of a job."""
        layer = self.residency.layers[0]
        shape, place = self.residency.shape(layer), self._device.torch_device
        num_tokens = 1
        while num_tokens <= min(most_tokens, self._max_tokens):
            ids = torch.zeros(num_tokens, self._top_k, dtype=torch.int32)
            hidden = torch.zeros(num_tokens, shape.hidden_size, dtype=shape.dtype, device=place)
            step = paged_step(self._kernel, hidden, torch.zeros(ids.shape, device=place), ids.to(place), shape)
            with closing(self.residency.waves(layer, ids)) as waves:
                for wave in waves:
                    with self.residency.use(wave, "warm-up of fetched experts") as table:
                        step.add(table)
            step.finish()
            num_tokens *= 2

    def begin_sweep(self, num_tokens: Sequence[int]) -> None:
        self._regions.begin_sweep(num_tokens)

    def pack(self, index: int, request: ExpertsRequest) -> None:
        """The experts' numbers alone: all else stays."""
        self._ids(self._down_device, index, len(request.hidden)).copy_(request.topk_ids)
        if self._device.poison:
            request.output.fill_(float("nan"))

    def pack_writes(self, index: int) -> list[str]:
        return [_device_name(index)]

    def launch(self, key: TaskKey, request: ExpertsRequest) -> None:
        match key.name:
            case TaskName.ROUTING_OFFLOAD:
                self._offload(key, len(request.hidden))
            case TaskName.EXPERTS_FETCH:
                ids, name = self._ids(self._down_host, key.index, len(request.hidden)), _host_name(key.index)
                # Of no bytes: says what the link is about to be told by, even if nothing has to come up.
                self._device.h2d.copy([], [], str(key), reads=[name], writes=())
                self._open[key.index] = _Fetch(self.residency, key, ids)
            case _:
                raise AssertionError(f"{key} is not a task of experts that are fetched")

    def finish(self, key: TaskKey, request: ExpertsRequest) -> None:
        """One pass of the kernel for each wave of experts: a single one, if all of them fit at once."""
        shape = self.residency.shape(key.layer)
        with closing(self._open.pop(key.index)) as fetch:
            step = paged_step(self._kernel, request.hidden, request.topk_weights, request.topk_ids, shape)
            for wave in fetch.waves():
                with self.residency.use(wave, f"{key} (experts)") as table:
                    step.add(table, None if wave.is_whole_step else wave.experts)
            with self._device.compute.span(f"{key} (sum)", reads=(), writes=()):
                step.finish(request.output)

    def output_reads(self, index: int) -> list[str]:
        return []  # written and read by the compute stream alone

    def abort(self) -> None:
        for fetch in self._open.values():
            fetch.close()
        self._open.clear()

    def _offload(self, key: TaskKey, num_tokens: int) -> None:
        landing, name = self._ids(self._down_host, key.index, num_tokens), _host_name(key.index)
        if self._device.poison:  # -1: an expert that nobody has
            self._device.d2h.fill(landing, 0xFF, writes=[name])
        source = self._ids(self._down_device, key.index, num_tokens)
        self._device.d2h.copy([landing], [source], str(key), reads=[_device_name(key.index)], writes=[name])

    def _ids(self, buffer: Buffer, index: int, num_tokens: int) -> torch.Tensor:
        """[T, K] int32"""
        part = self._regions.part(buffer.tensor, index, num_tokens, self._bytes_per_token)
        return part.view(torch.int32).view(num_tokens, self._top_k)


class _Fetch:
    """Experts on their way: those of the first wave from the construction on."""

    def __init__(self, residency: ExpertResidency, key: TaskKey, ids: torch.Tensor) -> None:
        self._waves = residency.waves(key.layer, ids, str(key))
        self._first = next(self._waves, None)

    def waves(self) -> Iterator[Wave]:
        if self._first is not None:
            yield self._first
            yield from self._waves

    def close(self) -> None:
        """Gives back what is pinned."""
        self._waves.close()


def _device_name(index: int) -> str:
    return f"routing_device[{index}]"


def _host_name(index: int) -> str:
    return f"routing_host[{index}]"
