# SPDX-License-Identifier: Apache-2.0
"""A double of the CUDA runtime on any machine: GPU memory is host memory, and every call is logged.

Kernels of the compute stream run at once, in the launching thread. Copies run at once too, or (`late`) only when an
event forces them, so that a forgotten wait reads what was there before. What comes too early for the GPU and not for
the launching thread cannot show in a result; the log's check (stream_log.py) finds it. It refuses a copy
that crosses the edge of a registration, as drivers have done.
"""

from __future__ import annotations

import bisect
import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.helpers.stream_log import Declared, StreamLog
from vllm_moe_lightning.device.cuda import CudaDevice
from vllm_moe_lightning.errors import DeviceMemoryError
from vllm_moe_lightning.kernels import native

GPU_BYTES = 1 << 30
OUT_OF_MEMORY = 2
COMPUTE, CLOCK = "compute", "clock"


@dataclass(eq=False)
class DoubleEvent:
    stream: DoubleStream
    number: int
    time_s: float | None = None
    """When it was complete; None: it is not."""


@dataclass(eq=False)
class DoubleStream:
    name: str
    pending: deque[Callable[[], object]] = field(default_factory=deque)


@dataclass(frozen=True)
class Copied:
    """A copy or fill as the runtime was told, beside what the device declared: [begin, end) addresses."""

    stream: str
    label: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    source: tuple[int, int] | None  # None: a fill
    target: tuple[int, int]


class RecordingCuda:
    """See the module docstring. `refuse_pin`: registrations from that number on (1, 2, ...) fail; `gpu_bytes`: free at
    the start."""

    torch_device = torch.device("cpu")

    def __init__(self, *, late: bool = False, refuse_pin: int | None = None, gpu_bytes: int = GPU_BYTES) -> None:
        self.log = StreamLog()
        self.copied: list[Copied] = []
        self.host_waits = 0
        self.pin_calls: list[tuple[str, int, int]] = []  # ("register" or "unregister", address, bytes)
        self.pinned: dict[int, int] = {}
        self._pinned_at: list[int] = []  # its keys, in order
        self.host_ranges: list[tuple[int, int]] = []
        self.ranges: list[str] = []
        self.open_ranges: list[str] = []
        self.is_at_work = False
        """While a copy runs, whichever thread it was left to."""
        self.node: int | None = None
        self.hang = False
        self._late = late
        self._refuse_pin = refuse_pin
        self._gpu_bytes = gpu_bytes
        self._lock = threading.RLock()
        self.current = DoubleStream(COMPUTE)
        self._num_events = 0

    def device(self, **options: Any) -> CudaDevice:
        """A CUDA device on this double; its log is complete from here on."""
        return CudaDevice(runtime=self, observer=Declared(self.log), **options)

    def treat_as_host(self, tensor: torch.Tensor) -> None:
        """Host memory that is not pinned: the double cannot tell it from the GPU's."""
        self.host_ranges.append(_range(tensor))

    # Streams and events

    def current_stream(self) -> DoubleStream:
        return self.current

    def new_stream(self, name: str) -> DoubleStream:
        return DoubleStream(name)

    def record(self, stream: DoubleStream) -> DoubleEvent:
        self._num_events += 1
        event = DoubleEvent(stream, self._num_events)
        if stream.name != CLOCK:  # which orders nothing
            self.log.record_event(stream.name, event.number)

        def complete() -> None:
            event.time_s = time.monotonic()

        self._give(stream, complete)
        return event

    def wait(self, stream: DoubleStream, event: DoubleEvent) -> None:
        self.log.wait_event(stream.name, event.stream.name, event.number)
        self._give(stream, lambda: self._force(event))

    def is_complete(self, event: DoubleEvent) -> bool:
        return event.time_s is not None

    def host_wait(self, event: DoubleEvent, timeout_s: float | None) -> bool:
        self.host_waits += 1
        if self.hang:
            return False
        self._force(event)
        if self.log.calls[-1:] == [
            ("record_event", (event.stream.name, event.number))
        ]:  # all that the stream was given
            self.log.synchronize([event.stream.name])
        # Else the host waits to read something: that orders nothing which streams are given.
        return True

    def seconds_between(self, start: DoubleEvent, end: DoubleEvent) -> float:
        assert start.time_s is not None
        assert end.time_s is not None
        return ctypes.c_float((end.time_s - start.time_s) * 1e3).value / 1e3  # CUDA's are 32-bit milliseconds

    def thread_setup(self) -> tuple[object, object]:
        return native.CallFunction(lambda _: 0), None

    def waiter(self, event: DoubleEvent) -> tuple[object, object]:
        self.log.wait_event("cpu", event.stream.name, event.number)

        def wait(_: int) -> int:
            self._force(event)
            return 0

        return native.CallFunction(wait), None

    def _give(self, stream: DoubleStream, action: Callable[[], object]) -> None:
        with self._lock:
            if self._late and stream.name != COMPUTE:
                stream.pending.append(action)
            else:
                action()

    def _force(self, event: DoubleEvent) -> None:
        with self._lock:
            while event.time_s is None:
                event.stream.pending.popleft()()

    # Copies and memory

    def copy(self, stream: DoubleStream, dst: torch.Tensor, src: torch.Tensor) -> None:
        assert dst.dtype == src.dtype == torch.uint8
        self._require_one_registration(src)
        self._require_one_registration(dst)
        self._note(stream, src, dst)
        self._give(stream, lambda: self._work(lambda: dst.copy_(src)))

    def fill(self, stream: DoubleStream, dst: torch.Tensor, byte: int) -> None:
        self._note(stream, None, dst)
        self._give(stream, lambda: self._work(lambda: dst.fill_(byte)))

    def _require_one_registration(self, tensor: torch.Tensor) -> None:
        begin, end = _range(tensor)
        low, high = self._registration_before(end)
        if begin < high and not low <= begin < end <= high:
            raise RuntimeError(
                f"invalid argument: {begin:#x}..{end:#x} crosses an edge of the pinned {low:#x}..{high:#x}"
            )

    def _registration_before(self, address: int) -> tuple[int, int]:
        """The last one that begins before the address, as [begin, end); empty if there is none."""
        index = bisect.bisect_left(self._pinned_at, address) - 1
        low = self._pinned_at[index] if index >= 0 else 0
        return low, low + self.pinned.get(low, 0)

    def _work(self, action: Callable[[], object]) -> None:
        """The model's tensors may be of inference mode, and a copy may happen in any thread."""
        self.is_at_work = True
        with torch.inference_mode():
            action()
        self.is_at_work = False

    def _note(self, stream: DoubleStream, src: torch.Tensor | None, dst: torch.Tensor) -> None:
        last = next((call for name, call in reversed(self.log.calls) if name == "operation"), None)
        if last is not None and last[0] == stream.name:
            self.copied.append(Copied(*last, None if src is None else _range(src), _range(dst)))

    def allocate(self, num_bytes: int) -> torch.Tensor:
        if num_bytes > self._gpu_bytes:
            raise DeviceMemoryError(f"no {num_bytes} bytes free")
        self._gpu_bytes -= num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        begin = tensor.data_ptr()
        ranges = (self._registration_before(begin + 1), *self.host_ranges)
        return not any(low <= begin < high for low, high in ranges)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return False

    def free_bytes(self) -> int:
        return self._gpu_bytes

    def register(self, address: int, num_bytes: int) -> int:
        self.pin_calls.append(("register", address, num_bytes))
        if self._refuse_pin is not None and len(self.pin_calls) >= self._refuse_pin:
            return OUT_OF_MEMORY
        self.pinned[address] = num_bytes
        bisect.insort(self._pinned_at, address)
        return 0

    def unregister(self, address: int) -> int:
        self.pin_calls.append(("unregister", address, self.pinned.pop(address)))
        self._pinned_at.remove(address)
        return 0

    def error_text(self, code: int) -> str:
        return {OUT_OF_MEMORY: "out of memory"}.get(code, "unknown error")

    def numa_node(self) -> int | None:
        return self.node

    def range_push(self, label: str) -> None:
        self.ranges.append(label)
        self.open_ranges.append(label)

    def range_pop(self) -> None:
        self.open_ranges.pop()


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
