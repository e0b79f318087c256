"""One CUDA GPU: its streams, pinned host pages beside it, and its memory against a budget.

All CUDA calls go through a CudaRuntime. The model's kernels run on the stream that torch launches on; copies have a
stream for each direction, CPU attention has a native thread. `cuda_streams` says who waits how.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_moe_lightning.config import HostMemoryKind
from vllm_moe_lightning.device.base import Buffer, Event, OperationRecord, StreamTotals
from vllm_moe_lightning.device.cuda_clock import CudaClock
from vllm_moe_lightning.device.cuda_runtime import CudaRuntime, StreamHandle, TorchCuda
from vllm_moe_lightning.device.cuda_streams import (
    CudaComputeStream,
    CudaCopyStream,
    CudaHostTaskStream,
    CudaStream,
    Shared,
)
from vllm_moe_lightning.device.framed import FramedDevice, synchronize_all
from vllm_moe_lightning.device.hazards import STREAM_NAMES, HazardChecker, StreamObserver
from vllm_moe_lightning.device.memory import POISON_BYTE, MemoryBudget
from vllm_moe_lightning.device.native_stream import NativeStream
from vllm_moe_lightning.device.pinning import CHUNK_BYTES, PAGEABLE_FROM_BYTES, HostMemory
from vllm_moe_lightning.device.staging import NUM_PIECES, PIECE_BYTES
from vllm_moe_lightning.errors import DeviceMemoryError


class CudaDevice(FramedDevice):
    """See the module docstring.

    memory_budget_bytes: None: what is free on the GPU now.
    runtime: None: the calling thread's current CUDA device.
    compute: the stream that the model's kernels run on; None: torch's current one, followed where it goes.
    host_memory: "pageable": large host buffers are not pinned, and their copies go through a small buffer that is.
    pin_chunk_bytes: of one registration; pin_fail_at: the n-th fails, for tests; pageable_from_bytes: what is large.
    poison: frames hold NaN bytes when fresh and when released.
    check_hazards: conflicting operations without an event between them raise HazardError when submitted.
    observer: told of every operation in the checker's place.
    stall_timeout_s: how long a host wait takes before it raises DeviceStalledError; None: for ever.
    cpus: where the native thread may run; None: where the calling thread may.
    annotate: operations are NVTX ranges.
    """

    kind = "cuda"
    computes_on_launching_thread = False

    def __init__(
        self,
        memory_budget_bytes: int | None = None,
        *,
        runtime: CudaRuntime | None = None,
        compute: StreamHandle | None = None,
        host_memory: HostMemoryKind = "pinned",
        pin_chunk_bytes: int = CHUNK_BYTES,
        pin_fail_at: int | None = None,
        pageable_from_bytes: int = PAGEABLE_FROM_BYTES,
        poison: bool = False,
        check_hazards: bool = False,
        observer: StreamObserver | None = None,
        stall_timeout_s: float | None = None,
        cpus: Sequence[int] | None = None,
        annotate: bool = True,
    ) -> None:
        if stall_timeout_s is not None and not stall_timeout_s > 0:
            raise ValueError(f"stall_timeout_s must be positive, or None to wait for ever; got {stall_timeout_s}")
        self._runtime: CudaRuntime = TorchCuda() if runtime is None else runtime
        self.torch_device = self._runtime.torch_device
        if memory_budget_bytes is None:
            memory_budget_bytes = self._runtime.free_bytes()
        hazards = observer if observer is not None else HazardChecker(STREAM_NAMES) if check_hazards else None
        super().__init__(MemoryBudget(memory_budget_bytes), hazards, poison=poison)
        self._host_memory = HostMemory(
            self._runtime,
            host_memory,
            chunk_bytes=pin_chunk_bytes,
            pageable_from_bytes=pageable_from_bytes,
            fail_at=pin_fail_at,
        )
        self.cpu: CudaHostTaskStream = CudaHostTaskStream(
            "cpu", self._hazards, stall_timeout_s=stall_timeout_s or 0.0, cpus=cpus
        )
        self.cpu.attach(self._runtime)
        self._clock = CudaClock(self._runtime)
        shared = Shared(
            self._runtime, self.cpu, self._hazards, self._clock, self._host_memory, stall_timeout_s, annotate
        )
        self.compute: CudaComputeStream = CudaComputeStream("compute", compute, shared)
        self.d2h: CudaCopyStream = CudaCopyStream("d2h", self._runtime.new_stream("d2h"), shared, to_device=False)
        self.h2d: CudaCopyStream = CudaCopyStream("h2d", self._runtime.new_stream("h2d"), shared, to_device=True)
        self._gpu_streams: tuple[CudaStream, ...] = (self.compute, self.d2h, self.h2d)
        self._streams: tuple[CudaStream | NativeStream, ...] = (*self._gpu_streams, self.cpu)
        self._clock.set(self.compute.handle)
        if host_memory == "pageable":
            for stream in (self.d2h, self.h2d):
                num_bytes = NUM_PIECES * PIECE_BYTES
                stream.stage_through(self._host_memory.allocate_pinned(num_bytes, f"staging of {stream.name}"))

    def allocate(self, num_bytes: int, name: str) -> Buffer:
        self._memory.take(num_bytes, name)
        try:
            tensor = self._runtime.allocate(num_bytes)
        except DeviceMemoryError:
            self._memory.give_back(name)
            raise
        self._frames[name] = tensor
        self._poison(tensor)
        return Buffer(name, tensor)

    def allocate_host(self, num_bytes: int, name: str) -> Buffer:
        return Buffer(name, self._host_memory.allocate(num_bytes, name))

    def pin(self, tensor: torch.Tensor, name: str) -> None:
        self._host_memory.pin(tensor, name)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._runtime.to_device(tensor)

    def wait_on_host(self, event: Event) -> None:
        assert isinstance(event.stream, CudaStream), f"{event.stream.name} is no copy stream"
        event.stream.wait_on_host(event.handle)

    @property
    def stalled(self) -> bool:
        return self.cpu.stalled or any(stream.stalled for stream in self._gpu_streams)

    def memory_report(self) -> str:
        return f"{self._memory.report()}\n{self._host_memory.report()}"

    def synchronize(self) -> None:
        synchronize_all(self._streams)

    def totals(self) -> dict[str, StreamTotals]:
        return {stream.name: stream.totals() for stream in self._streams}

    def set_recording(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"cannot keep {capacity} records")
        if capacity:
            self._clock.set(self.compute.handle)
        for stream in self._streams:
            stream.set_recording(capacity)

    def drain_records(self) -> list[OperationRecord]:
        records = [record for stream in self._streams for record in stream.drain_records()]
        return sorted(records, key=lambda record: record.start_s)

    def close(self) -> None:
        if self.stalled or self.compute.is_closed:
            return
        for stream in self._gpu_streams:
            stream.drain()
        self.cpu.close()
        for stream in self._gpu_streams:
            stream.close()
        self._frames.clear()
        self._host_memory.close()

    def _poison(self, frame: torch.Tensor) -> None:
        if self.poison and frame.numel():
            self._runtime.fill(self.compute.handle, frame, POISON_BYTE)
