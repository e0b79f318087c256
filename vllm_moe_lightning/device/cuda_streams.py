"""The streams of a CUDA device: three of the GPU, and the native thread that runs CPU attention.

Waits among the GPU's streams are events, and the host goes on at once; the native thread sleeps in the driver for a
GPU event. Only a GPU stream that waits for a host task blocks the launching thread: until that task is done, which is
what it then counts as waiting.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from vllm_moe_lightning.device.base import ComputeStream, CopyStream, Event, OperationRecord, Stream, StreamTotals
from vllm_moe_lightning.device.cuda_clock import CudaClock
from vllm_moe_lightning.device.cuda_runtime import CudaRuntime, EventHandle, StreamHandle
from vllm_moe_lightning.device.hazards import StreamObserver
from vllm_moe_lightning.device.native_stream import FILL_LABEL, NativeHostTaskStream, NativeStream
from vllm_moe_lightning.device.pinning import HostMemory
from vllm_moe_lightning.device.staging import StagingBuffer
from vllm_moe_lightning.errors import DeviceStalledError, MoeLightningError

PATTERN_BYTES = 1 << 20  # host memory is filled by copies of this many equal bytes


@dataclass(frozen=True)
class Operation:
    """What a stream was given and may not have done yet. `owners` keeps its memory alive: the caching allocator must
    not hand it out again."""

    label: str
    start: EventHandle
    end: EventHandle
    num_bytes: int
    counts: bool
    owners: object


@dataclass(frozen=True)
class Shared:
    """What the GPU's streams of one device have in common."""

    runtime: CudaRuntime
    tasks: NativeStream
    """The stream whose calls may fail: waits on the host report them, as copies may depend on them."""
    hazards: StreamObserver | None
    clock: CudaClock
    host_memory: HostMemory
    stall_timeout_s: float | None
    annotate: bool
    """Whether operations are NVTX ranges, by their labels."""


class CudaStream(Stream):
    """A stream of the GPU. Every operation lies between two events, which time it and tell when it is over."""

    def __init__(self, name: str, handle: StreamHandle, shared: Shared) -> None:
        self.name = name
        self.wait_s = 0.0
        self.stalled = False
        self.records: deque[OperationRecord] = deque(maxlen=0)
        self._stream = handle
        self.is_closed = False
        self._shared = shared
        self._runtime = shared.runtime
        self._hazards = shared.hazards
        self._seq = 0
        self._in_flight: deque[Operation] = deque()
        self._settling = threading.Lock()
        self._busy_s = 0.0
        self._num_bytes = 0
        self._num_operations = 0

    @property
    def handle(self) -> StreamHandle:
        if self.is_closed:
            raise MoeLightningError(f"stream {self.name!r} is closed; make a new device")
        return self._stream

    def record_event(self) -> Event:
        if self._hazards is not None:
            self._hazards.record_event(self.name, self._seq)
        return Event(self, self._seq, self._runtime.record(self.handle))

    def wait_event(self, event: Event) -> None:
        # Waits count, so that an event recorded before one does not stand for what only the wait brought.
        self._seq += 1
        if self._hazards is not None:
            self._hazards.wait_event(self.name, event.stream.name, event.seq)
        if isinstance(event.stream, NativeStream):
            begin_s = time.monotonic()
            try:
                event.stream.wait_on_host(event.seq)
            finally:
                self.wait_s += time.monotonic() - begin_s
        elif event.stream is not self:
            self._runtime.wait(self.handle, event.handle)

    def synchronize(self) -> None:
        if self._hazards is not None:
            self._hazards.synchronize([self.name])
        self.drain()
        self._shared.tasks.wait_on_host(0)  # its copies may depend on a task that failed

    def drain(self) -> None:
        """Blocks the host until everything submitted is complete, whether or not it failed."""
        self.wait_on_host(self._runtime.record(self.handle))

    def wait_on_host(self, event: EventHandle) -> None:
        """Raises DeviceStalledError once it has waited for stall_timeout_s."""
        timeout_s = self._shared.stall_timeout_s
        if not self._runtime.host_wait(event, timeout_s):
            self.stalled = True
            raise DeviceStalledError(
                f"waited {timeout_s:g} s for CUDA stream {self.name!r}, which is at "
                f"{self._oldest_label()}. Start the engine anew; moe_lightning.stall_timeout_s allows longer waits"
            )

    def close(self) -> None:
        self._settle()
        self.is_closed = True

    def totals(self) -> StreamTotals:
        self._settle()
        return StreamTotals(self._busy_s, self._num_bytes, self._num_operations)

    def set_recording(self, capacity: int) -> None:
        self._settle()
        with self._settling:
            self.records = deque(self.records, maxlen=capacity)

    def drain_records(self) -> list[OperationRecord]:
        self._settle()
        with self._settling:
            records = list(self.records)
            self.records.clear()
        return records

    def _begin(self, label: str, reads: Sequence[str], writes: Sequence[str]) -> EventHandle:
        """Submits an operation; its commands follow."""
        self._settle(is_urgent=False)
        if self.records.maxlen:
            self._shared.clock.keep_recent()
        self._seq += 1
        if self._hazards is not None:
            self._hazards.operation(self.name, label, reads, writes)
        start = self._runtime.record(self.handle)
        if self._shared.annotate:
            self._runtime.range_push(label)
        return start

    def _end(self, label: str, start: EventHandle, num_bytes: int, owners: object, *, counts: bool = True) -> None:
        if self._shared.annotate:
            self._runtime.range_pop()
        end = self._runtime.record(self._stream)
        self._in_flight.append(Operation(label, start, end, num_bytes, counts, owners))

    def _settle(self, *, is_urgent: bool = True) -> None:
        """Count what is over, and let go of its memory. Threads that publish figures and traces do so too; whoever need
        not know the counts leaves it to them."""
        if not self._settling.acquire(blocking=is_urgent):
            return
        try:
            while self._in_flight and self._runtime.is_complete(self._in_flight[0].end):
                done = self._in_flight.popleft()
                self._busy_s += self._runtime.seconds_between(done.start, done.end)
                self._num_bytes += done.num_bytes
                self._num_operations += done.counts
                if self.records.maxlen:
                    times_s = self._shared.clock.time_s(done.start), self._shared.clock.time_s(done.end)
                    self.records.append(OperationRecord(self.name, done.label, *times_s, done.num_bytes))
        finally:
            self._settling.release()

    def _oldest_label(self) -> str:
        self._settle()
        return self._in_flight[0].label if self._in_flight else "work that was launched outside of any task"


class CudaCopyStream(CudaStream, CopyStream):
    """One direction of the link. `to_device`: host to device, or the other way."""

    def __init__(self, name: str, handle: StreamHandle, shared: Shared, *, to_device: bool) -> None:
        super().__init__(name, handle, shared)
        self._to_device = to_device
        self._host_memory = shared.host_memory
        self._staging: StagingBuffer | None = None
        self._patterns: dict[int, torch.Tensor] = {}

    def copy(
        self,
        dst: Sequence[torch.Tensor],
        src: Sequence[torch.Tensor],
        label: str,
        *,
        reads: Sequence[str],
        writes: Sequence[str],
    ) -> None:
        if len(dst) != len(src):
            raise ValueError(f"copy {label!r}: {len(dst)} destinations for {len(src)} sources")
        for index, (to, source) in enumerate(zip(dst, src, strict=True)):
            if to.nbytes != source.nbytes:
                raise ValueError(f"copy {label!r}: segment {index} has {source.nbytes} bytes for {to.nbytes}")
            on_device, on_host = (to, source) if self._to_device else (source, to)
            self._require_side(on_device, label, on_device=True)
            self._require_side(on_host, label, on_device=False)
        start = self._begin(label, reads, writes)
        num_bytes = 0
        try:
            for to, source in zip(dst, src, strict=True):
                if to.nbytes:
                    self._copy(as_bytes(to), as_bytes(source))
                    num_bytes += to.nbytes
        finally:  # what was given to the GPU before an error runs all the same
            self._end(label, start, num_bytes, (*dst, *src))

    def _copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        if self._host_memory.is_pinned(src if self._to_device else dst):
            self._copy_pinned(dst, src)
            return
        assert self._staging is not None, "copies of pageable memory were let through without a staging buffer"
        before_s = self._staging.wait_s
        if self._to_device:
            self._staging.upload(self.handle, dst, src)
        else:
            self._staging.download(self.handle, dst, src)
        self.wait_s += self._staging.wait_s - before_s

    def _copy_pinned(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Cut at the edges of registrations, which no copy may cross."""
        sizes = self._host_memory.piece_sizes(dst if self._runtime.is_on_device(src) else src)
        for to, source in zip(dst.split(sizes), src.split(sizes), strict=True):
            self._runtime.copy(self.handle, to, source)

    def fill(self, dst: torch.Tensor, byte: int, *, writes: Sequence[str]) -> None:
        if not 0 <= byte <= 255:
            raise ValueError(f"fill: {byte} is not a byte")
        on_device = self._runtime.is_on_device(dst)
        self._require_side(dst, FILL_LABEL, on_device=on_device)
        start = self._begin(FILL_LABEL, (), writes)
        try:
            if dst.nbytes:
                self._fill(as_bytes(dst), byte, on_device=on_device)
        finally:
            self._end(FILL_LABEL, start, 0, dst, counts=False)

    def _fill(self, raw: torch.Tensor, byte: int, *, on_device: bool) -> None:
        if on_device:
            self._runtime.fill(self.handle, raw, byte)
            return
        for piece in raw.split(PATTERN_BYTES):  # the GPU has no fill for host memory
            self._copy_pinned(piece, self._pattern(byte)[: piece.numel()])

    def _pattern(self, byte: int) -> torch.Tensor:
        if byte not in self._patterns:
            self._patterns[byte] = self._runtime.allocate(PATTERN_BYTES)
            self._runtime.fill(self.handle, self._patterns[byte], byte)
        return self._patterns[byte]

    def stage_through(self, memory: torch.Tensor) -> None:
        """Copies of pageable memory are allowed from now on. memory: [num_bytes] uint8, pinned."""
        self._staging = StagingBuffer(self._runtime, memory, self._copy_pinned, self.wait_on_host)

    def _require_side(self, tensor: torch.Tensor, label: str, *, on_device: bool) -> None:
        where = "the GPU" if on_device else "the host"
        if not tensor.is_contiguous() or self._runtime.is_on_device(tensor) != on_device:
            raise ValueError(
                f"copy {label!r}: tensor of shape {tuple(tensor.shape)} on {tensor.device} with strides "
                f"{tensor.stride()}; stream {self.name!r} takes contiguous tensors, here on {where}"
            )
        if not on_device and self._staging is None and tensor.nbytes and not self._host_memory.is_pinned(tensor):
            raise ValueError(
                f"copy {label!r}: host tensor of {tensor.nbytes} bytes is not pinned, so its copy would hold up the "
                "launching thread; take it from allocate_host, or make the device with host_memory='pageable'"
            )


class CudaComputeStream(CudaStream, ComputeStream):
    """The stream that torch launches on: the model's kernels come to it by themselves, between `span`s or not.

    handle: a stream that the model is bound to; None: torch's current one, which is followed where it goes.
    """

    def __init__(self, name: str, handle: StreamHandle | None, shared: Shared) -> None:
        super().__init__(name, shared.runtime.current_stream() if handle is None else handle, shared)
        self._follows = handle is None

    def span(self, label: str, *, reads: Sequence[str], writes: Sequence[str]) -> _Span:
        return _Span(self, label, reads, writes)

    def begin(self, label: str, reads: Sequence[str], writes: Sequence[str]) -> EventHandle:
        current = self._runtime.current_stream()
        if current != self.handle:
            if not self._follows:
                raise MoeLightningError(
                    f"{label}: torch launches on {current}, but the compute stream is {self._stream}: nothing would "
                    "order the model's kernels. Run the model under the stream that the device was made with"
                )
            self._runtime.wait(current, self._runtime.record(self._stream))
            self._stream = current
        return self._begin(label, reads, writes)

    def end(self, label: str, start: EventHandle) -> None:
        self._end(label, start, 0, None)


class _Span:
    def __init__(self, stream: CudaComputeStream, label: str, reads: Sequence[str], writes: Sequence[str]) -> None:
        self._stream, self._label, self._reads, self._writes = stream, label, reads, writes
        self._start: EventHandle = None

    def __enter__(self) -> None:
        self._start = self._stream.begin(self._label, self._reads, self._writes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.end(self._label, self._start)


class CudaHostTaskStream(NativeHostTaskStream):
    """The native thread; for an event of the GPU it sleeps in the driver, so no core spins and no GIL is held."""

    def attach(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        function, argument = runtime.thread_setup()
        self.wait_for_call(function, argument, "set-up")

    def wait_event(self, event: Event) -> None:
        if not isinstance(event.stream, CudaStream):
            super().wait_event(event)
            return
        if self._hazards is not None:
            self._hazards.wait_event(self.name, event.stream.name, event.seq)
        function, argument = self._runtime.waiter(event.handle)
        self.wait_for_call(function, argument, f"a wait for {event.stream.name}", keep_alive=event.handle)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as [num_bytes] uint8."""
    if tensor.dtype is torch.uint8 and tensor.dim() == 1:
        return tensor
    return tensor.detach().view(-1).view(torch.uint8)
