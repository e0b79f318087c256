"""What the engine asks of a device: four streams, events between them, copies, and memory against a budget.

Rules for callers: all submissions come from one thread; whatever one stream writes and another touches is
ordered by an event, never by luck; every operation says which buffers it reads and writes, by name. How an
operation runs, and how long it takes, is the device's.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Event(NamedTuple):
    """A point in a stream: complete once the stream has completed operation `seq` (1, 2, ...; 0: at once)."""

    stream: "Stream"
    seq: int
    handle: object = None
    """What the device's library knows it by; None where (stream, seq) is all there is."""


@dataclass(frozen=True)
class Buffer:
    """One allocation; `name` is what hazards and errors print.

    Whoever allocated it owns it; the streams that may touch it are those that declare it.
    """

    name: str
    tensor: torch.Tensor  # [num_bytes] uint8


@dataclass(frozen=True)
class StreamTotals:
    """What a stream has done since the device was made. busy_s leaves out waits for other streams."""

    busy_s: float = 0.0
    num_bytes: int = 0
    num_operations: int = 0


@dataclass(frozen=True)
class OperationRecord:
    """One finished operation, for the trace. Times are on time.monotonic()'s clock."""

    stream: str
    label: str
    start_s: float
    end_s: float
    num_bytes: int


class Stream(ABC):
    """Operations run in the order of submission; `name` is "compute", "d2h", "h2d" or "cpu"."""

    name: str
    wait_s: float
    """Time that the launching thread was held up by this stream's waits, since the device was made."""

    @abstractmethod
    def record_event(self) -> Event:
        """An event that is complete once everything submitted to this stream so far is."""

    @abstractmethod
    def wait_event(self, event: Event) -> None:
        """What is submitted to this stream from now on runs only after `event` is complete."""

    @abstractmethod
    def synchronize(self) -> None:
        """Blocks the host until everything submitted is complete.

        Raises DeviceTaskError if a task failed, DeviceStalledError if nothing goes on any more; so does each wait
        on the host.
        """


class CopyStream(Stream):
    """Copies between host and device, asynchronous to the caller."""

    @abstractmethod
    def copy(
        self,
        dst: Sequence[torch.Tensor],
        src: Sequence[torch.Tensor],
        label: str,
        *,
        reads: Sequence[str],
        writes: Sequence[str],
    ) -> None:
        """Copies src[i] to dst[i], contiguous and of equal bytes, as one operation; keeps both alive.

        Raises ValueError when a pair differs in bytes, is not contiguous, or is on the wrong side.
        """

    @abstractmethod
    def fill(self, dst: torch.Tensor, byte: int, *, writes: Sequence[str]) -> None:
        """Sets every byte of `dst` (contiguous) to `byte`, 0..255. Counts as no copy and moves no bytes."""


class HostTaskStream(Stream):
    """The queue of CPU attention: one C call per task, first in first out, without the GIL."""

    @abstractmethod
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
        """Runs function(&argument), an int32_t (*)(const void*), on the stream's thread.

        Non-zero is failure: the next wait on the host raises DeviceTaskError, once; the stream goes on.
        `keep_alive` owns the memory that `argument` points into; the stream holds it until the call is done.
        """

    @abstractmethod
    def fill(self, dst: torch.Tensor, byte: int, *, writes: Sequence[str]) -> None:
        """Sets every byte of `dst` (contiguous, in host memory) to `byte`. Counts as no task."""


class ComputeStream(Stream):
    """The stream of the model's own kernels."""

    @abstractmethod
    def span(self, label: str, *, reads: Sequence[str], writes: Sequence[str]) -> AbstractContextManager[None]:
        """Brackets the torch work of one schedule task: a record in the trace, an operation for hazards."""


class Device(ABC):
    """One accelerator (or the emulation of one) with its streams and its memory."""

    kind: str  # "emulated" or "cuda"
    computes_on_launching_thread: bool
    """If so, whatever a task of compute need not wait for is best launched before it; if not, launching such a task
    takes no time, and only host tasks that are waited for do."""
    torch_device: torch.device  # of frames, and of the model's tensors
    compute: ComputeStream
    d2h: CopyStream
    h2d: CopyStream
    cpu: HostTaskStream
    poison: bool  # fresh and released frames hold NaN bytes

    @abstractmethod
    def allocate(self, num_bytes: int, name: str) -> Buffer:
        """A device frame, counted against the budget; full of 0xFF (NaN in every float type) under poison.

        Raises DeviceMemoryError over budget, ValueError for a name in use.
        """

    @abstractmethod
    def reserve(self, num_bytes: int, name: str) -> None:
        """Counts device memory that somebody else allocated. Raises as allocate does."""

    @abstractmethod
    def release(self, name: str) -> None:
        """Gives an allocation or a reservation back. The caller has waited for all that touches it."""

    @abstractmethod
    def allocate_host(self, num_bytes: int, name: str) -> Buffer:
        """Host memory in a page-aligned mapping of its own (pinned on CUDA): zeroed, outside the budget."""

    @abstractmethod
    def pin(self, tensor: torch.Tensor, name: str) -> None:
        """Host memory that somebody else allocated, until the device is closed: copies to the device may read it.

        Raises PinningError.
        """

    @abstractmethod
    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A small tensor of the host's, for the compute stream's kernels; never blocks. Not counted."""

    @abstractmethod
    def wait_on_host(self, event: Event) -> None:
        """Blocks the calling thread until a copy stream's event is complete: it may then read what was copied. Orders
        nothing that streams are given. Raises DeviceStalledError if nothing goes on any more."""

    @property
    @abstractmethod
    def stalled(self) -> bool:
        """Whether a wait raised DeviceStalledError: something may still be running, so nothing of it can be closed."""

    @property
    @abstractmethod
    def memory_budget_bytes(self) -> int | None:
        """Device memory that may be in use at once; None: unlimited."""

    @property
    @abstractmethod
    def memory_used_bytes(self) -> int:
        """Allocated and reserved."""

    @abstractmethod
    def memory_report(self) -> str:
        """A table of what is allocated, largest first: name, bytes."""

    @abstractmethod
    def synchronize(self) -> None:
        """Blocks the host until all streams are idle. Raises DeviceTaskError if a host task failed."""

    @abstractmethod
    def totals(self) -> dict[str, StreamTotals]:
        """Per stream name."""

    @abstractmethod
    def set_recording(self, capacity: int) -> None:
        """Each stream keeps its newest `capacity` records from now on; 0 switches recording off."""

    @abstractmethod
    def drain_records(self) -> list[OperationRecord]:
        """The records kept so far, by start time; they are forgotten here. May be called from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Runs out the queues, frees the streams; leaves everything as it is if the device has stalled. May be called
        twice."""
