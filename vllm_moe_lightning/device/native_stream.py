"""A native stream: a queue with a thread of its own, behind which no call holds the GIL.

The emulated device's links and every device's CPU attention. Order, waits and pacing are csrc/stream.cpp's; here is
what operations in flight keep alive, and what is said when one fails or nothing goes on.
"""

import ctypes
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Literal

import torch

from vllm_moe_lightning.device.base import Event, HostTaskStream, OperationRecord, Stream, StreamTotals
from vllm_moe_lightning.device.hazards import StreamObserver
from vllm_moe_lightning.errors import DeviceStalledError, DeviceTaskError, MoeLightningError
from vllm_moe_lightning.kernels import native

Timing = Literal["eager", "lazy", "jitter"]
TIMINGS = {"eager": native.TIMING_EAGER, "lazy": native.TIMING_LAZY, "jitter": native.TIMING_JITTER}
FILL_LABEL = "fill"
_RECORDS_PER_DRAIN = 1024
_abandoned: list[object] = []  # what threads that never came back may still read and write


class NativeStream(Stream):
    """A native stream and what its operations in flight need alive."""

    def __init__(
        self,
        name: str,
        hazards: StreamObserver | None,
        *,
        bandwidth_bytes_per_s: float = 0.0,
        latency_s: float = 0.0,
        timing: Timing = "eager",
        seed: int = 0,
        jitter_max_s: float = 0.0,
        stall_timeout_s: float = 0.0,
        cpus: Sequence[int] | None = None,
    ) -> None:
        self.name = name
        self.wait_s = 0.0
        # The stream whose calls may fail: waits for this one report them, as its copies may depend on them.
        self.tasks: NativeStream = self
        # All streams of the device, which may wait for each other.
        self.peers: tuple[NativeStream, ...] = (self,)
        self.stalled = False
        self._stall_timeout_s = stall_timeout_s
        self._hazards = hazards
        self._library = native.library()
        self._handle: int | None = self._library.mol_stream_create(
            name.encode(), bandwidth_bytes_per_s, latency_s, TIMINGS[timing], seed, jitter_max_s
        )
        if self._handle is None:
            raise MoeLightningError(f"no thread for stream {name!r}: raise the limit on threads (ulimit -u)")
        self._seq = 0
        self._in_flight: deque[tuple[int, object]] = deque()
        self._labels = [FILL_LABEL]  # by tag; the native fill has tag 0
        self._tags = {FILL_LABEL: 0}
        self._finalizer = weakref.finalize(self, _destroy_stream, self._library, self._handle, self._in_flight)
        if cpus is not None:
            self._set_affinity(cpus)

    def record_event(self) -> Event:
        if self._hazards is not None:
            self._hazards.record_event(self.name, self._seq)
        return Event(self, self._seq)

    def wait_event(self, event: Event) -> None:
        stream = event.stream
        if self._hazards is not None:
            self._hazards.wait_event(self.name, stream.name, event.seq)
        # The compute stream is the launching thread: what it was given is done.
        if isinstance(stream, NativeStream) and stream is not self and event.seq > 0:
            self._seq = self._library.mol_stream_wait(self.handle, stream.handle, event.seq)

    def synchronize(self) -> None:
        if self._hazards is not None:
            self._hazards.synchronize([self.name])
        self.wait_on_host(self._seq)

    def wait_on_host(self, seq: int) -> None:
        """Blocks the calling thread until seq is complete.

        Raises DeviceTaskError if a call failed, DeviceStalledError if nothing goes on any more.
        """
        code = self._library.mol_stream_synchronize(self.handle, seq, self._stall_timeout_s)
        if code in (native.ERROR_STALLED, native.ERROR_ENDED):
            raise self._stall(seq, has_ended=code == native.ERROR_ENDED)
        if code == native.OK and self.tasks is not self:
            code = self._library.mol_stream_synchronize(self.tasks.handle, 0, 0.0)
        if code != native.OK:
            reason = native.ERROR_NAMES.get(code, "unknown error")
            raise DeviceTaskError(
                f"a task of stream {self.tasks.name!r} failed: code {code} ({reason}); its output is invalid"
            )

    def fill(self, dst: torch.Tensor, byte: int, *, writes: Sequence[str]) -> None:
        if not 0 <= byte <= 255:
            raise ValueError(f"fill: {byte} is not a byte")
        require_plain(dst, FILL_LABEL)
        self._check(FILL_LABEL, (), writes)
        self._hold(self._library.mol_stream_fill(self.handle, dst.data_ptr(), byte, dst.nbytes), dst)

    def wait_for_call(self, function: object, argument: object, label: str, *, keep_alive: object = None) -> None:
        """The stream waits in function(argument), an int32_t (*)(const void*): neither busy time nor an operation."""
        seq = self._library.mol_stream_wait_call(self.handle, function, argument, self._tag(label))
        self._hold(seq, (function, argument, keep_alive))

    @property
    def handle(self) -> int:
        if self._handle is None:
            raise MoeLightningError(f"stream {self.name!r} is closed; make a new device")
        return self._handle

    def close(self) -> None:
        """Runs out the queue; nothing happens to a stream that was abandoned."""
        self._handle = None
        self._finalizer()

    def abandon(self) -> None:
        """Leave the thread as it is and keep all that it may touch: destroying the stream would wait for it."""
        self.stalled = True
        if self._finalizer.detach() is not None:
            _abandoned.append(self._in_flight)

    def _stall(self, seq: int, *, has_ended: bool) -> DeviceStalledError:
        states = "; ".join(stream._state() for stream in self.peers)
        for stream in self.peers:
            stream.abandon()
        what = "a stream's thread is no more" if has_ended else f"no stream has gone on for {self._stall_timeout_s:g} s"
        return DeviceStalledError(
            f"waited for operation {seq} of stream {self.name!r}, but {what}: {states}. Start the engine anew; "
            "moe_lightning.stall_timeout_s allows longer waits"
        )

    def _state(self) -> str:
        """What the stream is at, for people."""
        status = native.StreamStatus()
        self._library.mol_stream_get_status(self.handle, ctypes.byref(status))
        where = f"{self.name} ({status.completed} of {status.submitted} done)"
        running = f"{self._labels[status.tag]}, begun {time.monotonic() - status.since_ns * 1e-9:.1f} s ago"
        match status.state:
            case native.STREAM_RUNNING:
                return f"{where} runs {running}"
            case native.STREAM_WAITING:
                others = {stream.handle: stream.name for stream in self.peers}
                return f"{where} waits for operation {status.awaited_seq} of {others.get(status.awaited, 'another')}"
            case native.STREAM_ENDED:
                return f"{where} ended in {running}" if status.since_ns else f"{where} ended"
        return f"{where} is idle"

    def totals(self) -> StreamTotals:
        totals = native.StreamTotals()
        self._library.mol_stream_get_totals(self.handle, ctypes.byref(totals))
        return StreamTotals(totals.busy_ns * 1e-9, totals.num_bytes, totals.num_copies + totals.num_calls)

    def set_recording(self, capacity: int) -> None:
        self._library.mol_stream_set_recording(self.handle, capacity)

    def drain_records(self) -> list[OperationRecord]:
        drained: list[OperationRecord] = []
        records = (native.Record * _RECORDS_PER_DRAIN)()
        while count := self._library.mol_stream_drain_records(self.handle, records, _RECORDS_PER_DRAIN):
            drained += [
                OperationRecord(self.name, self._labels[r.tag], r.start_ns * 1e-9, r.end_ns * 1e-9, r.num_bytes)
                for r in records[:count]
            ]
        return drained

    def _check(self, label: str, reads: Sequence[str], writes: Sequence[str]) -> None:
        if self._hazards is not None:
            self._hazards.operation(self.name, label, reads, writes)

    def _tag(self, label: str) -> int:
        tag = self._tags.get(label)
        if tag is None:
            tag = self._tags[label] = len(self._labels)
            self._labels.append(label)
        return tag

    def _hold(self, seq: int, owners: object) -> None:
        """Keeps owners alive until seq is complete; lets go of those of completed operations."""
        self._seq = seq
        in_flight = self._in_flight
        in_flight.append((seq, owners))
        completed = self._library.mol_stream_completed(self.handle)
        while in_flight and in_flight[0][0] <= completed:
            in_flight.popleft()

    def _set_affinity(self, cpus: Sequence[int]) -> None:
        code = self._library.mol_stream_set_affinity(self.handle, (ctypes.c_int32 * len(cpus))(*cpus), len(cpus))
        if code != native.OK:
            raise ValueError(f"stream {self.name!r} cannot run on CPUs {list(cpus)}: none of them may be used here")


class NativeHostTaskStream(NativeStream, HostTaskStream):
    def call(
        self,
        function: object,
        argument: ctypes.Structure,
        label: str,
        *,
        keep_alive: object,
        reads: Sequence[str],
        writes: Sequence[str],
    ) -> None:
        self._check(label, reads, writes)
        seq = self._library.mol_stream_call(self.handle, function, ctypes.byref(argument), self._tag(label))
        self._hold(seq, (function, argument, keep_alive))


def _destroy_stream(library: ctypes.CDLL, handle: int, in_flight: deque[tuple[int, object]]) -> None:
    library.mol_stream_destroy(handle)
    in_flight.clear()  # only now may the memory of the last operations go


def require_plain(tensor: torch.Tensor, label: str) -> None:
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"copy {label!r}: tensor of shape {tuple(tensor.shape)} on {tensor.device} with strides "
            f"{tensor.stride()}; copies take contiguous tensors on the CPU"
        )
