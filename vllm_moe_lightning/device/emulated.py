"""A device made of threads, on any CPU: copies really are asynchronous and really copy.

The launching thread is the compute stream; d2h, h2d and cpu are native streams. An optional link speed paces
the copies by sleeping, a memory budget makes "does not fit" happen as on a GPU, and the test modes make a
missing wait visible: `lazy` and `jitter` timing, `poison`, and the hazard checker.
"""

import contextlib
import mmap
from collections import deque
from collections.abc import Sequence

import torch

from vllm_moe_lightning.device.base import Buffer, Event, OperationRecord, StreamTotals
from vllm_moe_lightning.device.emulated_streams import EmulatedComputeStream, EmulatedCopyStream
from vllm_moe_lightning.device.framed import FramedDevice, synchronize_all
from vllm_moe_lightning.device.hazards import STREAM_NAMES, HazardChecker, StreamObserver
from vllm_moe_lightning.device.memory import POISON_BYTE, MemoryBudget
from vllm_moe_lightning.device.native_stream import TIMINGS, NativeHostTaskStream, NativeStream, Timing


class EmulatedDevice(FramedDevice):
    """See the module docstring.

    h2d_bytes_per_s, d2h_bytes_per_s: link speed per direction, None: as fast as memcpy. A paced copy takes
        link_latency_s + bytes / speed.
    timing: "eager"; "lazy": an operation runs only once somebody waits for it; "jitter": each waits a random
        0..jitter_max_s first, the same for the same seed.
    poison: frames hold NaN bytes when fresh and when released.
    check_hazards: conflicting operations without an event between them raise HazardError when submitted.
    observer: told of every operation in the checker's place.
    stall_timeout_s: a wait on the host raises DeviceStalledError once no stream has completed anything for so long;
        None: it waits for ever.
    cpus: where the streams' threads may run; None: where the calling thread may.
    """

    kind = "emulated"
    torch_device = torch.device("cpu")
    computes_on_launching_thread = True

    def __init__(
        self,
        memory_budget_bytes: int | None = None,
        h2d_bytes_per_s: float | None = None,
        d2h_bytes_per_s: float | None = None,
        link_latency_s: float = 0.0,
        timing: Timing = "eager",
        seed: int = 0,
        jitter_max_s: float = 0.002,
        poison: bool = False,
        check_hazards: bool = False,
        observer: StreamObserver | None = None,
        stall_timeout_s: float | None = None,
        cpus: Sequence[int] | None = None,
    ) -> None:
        if timing not in TIMINGS:
            raise ValueError(f"timing must be one of {sorted(TIMINGS)}, got {timing!r}")
        for option, value in (("h2d_bytes_per_s", h2d_bytes_per_s), ("d2h_bytes_per_s", d2h_bytes_per_s)):
            if value is not None and not value > 0:
                raise ValueError(f"{option} must be positive, or None for an unpaced link; got {value}")
        if stall_timeout_s is not None and not stall_timeout_s > 0:
            raise ValueError(f"stall_timeout_s must be positive, or None to wait for ever; got {stall_timeout_s}")
        for option, value in (("link_latency_s", link_latency_s), ("jitter_max_s", jitter_max_s)):
            if not value >= 0:
                raise ValueError(f"{option} must not be negative, got {value}")
        hazards = observer if observer is not None else HazardChecker(STREAM_NAMES) if check_hazards else None
        super().__init__(MemoryBudget(memory_budget_bytes), hazards, poison=poison)

        def link(name: str, bytes_per_s: float | None) -> EmulatedCopyStream:
            return EmulatedCopyStream(
                name,
                self._hazards,
                bandwidth_bytes_per_s=bytes_per_s or 0.0,
                latency_s=link_latency_s,
                timing=timing,
                seed=seed,
                jitter_max_s=jitter_max_s,
                stall_timeout_s=stall_timeout_s or 0.0,
                cpus=cpus,
            )

        self.cpu: NativeHostTaskStream = NativeHostTaskStream(
            "cpu",
            self._hazards,
            timing=timing,
            seed=seed,
            jitter_max_s=jitter_max_s,
            stall_timeout_s=stall_timeout_s or 0.0,
            cpus=cpus,
        )
        self.d2h: EmulatedCopyStream = link("d2h", d2h_bytes_per_s)
        self.h2d: EmulatedCopyStream = link("h2d", h2d_bytes_per_s)
        self.compute: EmulatedComputeStream = EmulatedComputeStream(self.cpu, self._hazards)
        self._native_streams: tuple[NativeStream, ...] = (self.d2h, self.h2d, self.cpu)
        for stream in self._native_streams:
            stream.tasks, stream.peers = self.cpu, self._native_streams

    def allocate(self, num_bytes: int, name: str) -> Buffer:
        self._memory.take(num_bytes, name)
        tensor = torch.empty(num_bytes, dtype=torch.uint8)
        self._poison(tensor)
        self._frames[name] = tensor
        return Buffer(name, tensor)

    def _poison(self, frame: torch.Tensor) -> None:
        if self.poison:
            frame.fill_(POISON_BYTE)

    def allocate_host(self, num_bytes: int, name: str) -> Buffer:
        if num_bytes < 0:
            raise ValueError(f"{name}: cannot allocate {num_bytes} bytes")
        if num_bytes == 0:
            return Buffer(name, torch.empty(0, dtype=torch.uint8))
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, nothing else
            mapping.madvise(mmap.MADV_HUGEPAGE)
        return Buffer(name, torch.frombuffer(mapping, dtype=torch.uint8))

    def pin(self, tensor: torch.Tensor, name: str) -> None:
        """Nothing: its streams copy whatever memory there is."""

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def wait_on_host(self, event: Event) -> None:
        assert isinstance(event.stream, NativeStream), f"{event.stream.name} is no copy stream"
        event.stream.wait_on_host(event.seq)

    @property
    def stalled(self) -> bool:
        return any(stream.stalled for stream in self._native_streams)

    def memory_report(self) -> str:
        return self._memory.report()

    def synchronize(self) -> None:
        synchronize_all((*self._native_streams, self.compute))

    def totals(self) -> dict[str, StreamTotals]:
        totals = {stream.name: stream.totals() for stream in self._native_streams}
        return {"compute": StreamTotals(self.compute.busy_s, 0, self.compute.num_spans), **totals}

    def set_recording(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"cannot keep {capacity} records")
        self.compute.records = deque(self.compute.records, maxlen=capacity)
        for stream in self._native_streams:
            stream.set_recording(capacity)

    def drain_records(self) -> list[OperationRecord]:
        # One by one: the launching thread may go on meanwhile.
        records = [self.compute.records.popleft() for _ in range(len(self.compute.records))]
        for stream in self._native_streams:
            records += stream.drain_records()
        return sorted(records, key=lambda record: record.start_s)

    def close(self) -> None:
        for stream in self._native_streams:
            stream.close()
