"""Cached context of a micro-batch in device memory: its blocks come up over the link into one of two frames.

Only the blocks that hold context are moved. New keys and values enter the frame for this layer's attention, and the
host cache for the steps to come, which is not this file's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from vllm_moe_lightning.device.base import Buffer, Device
from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.kernels import torch_attention
from vllm_moe_lightning.kernels.torch_attention import PagedRows
from vllm_moe_lightning.kv_cache import HostKvCache
from vllm_moe_lightning.pipeline.attention import AttentionOptions, AttentionRows, attention_task
from vllm_moe_lightning.pipeline.device_prefill import DevicePrefill, TorchPrefill
from vllm_moe_lightning.pipeline.tasks import TaskKey

NUM_FRAMES = 2  # one is read while the other is filled; more micro-batches make them smaller


def are_in_host_memory(device: Device) -> bool:
    """Frames, which the CPU's kernel then attends over."""
    return device.torch_device.type == "cpu"


@dataclass(frozen=True)
class _Context:
    """A micro-batch's blocks renumbered to lie one after the other in a frame."""

    rows: AttentionRows
    in_frame: AttentionRows
    host_blocks: tuple[int, ...]  # frame position -> block of the host cache
    loaded: tuple[tuple[int, int], ...]
    """[begin, end) of the frame positions that hold context, cut where the host's blocks are not adjacent."""
    on_gpu: PagedRows | None
    """`in_frame` for torch's operations, where frames are on a GPU."""

    @classmethod
    def of(cls, rows: AttentionRows, cache: HostKvCache, device: Device) -> _Context:
        block_size = cache.block_size
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
        if not are_in_host_memory(device):
            key_bytes = cache.block_bytes // (cache.num_kv_heads * block_size)
            on_gpu = PagedRows.of(
                table, rows.query_start, rows.seq_lens, in_frame.slot_mapping, block_size, key_bytes, device.to_device
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


class ContextFrames:
    """Loads contexts and attends over them. `cache_of(layer)`: the layer's host cache. num_tokens: of a frame, in whole
    blocks, which `allocate` then makes at start; None: as many as a sweep needs, made when it comes. kernel: for frames
    on a GPU; None: torch's."""

    def __init__(
        self,
        device: Device,
        cache_of: Callable[[int], HostKvCache],
        num_tokens: int | None = None,
        kernel: DevicePrefill | None = None,
    ) -> None:
        self._device = device
        self._kernel = kernel or TorchPrefill()
        self._cache_of = cache_of
        self._num_tokens = num_tokens
        self._contexts: dict[int, _Context] = {}
        self._frames: list[Buffer] = []
        self._frame_of: dict[tuple[int, int], Buffer] = {}

    def begin_sweep(self, rows: Mapping[int, AttentionRows]) -> None:
        """rows: by micro-batch."""
        self._frame_of = {}
        self._contexts = {}
        if not rows:
            return
        cache = self._cache_of(0)
        self._contexts = {i: _Context.of(entry, cache, self._device) for i, entry in rows.items()}
        self._ensure(max(len(context.host_blocks) for context in self._contexts.values()))

    def allocate(self) -> None:
        """Once there is a cache. In the middle of serving is no time to find that the device has no room."""
        assert self._num_tokens is not None, "frames as large as a sweep needs"
        self._ensure(0)

    def _ensure(self, num_blocks: int) -> None:
        cache = self._cache_of(0)
        num_bytes = max(num_blocks, (self._num_tokens or 0) // cache.block_size) * cache.block_bytes
        if len(self._frames) < NUM_FRAMES or self._frames[0].tensor.numel() < num_bytes:
            self.release()
            for index in range(NUM_FRAMES):  # one by one: the second may not fit, and the first is then given back
                self._frames.append(self._device.allocate(num_bytes, f"kv_frame[{index}]"))
            self._clear()

    def _clear(self) -> None:
        """What was never loaded into a block's rest is multiplied by zero, which only ordinary numbers survive."""
        if self._device.poison:
            return
        names = [frame.name for frame in self._frames]
        with self._device.compute.span("clear of the frames", reads=(), writes=names):
            for frame in self._frames:
                frame.tensor.zero_()
        self._device.h2d.wait_event(self._device.compute.record_event())

    def release(self) -> None:
        """Gives the frames' memory back until the next sweep. The caller has waited for all that touches them."""
        for frame in self._frames:
            self._device.release(frame.name)
        self._frames = []

    def is_of(self, index: int, rows: AttentionRows) -> bool:
        """Whether these are the rows that the micro-batch's context was made for."""
        return self._contexts[index].rows is rows

    def name_of(self, key: TaskKey) -> str:
        """Of the frame that holds the context of (layer, micro-batch)."""
        return self._frame_of[_place(key)].name

    def load(self, key: TaskKey, cache_name: str) -> None:
        """On the h2d stream. `cache_name`: the cache as earlier sweeps left it, for hazard checks."""
        cache, context = self._cache_of(key.layer), self._contexts[key.index]
        frame = self._frames[len(self._frame_of) % NUM_FRAMES]
        self._frame_of[_place(key)] = frame
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
            reads=[cache_name],
            writes=[frame.name],
        )

    def attend(
        self,
        key: TaskKey,
        cache: HostKvCache,
        options: AttentionOptions,
        query: torch.Tensor,  # device [T, num_heads, head_dim]
        new_key: torch.Tensor,  # device [T, num_kv_heads, head_dim]
        new_value: torch.Tensor,  # device [T, num_kv_heads, head_dim]
        output: torch.Tensor,  # device [T, num_heads, head_dim]
    ) -> None:
        """On the compute stream: the new keys and values into the frame, then attention of the rows over it."""
        context, frame = self._contexts[key.index], self._frame_of[_place(key)]
        memory = frame.tensor[: len(context.host_blocks) * cache.block_bytes]
        if context.on_gpu is None:
            attention_task(
                cache.over_copy(memory),
                context.in_frame,
                options,
                query=query,
                key=new_key,
                value=new_value,
                output=output,
            ).run()
            return
        if cache.kind is not None or not options.is_plain:
            raise UnsupportedError(
                "the GPU attends over context from the host without quantised caches, soft caps or sinks; use "
                "schedule cgopipe and moe_lightning.prefill_context 'cpu'"
            )
        blocks = memory.view(cache.blocks.dtype).view(-1, *cache.blocks.shape[1:])
        torch_attention.append(blocks, new_key, new_value, context.on_gpu)
        self._kernel.with_context(query, blocks, context.on_gpu, output, options)


def _place(key: TaskKey) -> tuple[int, int]:
    return key.layer, key.index
