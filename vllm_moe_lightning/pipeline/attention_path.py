"""Which tasks a schedule's attention consists of, and who runs them: on the CPU, on the device (S4), or nobody."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from vllm_moe_lightning.kv_cache import HostKvCache
from vllm_moe_lightning.pipeline.attention import AttentionRequest, AttentionRows
from vllm_moe_lightning.pipeline.host_attention import HostAttention
from vllm_moe_lightning.pipeline.tasks import TaskKey, TaskName


class AttentionPath(Protocol):
    """What the executor calls. `pack` runs on the compute stream, `launch` puts one task on its own stream."""

    def begin_sweep(self, rows: Sequence[AttentionRows]) -> None: ...

    def packed_name(self, index: int) -> str: ...

    def output_name(self, index: int) -> str: ...

    def pack_reads(self, key: TaskKey, *, has_context: bool) -> list[str]: ...

    def pack(self, key: TaskKey, request: AttentionRequest) -> None: ...

    def launch(self, key: TaskKey, request: AttentionRequest | None) -> None: ...


class AttentionInForward:
    """No tasks: the model attends within its forward, by a backend that is not ours."""

    def begin_sweep(self, rows: Sequence[AttentionRows]) -> None:
        assert not rows, "rows for attention that is not ours"

    def packed_name(self, index: int) -> str:
        raise AssertionError(f"micro-batch {index} has no staging")

    output_name = packed_name

    def pack_reads(self, key: TaskKey, *, has_context: bool) -> list[str]:
        raise AssertionError(f"{key} where attention has no tasks")

    def pack(self, key: TaskKey, request: AttentionRequest) -> None:
        raise AssertionError(f"{key} where attention has no tasks")

    def launch(self, key: TaskKey, request: AttentionRequest | None) -> None:
        raise AssertionError(f"{key} where attention has no tasks")


class CpuAttentionPath:
    """CGOPipe, serial, S2 and S3: Q, K and V go down, the result comes up; and context, for prompts that the device
    attends to. `cache_of(layer)`: the layer's host cache."""

    def __init__(self, host: HostAttention, cache_of: Callable[[int], HostKvCache]) -> None:
        self._host = host
        self._cache_of = cache_of
        self.pack_reads = host.pack_reads
        self.begin_sweep = host.begin_sweep
        self.pack = host.pack
        self.packed_name = host.packed_name
        self.output_name = host.output_name

    def launch(self, key: TaskKey, request: AttentionRequest | None) -> None:
        if key.name is TaskName.KV_LOAD:
            self._host.load_context(key, self._cache_of(key.layer))
            return
        assert request is not None, f"{key} before the micro-batch asked for attention"
        match key.name:
            case TaskName.QKV_OFFLOAD:
                self._host.offload(key.index, request, str(key))
            case TaskName.ATTENTION:
                self._host.attend(key.index, request, str(key))
            case TaskName.HIDDEN_LOAD:
                self._host.load(key.index, request, str(key))
            case _:
                raise AssertionError(f"{key} is not a task of attention on the CPU")
