"""Experts of a micro-batch on the CPU, from the weights where they lie in the host pages: for sweeps with so few tokens
that reading an expert here takes less time than bringing it to the device.

Owns the staging buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vllm_moe_lightning.device.base import Buffer, Device
from vllm_moe_lightning.kernels.attention import AttentionPool
from vllm_moe_lightning.kernels.expert_ffn import ExpertFfn, ExpertFfnTask
from vllm_moe_lightning.pipeline.experts_path import ExpertsPath, ExpertsRequest, TokenRegions
from vllm_moe_lightning.pipeline.tasks import TaskKey, TaskName

ROUTING_BYTES = 8  # of one choice: an int32 expert and a float32 weight


class HostExperts(ExpertsPath):
    """The tasks experts_offload, experts and experts_load.

    max_tokens: most tokens of a step; experts_of(layer): the kernel over the layer's host pages.
    """

    def __init__(
        self,
        device: Device,
        pool: AttentionPool,
        max_tokens: int,
        hidden_size: int,
        top_k: int,
        dtype: torch.dtype,
        experts_of: Callable[[int], ExpertFfn],
    ) -> None:
        self._device, self._pool, self._experts_of = device, pool, experts_of
        self._hidden_bytes = hidden_size * dtype.itemsize
        # Routing first: so both parts of a region are aligned for their types.
        self._routing_bytes = -(-top_k * ROUTING_BYTES // dtype.itemsize) * dtype.itemsize
        self._dtype, self._top_k = dtype, top_k
        per_token = self._hidden_bytes + self._routing_bytes
        self._down_device = device.allocate(max_tokens * per_token, "experts staging (device)")
        self._down_host = device.allocate_host(max_tokens * per_token, "experts staging (host)")
        self._up_host = device.allocate_host(max_tokens * self._hidden_bytes, "experts output staging (host)")
        self._regions = TokenRegions()
        self.num_tasks = 0

    def begin_sweep(self, num_tokens: Sequence[int]) -> None:
        self._regions.begin_sweep(num_tokens)

    def pack_writes(self, index: int) -> list[str]:
        return [_packed_name(index), *self.output_reads(index)]

    def output_reads(self, index: int) -> list[str]:
        return [f"experts_output[{index}]"]

    def finish(self, key: TaskKey, request: ExpertsRequest) -> None:
        """Nothing: experts_load has brought the output up."""

    def abort(self) -> None:
        """Nothing is kept from task to task."""

    def _parts(self, buffer: Buffer, index: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(expert ids int32 [T, K], weights float32 [T, K], hidden states [T, hidden_size])"""
        packed = self._packed(buffer, index, tokens)
        routing_bytes = tokens * self._routing_bytes
        routing, hidden = packed[:routing_bytes], packed[routing_bytes:]
        half = tokens * self._top_k * ROUTING_BYTES // 2
        return (
            routing[:half].view(torch.int32).view(tokens, self._top_k),
            routing[half : 2 * half].view(torch.float32).view(tokens, self._top_k),
            hidden.view(self._dtype).view(tokens, -1),
        )

    def _packed(self, buffer: Buffer, index: int, tokens: int) -> torch.Tensor:
        return self._regions.part(buffer.tensor, index, tokens, self._hidden_bytes + self._routing_bytes)

    def _output(self, index: int, tokens: int) -> torch.Tensor:
        part = self._regions.part(self._up_host.tensor, index, tokens, self._hidden_bytes)
        return part.view(self._dtype).view(tokens, -1)

    def pack(self, index: int, request: ExpertsRequest) -> None:
        """Hidden states and routing."""
        ids, weights, hidden = self._parts(self._down_device, index, len(request.hidden))
        ids.copy_(request.topk_ids)
        weights.copy_(request.topk_weights)
        hidden.copy_(request.hidden)
        if self._device.poison:
            request.output.fill_(float("nan"))

    def launch(self, key: TaskKey, request: ExpertsRequest) -> None:
        index, tokens = key.index, len(request.hidden)
        match key.name:
            case TaskName.EXPERTS_OFFLOAD:
                self._offload(index, tokens, str(key))
            case TaskName.EXPERTS:
                self._compute(key, tokens)
            case TaskName.EXPERTS_LOAD:
                self._device.h2d.copy(
                    [request.output],
                    [self._output(index, tokens)],
                    str(key),
                    reads=[f"experts_out_host[{index}]"],
                    writes=self.output_reads(index),
                )
            case _:
                raise AssertionError(f"{key} is not a task of experts on the CPU")

    def _offload(self, index: int, tokens: int, label: str) -> None:
        landing, landing_name = self._packed(self._down_host, index, tokens), f"experts_in_host[{index}]"
        if self._device.poison:
            self._device.d2h.fill(landing, 0xFF, writes=[landing_name])
        source = self._packed(self._down_device, index, tokens)
        self._device.d2h.copy([landing], [source], label, reads=[_packed_name(index)], writes=[landing_name])

    def _compute(self, key: TaskKey, tokens: int) -> None:
        self.num_tasks += 1
        ids, weights, hidden = self._parts(self._down_host, key.index, tokens)
        output, output_name = self._output(key.index, tokens), f"experts_out_host[{key.index}]"
        if self._device.poison:
            self._device.cpu.fill(output, 0xFF, writes=[output_name])
        task = ExpertFfnTask(self._experts_of(key.layer), hidden, ids, weights, output, pool=self._pool)
        self._device.cpu.call(
            task.function,
            task.argument,
            str(key),
            keep_alive=task,
            reads=[f"experts_in_host[{key.index}]"],
            writes=[output_name],
        )


def _packed_name(index: int) -> str:
    return f"experts_device[{index}]"
