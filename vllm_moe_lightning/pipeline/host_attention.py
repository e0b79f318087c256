"""Attention of a micro-batch on the CPU: pack Q, K and V, bring them down, attend, bring the result up.

Owns the staging buffers, one region per micro-batch. A region is used again only after the micro-batch's own chain
pre -> offload -> attention -> load -> post has gone round, so the regions need no waits of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_moe_lightning.device.base import Buffer, Device
from vllm_moe_lightning.kernels.attention import AttentionPool
from vllm_moe_lightning.pipeline.attention import AttentionRequest, AttentionRows, attention_task
from vllm_moe_lightning.pipeline.faults import AttentionFault


class HostAttention:
    """The tasks qkv_offload, attention and hidden_load.

    max_tokens: most tokens of a step; bytes_per_token: of Q, K and V, in the widest layer.
    """

    def __init__(
        self,
        device: Device,
        pool: AttentionPool,
        max_tokens: int,
        bytes_per_token: int,
        fault: AttentionFault | None = None,
    ) -> None:
        self._device = device
        self._pool = pool
        self._max_tokens = max_tokens
        self._qkv_device = device.allocate(max_tokens * bytes_per_token, "qkv staging (device)")
        self._qkv_host = device.allocate_host(max_tokens * bytes_per_token, "qkv staging (host)")
        self._out_host = device.allocate_host(max_tokens * bytes_per_token, "attention output staging (host)")
        self._regions: list[tuple[int, int]] = []  # per micro-batch: first token, tokens
        self._bytes_per_token = bytes_per_token
        self._checked: set[int] = set()  # rows whose lengths and blocks an earlier layer's task has checked
        self._fault = fault
        self.num_tasks = 0

    def begin_sweep(self, rows: Sequence[AttentionRows]) -> None:
        """Give each micro-batch its region of the staging buffers."""
        total = sum(entry.num_tokens for entry in rows)
        if total > self._max_tokens:
            raise ValueError(f"a step of {total} tokens, but staging was sized for {self._max_tokens}")
        self._checked = set()
        first, self._regions = 0, []
        for entry in rows:
            self._regions.append((first, entry.num_tokens))
            first += entry.num_tokens

    @staticmethod
    def packed_name(index: int) -> str:
        return f"qkv_device[{index}]"

    @staticmethod
    def output_name(index: int) -> str:
        return f"attention_output[{index}]"

    def _region(self, buffer: Buffer, index: int, request: AttentionRequest, num_values: int) -> torch.Tensor:
        """[T, num_values] of the micro-batch's region, in the request's dtype."""
        first, tokens = self._regions[index]
        begin = first * self._bytes_per_token
        num_bytes = tokens * num_values * request.query.element_size()
        return buffer.tensor[begin : begin + num_bytes].view(request.query.dtype).view(tokens, num_values)

    def pack(self, index: int, request: AttentionRequest) -> None:
        """On the compute stream: Q, K and V side by side, so that they go down in one copy."""
        tokens = request.rows.num_tokens
        packed = self._region(self._qkv_device, index, request, request.values_per_token)
        parts = [tensor[:tokens].reshape(tokens, -1) for tensor in (request.query, request.key, request.value)]
        torch.cat(parts, dim=1, out=packed)
        if self._device.poison:
            self._region(self._out_host, index, request, self._output_values(request)).view(torch.uint8).fill_(0xFF)
            request.output.fill_(float("nan"))

    def offload(self, index: int, request: AttentionRequest, label: str) -> None:
        landing = self._region(self._qkv_host, index, request, request.values_per_token)
        if self._device.poison:
            self._device.d2h.fill(landing, 0xFF, writes=[f"qkv_host[{index}]"])
        self._device.d2h.copy(
            [landing],
            [self._region(self._qkv_device, index, request, request.values_per_token)],
            label,
            reads=[self.packed_name(index)],
            writes=[f"qkv_host[{index}]"],
        )

    def attend(self, index: int, request: AttentionRequest, label: str) -> None:
        """Append K and V to the host cache, then attend into the host output staging."""
        self._submit(index, request, label, [f"kv[{request.cache.name}]", f"out_host[{index}]"], attend=True)

    def append(self, index: int, request: AttentionRequest, label: str, cache_name: str) -> None:
        """Append K and V to the host cache, named `cache_name` for hazard checks; attention happens elsewhere."""
        self._submit(index, request, label, [cache_name], attend=False)

    def _submit(
        self, index: int, request: AttentionRequest, label: str, writes: Sequence[str], *, attend: bool
    ) -> None:
        self.num_tasks += 1
        tokens, heads, head_dim = request.rows.num_tokens, request.query.shape[1], request.query.shape[2]
        kv_heads = request.key.shape[1]
        qkv = self._region(self._qkv_host, index, request, request.values_per_token)
        query, key, value = qkv.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1)
        output = self._region(self._out_host, index, request, self._output_values(request))
        task = attention_task(
            request.cache,
            request.rows,
            request.options,
            query=query.unflatten(1, (heads, head_dim)) if attend else None,
            output=output.view(tokens, heads, head_dim) if attend else None,
            key=key.unflatten(1, (kv_heads, head_dim)),
            value=value.unflatten(1, (kv_heads, head_dim)),
            pool=self._pool,
            check_contents=id(request.rows) not in self._checked,
        )
        self._checked.add(id(request.rows))
        fault = self._fault
        self._device.cpu.call(
            task.function if fault is None or fault.task_number != self.num_tasks else fault.function(label),
            task.argument,
            label,
            keep_alive=task,
            reads=[f"qkv_host[{index}]"],
            writes=writes,
        )

    def load(self, index: int, request: AttentionRequest, label: str) -> None:
        source = self._region(self._out_host, index, request, self._output_values(request))
        self._device.h2d.copy(
            [request.output[: request.rows.num_tokens].view(source.shape)],
            [source],
            label,
            reads=[f"out_host[{index}]"],
            writes=[self.output_name(index)],
        )

    @staticmethod
    def _output_values(request: AttentionRequest) -> int:
        return request.query.shape[1] * request.query.shape[2]
