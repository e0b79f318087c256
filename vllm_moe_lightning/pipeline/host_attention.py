"""Attention of a micro-batch on the CPU: pack Q, K and V, bring them down, attend, bring the result up.

Of prompts that the device attends to (AttentionRows.on_device) only K and V go down, behind the others' queries.
Owns the staging buffers, one region per micro-batch. A region is used again only after the micro-batch's own chain
pre -> offload -> attention -> load -> post has gone round, so the regions need no waits of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_moe_lightning.device.base import Buffer, Device
from vllm_moe_lightning.kernels.attention import AttentionPool, AttentionTask
from vllm_moe_lightning.kv_cache import HostKvCache
from vllm_moe_lightning.pipeline.attention import AttentionRequest, AttentionRows, attention_task
from vllm_moe_lightning.pipeline.context_frames import ContextFrames
from vllm_moe_lightning.pipeline.device_prefill import DevicePrefill
from vllm_moe_lightning.pipeline.faults import AttentionFault
from vllm_moe_lightning.pipeline.tasks import TaskKey


class HostAttention:
    """The tasks qkv_offload, attention and hidden_load.

    max_tokens: most tokens of a step; bytes_per_token: of Q, K and V, in the widest layer; prefill: attention of
    prompts on the device, frames: the same with context; None where rows bring none.
    """

    def __init__(
        self,
        device: Device,
        pool: AttentionPool,
        max_tokens: int,
        bytes_per_token: int,
        fault: AttentionFault | None = None,
        prefill: DevicePrefill | None = None,
        frames: ContextFrames | None = None,
    ) -> None:
        self._prefill, self._frames = prefill, frames
        self._parity = 0
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
        self._parity ^= 1
        if self._frames is not None:
            self._frames.begin_sweep(
                {index: entry.with_context for index, entry in enumerate(rows) if entry.with_context is not None}
            )
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
        """[num_values] of the micro-batch's region, in the request's dtype."""
        begin = self._regions[index][0] * self._bytes_per_token
        num_bytes = num_values * request.query.element_size()
        return buffer.tensor[begin : begin + num_bytes].view(request.query.dtype)

    def _packed(self, buffer: Buffer, index: int, request: AttentionRequest) -> torch.Tensor:
        """All that goes down."""
        query, rows = request.values_per_query, request.rows
        key_value = request.values_per_token - query
        return self._region(buffer, index, request, rows.num_attended_tokens * query + rows.num_tokens * key_value)

    def _parts(self, buffer: Buffer, index: int, request: AttentionRequest) -> tuple[torch.Tensor, torch.Tensor]:
        """(queries [attended tokens, num_heads * head_dim], K and V side by side [T, 2 * num_kv_heads * head_dim])"""
        packed, rows = self._packed(buffer, index, request), request.rows
        queries = packed[: rows.num_attended_tokens * request.values_per_query]
        keys_values = packed[len(queries) :].view(rows.num_tokens, request.values_per_token - request.values_per_query)
        return queries.view(rows.num_attended_tokens, request.values_per_query), keys_values

    def _output(self, index: int, request: AttentionRequest) -> torch.Tensor:
        """[attended tokens, num_heads * head_dim]"""
        tokens, values = request.rows.num_attended_tokens, request.values_per_query
        return self._region(self._out_host, index, request, tokens * values).view(tokens, values)

    def cache_name(self, cache: HostKvCache) -> str:
        """For hazard checks: the cache as this sweep writes it. What earlier ones wrote has another name, since a load
        of context touches none of the blocks that are being written."""
        return f"kv[{cache.name}]@{self._parity}"

    def earlier_cache_name(self, cache: HostKvCache) -> str:
        return f"kv[{cache.name}]@{self._parity ^ 1}"

    def load_context(self, key: TaskKey, cache: HostKvCache) -> None:
        assert self._frames is not None, "context for the device, which has no frames"
        self._frames.load(key, self.earlier_cache_name(cache))

    def pack_reads(self, key: TaskKey, *, has_context: bool) -> list[str]:
        return [self._frames.name_of(key)] if has_context and self._frames is not None else []

    def pack(self, key: TaskKey, request: AttentionRequest) -> None:
        """On the compute stream: queries, then K and V side by side, so that they go down in one copy; and attention
        of the prompts that the device attends to."""
        index, rows = key.index, request.rows
        tokens, attended = rows.num_tokens, rows.num_attended_tokens
        queries, keys_values = self._parts(self._qkv_device, index, request)
        queries.copy_(request.query[:attended].reshape(queries.shape))
        parts = [tensor[:tokens].reshape(tokens, -1) for tensor in (request.key, request.value)]
        torch.cat(parts, dim=1, out=keys_values)
        if self._device.poison:
            request.output.fill_(float("nan"))
        end = attended
        tensors = (request.query, request.key, request.value, request.output)
        if rows.with_context is not None:
            assert self._frames is not None, "context for the device, which has no frames"
            begin, end = end, end + rows.with_context.num_attended_tokens
            query, new_key, new_value, output = (tensor[begin:end] for tensor in tensors)
            self._frames.attend(key, request.cache, request.options, query, new_key, new_value, output)
        if rows.on_device is not None:
            assert self._prefill is not None, "rows for the device, which attends to none"
            query, new_key, new_value, output = (tensor[end:tokens] for tensor in tensors)
            self._prefill(query, new_key, new_value, output, rows.on_device.query_lens, request.options)

    def offload(self, index: int, request: AttentionRequest, label: str) -> None:
        landing = self._packed(self._qkv_host, index, request)
        if self._device.poison:
            self._device.d2h.fill(landing, 0xFF, writes=[f"qkv_host[{index}]"])
        self._device.d2h.copy(
            [landing],
            [self._packed(self._qkv_device, index, request)],
            label,
            reads=[self.packed_name(index)],
            writes=[f"qkv_host[{index}]"],
        )

    def attend(self, index: int, request: AttentionRequest, label: str) -> None:
        """Append K and V to the host cache, then attend into the host output staging."""
        if self._device.poison:  # on the stream: the launching thread may be far ahead of the load before
            self._device.cpu.fill(self._output(index, request), 0xFF, writes=[f"out_host[{index}]"])
        self._submit(index, request, label, [self.cache_name(request.cache), f"out_host[{index}]"], attend=True)

    def append(self, index: int, request: AttentionRequest, label: str) -> None:
        """Append K and V to the host cache; attention happens elsewhere."""
        self._submit(index, request, label, [self.cache_name(request.cache)], attend=False)

    def _submit(
        self, index: int, request: AttentionRequest, label: str, writes: Sequence[str], *, attend: bool
    ) -> None:
        rows, (_, heads, head_dim) = request.rows, request.query.shape
        kv_heads, attended = request.key.shape[1], rows.num_attended_tokens
        queries, keys_values = self._parts(self._qkv_host, index, request)
        key, value = (half.unflatten(1, (kv_heads, head_dim)) for half in keys_values.chunk(2, dim=1))
        begin = attended
        for elsewhere in rows.on_device_in_order:
            # First: a row that attends here may share blocks with a prompt of this very step.
            end = begin + elsewhere.num_attended_tokens
            task = attention_task(
                request.cache,
                elsewhere,
                request.options,
                key=key[begin:end],
                value=value[begin:end],
                pool=self._pool,
                check_contents=id(elsewhere) not in self._checked,
            )
            self._checked.add(id(elsewhere))
            self._call(index, task, f"{label} (prompts)", writes)
            begin = end
        if attended:
            output = self._output(index, request)
            task = attention_task(
                request.cache,
                rows,
                request.options,
                query=queries.unflatten(1, (heads, head_dim)) if attend else None,
                output=output.view(attended, heads, head_dim) if attend else None,
                key=key[:attended],
                value=value[:attended],
                pool=self._pool,
                check_contents=id(rows) not in self._checked,
            )
            self._checked.add(id(rows))
            self._call(index, task, label, writes)

    def _call(self, index: int, task: AttentionTask, label: str, writes: Sequence[str]) -> None:
        self.num_tasks += 1
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
        source = self._output(index, request)
        if not len(source):
            return
        self._device.h2d.copy(
            [request.output[: len(source)].view(source.shape)],
            [source],
            label,
            reads=[f"out_host[{index}]"],
            writes=[self.output_name(index)],
        )
