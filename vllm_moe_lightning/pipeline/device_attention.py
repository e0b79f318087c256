"""Attention of a micro-batch on the device (schedule S4): its context comes up over the link into one of two frames.

Only the blocks that hold context are moved. New keys and values enter the frame for this step, and the host cache for
the next ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from vllm_moe_lightning.device.base import Buffer, Device
from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.kernels import torch_attention
from vllm_moe_lightning.kernels.torch_attention import PagedRows
from vllm_moe_lightning.kv_cache import HostKvCache
from vllm_moe_lightning.pipeline.attention import AttentionRequest, AttentionRows, attention_task
from vllm_moe_lightning.pipeline.host_attention import HostAttention
from vllm_moe_lightning.pipeline.tasks import TaskKey, TaskName

NUM_FRAMES = 2  # one is read while the other is filled; more micro-batches make them smaller


@dataclass(frozen=True)
class _Context:
    """A micro-batch's blocks renumbered to lie one after the other in a frame."""

    rows: AttentionRows
    in_frame: AttentionRows
    host_blocks: tuple[int, ...]  # frame position -> block of the host cache
    loaded: tuple[tuple[int, int], ...]
    """[begin, end) of the frame positions that hold context, cut where the host's blocks are not adjacent."""
    on_gpu: PagedRows | None
    """`in_frame` for torch's operations, where frames are no memory of the CPU's."""

    @classmethod
    def of(cls, rows: AttentionRows, block_size: int, device: Device) -> _Context:
        starts, seq_lens = rows.query_start.tolist(), rows.seq_lens.tolist()
        position_of: dict[int, int] = {}
        loaded: set[int] = set()
        table = torch.zeros_like(rows.block_table)
        for row, seq_len in enumerate(seq_lens):
            computed = seq_len - (starts[row + 1] - starts[row])
            blocks = rows.block_table[row, : -(-seq_len // block_size)].tolist()
            for index, block in enumerate(blocks):
                position = position_of.setdefault(block, len(position_of))
                table[row, index] = position
                if index * block_size < computed:
                    loaded.add(position)
        slots = [
            slot if slot < 0 else position_of[slot // block_size] * block_size + slot % block_size
            for slot in rows.slot_mapping.tolist()
        ]
        in_frame = replace(rows, block_table=table, slot_mapping=torch.tensor(slots, dtype=torch.int64))
        host_blocks = tuple(position_of)
        on_gpu = None
        if device.torch_device.type != "cpu":
            on_gpu = PagedRows.of(
                table, rows.query_start, rows.seq_lens, in_frame.slot_mapping, block_size, device.to_device
            )
        return cls(rows, in_frame, host_blocks, tuple(_adjacent(sorted(loaded), host_blocks)), on_gpu)


def _adjacent(positions: Sequence[int], host_blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of positions whose host blocks follow each other, so that each is one piece of a copy."""
    begin = 0
    for index in range(1, len(positions) + 1):
        before = positions[index - 1]
        if index == len(positions) or not (
            positions[index] == before + 1 and host_blocks[positions[index]] == host_blocks[before] + 1
        ):
            yield positions[begin], before + 1
            begin = index


class DeviceAttentionPath:
    """The tasks kv_load, device_attention, qkv_offload and kv_append. `cache_of(layer)`: the layer's host cache."""

    def __init__(self, host: HostAttention, device: Device, cache_of: Callable[[int], HostKvCache]) -> None:
        self._host = host
        self._device = device
        self._cache_of = cache_of
        self._contexts: list[_Context] = []
        self._frames: list[Buffer] = []
        self._parity = 0
        self.pack = host.pack
        self.packed_name = host.packed_name
        self.output_name = host.output_name

    def begin_sweep(self, rows: Sequence[AttentionRows]) -> None:
        self._host.begin_sweep(rows)
        self._parity ^= 1
        if not rows:
            return
        cache = self._cache_of(0)
        self._contexts = [_Context.of(entry, cache.block_size, self._device) for entry in rows]
        needed = max(len(context.host_blocks) for context in self._contexts) * cache.block_bytes
        if not self._frames or self._frames[0].tensor.numel() < needed:
            self.release_frames()
            self._frames = [self._device.allocate(needed, f"kv_frame[{index}]") for index in range(NUM_FRAMES)]

    def release_frames(self) -> None:
        """Gives their memory back until the next sweep. The caller has waited for all that touches them."""
        for frame in self._frames:
            self._device.release(frame.name)
        self._frames = []

    def _frame(self, key: TaskKey) -> Buffer:
        return self._frames[(key.layer * len(self._contexts) + key.index) % NUM_FRAMES]

    def launch(self, key: TaskKey, request: AttentionRequest | None) -> None:
        if key.name is TaskName.KV_LOAD:
            self._load(key)
            return
        assert request is not None, f"{key} before the micro-batch asked for attention"
        if request.rows is not self._contexts[key.index].rows:
            raise UnsupportedError("schedule s4 supports models with one kind of KV cache only; use cgopipe")
        match key.name:
            case TaskName.DEVICE_ATTENTION:
                self._attend(key, request)
            case TaskName.QKV_OFFLOAD:
                self._host.offload(key.index, request, str(key))
            case TaskName.KV_APPEND:
                self._host.append(key.index, request, str(key), f"kv[{request.cache.name}]@{self._parity}")
            case _:
                raise AssertionError(f"{key} is not a task of attention on the device")

    def _load(self, key: TaskKey) -> None:
        cache, context, frame = self._cache_of(key.layer), self._contexts[key.index], self._frame(key)
        if self._device.poison:
            self._device.h2d.fill(frame.tensor, 0xFF, writes=[frame.name])
        if not context.loaded:
            return
        host = context.host_blocks
        blocks = cache.bytes_of_blocks
        frames = frame.tensor[: len(host) * cache.block_bytes].view(-1, cache.block_bytes)
        self._device.h2d.copy(
            [frames[begin:end] for begin, end in context.loaded],
            [blocks[host[begin] : host[begin] + end - begin] for begin, end in context.loaded],
            str(key),
            reads=[f"kv[{cache.name}]@{self._parity ^ 1}"],
            writes=[frame.name],
        )

    def _attend(self, key: TaskKey, request: AttentionRequest) -> None:
        context, frame = self._contexts[key.index], self._frame(key)
        num_bytes = len(context.host_blocks) * request.cache.block_bytes
        tokens = request.rows.num_tokens
        names = [self.packed_name(key.index), frame.name]
        with self._device.compute.span(str(key), reads=names, writes=[frame.name, self.output_name(key.index)]):
            if context.on_gpu is not None:
                self._attend_on_gpu(request, frame.tensor[:num_bytes], context.on_gpu)
                return
            attention_task(
                request.cache.over_copy(frame.tensor[:num_bytes]),
                context.in_frame,
                request.options,
                query=request.query[:tokens],
                key=request.key[:tokens],
                value=request.value[:tokens],
                output=request.output[:tokens],
            ).run()

    @staticmethod
    def _attend_on_gpu(request: AttentionRequest, frame: torch.Tensor, rows: PagedRows) -> None:
        """frame: [num_bytes] uint8 of the context's blocks"""
        cache, options = request.cache, request.options
        if cache.kind is not None or options.soft_cap or options.sinks is not None:
            raise UnsupportedError(
                "schedule s4 attends on the GPU without quantised caches, soft caps or sinks; use cgopipe"
            )
        blocks = frame.view(cache.blocks.dtype).view(-1, *cache.blocks.shape[1:])
        tokens = len(rows.places)
        torch_attention.append(blocks, request.key[:tokens], request.value[:tokens], rows)
        request.output[:tokens] = torch_attention.paged_attention(
            request.query[:tokens], blocks, rows, scale=options.scale, sliding_window=options.sliding_window
        )
