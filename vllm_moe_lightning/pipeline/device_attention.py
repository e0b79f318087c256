"""Attention of a micro-batch on the device (schedule S4): its context comes up over the link into one of two frames.

New keys and values enter the frame for this step, and the host cache for the next ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_moe_lightning.device.base import Device
from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.kv_cache import HostKvCache
from vllm_moe_lightning.pipeline.attention import AttentionRequest, AttentionRows
from vllm_moe_lightning.pipeline.context_frames import ContextFrames
from vllm_moe_lightning.pipeline.host_attention import HostAttention
from vllm_moe_lightning.pipeline.tasks import TaskKey, TaskName


class DeviceAttentionPath:
    """The tasks kv_load, device_attention, qkv_offload and kv_append. `cache_of(layer)`: the layer's host cache."""

    def __init__(self, host: HostAttention, device: Device, cache_of: Callable[[int], HostKvCache]) -> None:
        self._host = host
        self._device = device
        self._cache_of = cache_of
        self._frames = ContextFrames(device, cache_of)
        self.pack = host.pack
        self.packed_name = host.packed_name
        self.output_name = host.output_name
        self.pack_reads = host.pack_reads
        self.release_frames = self._frames.release

    def begin_sweep(self, rows: Sequence[AttentionRows]) -> None:
        self._host.begin_sweep(rows)
        self._frames.begin_sweep(dict(enumerate(rows)))

    def launch(self, key: TaskKey, request: AttentionRequest | None) -> None:
        if key.name is TaskName.KV_LOAD:
            self._frames.load(key, self._host.earlier_cache_name(self._cache_of(key.layer)))
            return
        assert request is not None, f"{key} before the micro-batch asked for attention"
        if not self._frames.is_of(key.index, request.rows):
            raise UnsupportedError("schedule s4 supports models with one kind of KV cache only; use cgopipe")
        match key.name:
            case TaskName.DEVICE_ATTENTION:
                self._attend(key, request)
            case TaskName.QKV_OFFLOAD:
                self._host.offload(key.index, request, str(key))
            case TaskName.KV_APPEND:
                self._host.append(key.index, request, str(key))
            case _:
                raise AssertionError(f"{key} is not a task of attention on the device")

    def _attend(self, key: TaskKey, request: AttentionRequest) -> None:
        frame, tokens = self._frames.name_of(key), request.rows.num_tokens
        reads, writes = [self.packed_name(key.index), frame], [frame, self.output_name(key.index)]
        with self._device.compute.span(str(key), reads=reads, writes=writes):
            self._frames.attend(
                key,
                request.cache,
                request.options,
                request.query[:tokens],
                request.key[:tokens],
                request.value[:tokens],
                request.output[:tokens],
            )
