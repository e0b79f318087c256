# SPDX-License-Identifier: Apache-2.0
"""Event times stay precise for days, although CUDA counts in 32-bit floats, and never at the price of a wait."""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass
from typing import Any

import pytest

from tests.helpers.recording_cuda import RecordingCuda
from vllm_moe_lightning.device import cuda_clock
from vllm_moe_lightning.device.cuda_clock import CudaClock

DAY_S = 86_400.0
BETWEEN_S = 3.0
LOOK_S = 5e-6
PRECISE_S = 1e-4


@dataclass
class FakeTime:
    """Of the host. Each look takes a moment."""

    now_s: float = 1000.0

    def monotonic(self) -> float:
        self.now_s += LOOK_S
        return self.now_s


class FakeEvents:
    """CUDA's, of a GPU whose clock gains `drift` seconds each second; of a stream with work before them, never yet
    complete (`is_late`)."""

    def __init__(self, time: FakeTime, drift: float = 0.0, *, is_late: bool = False) -> None:
        self._time, self._rate, self._is_late = time, 1.0 + drift, is_late
        self.host_waits = 0

    def new_stream(self, name: str) -> str:
        return name

    def record(self, stream: str) -> float:
        return self._time.now_s

    def is_complete(self, event: float) -> bool:
        return not self._is_late

    def host_wait(self, event: float, timeout_s: float | None) -> bool:
        self.host_waits += 1
        return True

    def seconds_between(self, start: float, end: float) -> float:
        return ctypes.c_float((end - start) * self._rate * 1e3).value / 1e3


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(cuda_clock, "time", fake)
    return fake


def errors_s(clock: CudaClock, time: FakeTime, seconds: float, between_s: float = BETWEEN_S) -> list[float]:
    """Of operations that begin now and then, counted as the streams do."""
    found, draw = [], random.Random(0)
    for _ in range(int(seconds / between_s)):
        time.now_s += between_s * draw.uniform(0.9, 1.1)
        clock.keep_recent()
        event = time.now_s
        found.append(abs(clock.time_s(event) - event))
    return found


@pytest.mark.parametrize("is_late", [False, True])
def test_after_three_days_times_are_still_precise(time: FakeTime, is_late: bool) -> None:
    events: Any = FakeEvents(time, is_late=is_late)
    clock = CudaClock(events)
    clock.set("compute")
    assert max(errors_s(clock, time, 3 * DAY_S)) < PRECISE_S
    assert events.host_waits == 1


def test_a_night_without_any_operation_costs_no_precision(time: FakeTime) -> None:
    events: Any = FakeEvents(time)
    clock = CudaClock(events)
    clock.set("compute")
    assert max(errors_s(clock, time, 3 * DAY_S, between_s=DAY_S / 2)) < PRECISE_S


def test_a_gpu_whose_clock_drifts_is_followed(time: FakeTime) -> None:
    drift = 1e-6
    events: Any = FakeEvents(time, drift)
    clock = CudaClock(events)
    clock.set("compute")
    assert max(errors_s(clock, time, DAY_S)) < cuda_clock.RENEW_AFTER_S * drift + PRECISE_S


def test_an_origin_that_does_not_come_at_once_holds_nobody_up(time: FakeTime) -> None:
    events: Any = FakeEvents(time, is_late=True)
    clock = CudaClock(events)
    clock.set("compute")
    time.now_s += DAY_S
    begin_s = time.now_s
    for _ in range(100):
        clock.keep_recent()
    assert time.now_s - begin_s < cuda_clock.LONGEST_LOOK_S + 110 * LOOK_S


def test_streams_that_record_keep_the_clock_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = RecordingCuda()
    device = cuda.device()
    renewed: list[CudaClock] = []
    monkeypatch.setattr(CudaClock, "keep_recent", lambda clock: renewed.append(clock))
    for capacity, expected in ((0, 0), (8, 2)):
        device.set_recording(capacity)
        with device.compute.span("pre", reads=[], writes=[]):
            pass
        device.h2d.fill(device.allocate(64, f"frame {capacity}").tensor, 0, writes=["frame"])
        assert len(renewed) == expected
    device.close()
