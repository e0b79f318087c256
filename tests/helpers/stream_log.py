# SPDX-License-Identifier: Apache-2.0
"""Everything that the streams of a device were told, and the proof afterwards that every conflict is ordered.

An observer in the hazard checker's place on the emulated device (`EmulatedDevice(observer=log)`). On CUDA it is filled
by the recording double, so that an event counts only if the CUDA call was made (`Declared`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm_moe_lightning.device.hazards import STREAM_NAMES, HazardChecker

CPU = "cpu"


class StreamLog:
    """Calls in the launching thread's order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def operation(self, stream: str, label: str, reads: Iterable[str], writes: Iterable[str]) -> None:
        self.calls.append(("operation", (stream, label, tuple(reads), tuple(writes))))

    def record_event(self, stream: str, seq: int) -> None:
        self.calls.append(("record_event", (stream, seq)))

    def wait_event(self, stream: str, event_stream: str, seq: int) -> None:
        self.calls.append(("wait_event", (stream, event_stream, seq)))

    def synchronize(self, streams: Iterable[str]) -> None:
        self.calls.append(("synchronize", (tuple(streams),)))

    def forget(self, buffer: str) -> None:
        self.calls.append(("forget", (buffer,)))

    def check(self) -> None:
        """Raises HazardError for the first read that is not ordered after its write, and the first overwrite that is
        not ordered after the last read: by streams and events alone. What the host waited for counts for the stream
        that asked for it, so nothing is right only because the launching thread was held up."""
        checker = HazardChecker(STREAM_NAMES)
        for name, arguments in self.calls:
            getattr(checker, name)(*arguments)

    def operations(self, stream: str) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
        """(label, reads, writes) in order."""
        return [call[1:] for name, call in self.calls if name == "operation" and call[0] == stream]


class Declared:
    """The device's own words where no CUDA call stands for them: buffers' names, and the native thread's events."""

    def __init__(self, log: StreamLog) -> None:
        self._log = log
        self.operation, self.forget = log.operation, log.forget

    def record_event(self, stream: str, seq: int) -> None:
        if stream == CPU:
            self._log.record_event(stream, seq)

    def wait_event(self, stream: str, event_stream: str, seq: int) -> None:
        if event_stream == CPU:
            self._log.wait_event(stream, event_stream, seq)

    def synchronize(self, streams: Iterable[str]) -> None:
        if CPU in streams:
            self._log.synchronize([CPU])
