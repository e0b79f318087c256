"""The streams of the emulated device: links with threads of their own, and the launching thread that computes."""

import ctypes
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType

import torch

from vllm_moe_lightning.device.base import ComputeStream, CopyStream, Event, OperationRecord
from vllm_moe_lightning.device.hazards import StreamObserver
from vllm_moe_lightning.device.native_stream import NativeStream, require_plain


class EmulatedCopyStream(NativeStream, CopyStream):
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
        sizes = [tensor.nbytes for tensor in dst]
        for i, (to, source) in enumerate(zip(dst, src, strict=True)):
            if sizes[i] != source.nbytes:
                raise ValueError(f"copy {label!r}: segment {i} has {source.nbytes} bytes for {sizes[i]}")
            require_plain(to, label)
            require_plain(source, label)
        self._check(label, reads, writes)
        count = len(sizes)
        pointers, lengths = ctypes.c_void_p * count, ctypes.c_int64 * count
        seq = self._library.mol_stream_copy(
            self.handle,
            count,
            pointers(*[tensor.data_ptr() for tensor in dst]),
            pointers(*[tensor.data_ptr() for tensor in src]),
            lengths(*sizes),
            self._tag(label),
        )
        self._hold(seq, (*dst, *src))


class EmulatedComputeStream(ComputeStream):
    """The launching thread itself: an operation is complete when its span ends."""

    name = "compute"

    def __init__(self, tasks: NativeStream, hazards: StreamObserver | None) -> None:
        self.wait_s = 0.0
        self.busy_s = 0.0
        self.num_spans = 0
        self.records: deque[OperationRecord] = deque(maxlen=0)
        self._tasks = tasks
        self._hazards = hazards
        self._seq = 0

    def record_event(self) -> Event:
        if self._hazards is not None:
            self._hazards.record_event(self.name, self._seq)
        return Event(self, self._seq)

    def wait_event(self, event: Event) -> None:
        # Waits count, so that an event recorded before one does not stand for what only the wait brought.
        self._seq += 1
        if self._hazards is not None:
            self._hazards.wait_event(self.name, event.stream.name, event.seq)
        if isinstance(event.stream, NativeStream):
            start_s = time.monotonic()
            try:
                event.stream.wait_on_host(event.seq)
            finally:
                self.wait_s += time.monotonic() - start_s

    def synchronize(self) -> None:
        if self._hazards is not None:
            self._hazards.synchronize([self.name])
        self._tasks.wait_on_host(0)

    def span(self, label: str, *, reads: Sequence[str], writes: Sequence[str]) -> "_Span":
        return _Span(self, label, reads, writes)

    def begin(self, label: str, reads: Sequence[str], writes: Sequence[str]) -> None:
        self._seq += 1
        if self._hazards is not None:
            self._hazards.operation(self.name, label, reads, writes)

    def end(self, label: str, start_s: float, waited_s: float) -> None:
        end_s = time.monotonic()
        self.busy_s += end_s - start_s - waited_s
        self.num_spans += 1
        if self.records.maxlen:
            self.records.append(OperationRecord(self.name, label, start_s, end_s, 0))


class _Span:
    def __init__(self, stream: EmulatedComputeStream, label: str, reads: Sequence[str], writes: Sequence[str]) -> None:
        self._stream, self._label, self._reads, self._writes = stream, label, reads, writes
        self._start_s = self._waited_before_s = 0.0

    def __enter__(self) -> None:
        self._stream.begin(self._label, self._reads, self._writes)
        self._waited_before_s = self._stream.wait_s
        self._start_s = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.end(self._label, self._start_s, self._stream.wait_s - self._waited_before_s)
