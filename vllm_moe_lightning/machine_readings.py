"""What was measured of a machine, reading by reading, and the profile made of it. Refuses what can't be.

Takes no measurement itself (profiling.py does) and imports no torch, so that a cached measurement opens at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime

import msgspec

from vllm_moe_lightning.hardware import BELIEVABLE, HardwareProfile

BYTES_PER_S, FLOPS_PER_S, SECONDS, SHARE = "bytes/s", "FLOP/s", "s", "share"
_BELIEVABLE_OF_UNIT = {
    BYTES_PER_S: BELIEVABLE["cpu.bandwidth_bytes_per_s"],
    FLOPS_PER_S: BELIEVABLE["cpu.flops_per_s"],
    SECONDS: (1e-9, BELIEVABLE["link.latency_s"][1]),  # nothing is done in no time
    SHARE: BELIEVABLE["efficiencies.gpu_gemm"],
}


class Reading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One figure. Without a value: it was not measured, and `note` says why."""

    name: str
    unit: str
    best: float | None
    """Of all repeats: what the machine can do. Others' load only ever takes away from it."""
    median: float | None = None
    """Far below the best: the machine was busy."""
    note: str = ""

    @property
    def value(self) -> float:
        assert self.best is not None, f"{self.name} was not measured: {self.note}"
        return self.best


READINGS_VERSION = 5
"""Raised when a reading that the profile is made of is added or means something else: 2 added experts on the CPU, 3
GEMMs of few rows, 4 the experts' own kernel, 5 attention of prompts on the CPU."""


class MeasuredMachine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measurement and when, where and how it was taken."""

    fingerprint: str
    """Of the machine and of what we may use of it; see profile_cache."""
    quick: bool
    """Short runs on small buffers: good to some ten percent."""
    load_average: float
    """Before it began."""
    duration_s: float
    readings: tuple[Reading, ...]
    profile: HardwareProfile
    warnings: tuple[str, ...] = ()
    version: int = 1
    """READINGS_VERSION of the package that took it; the first one wrote none."""

    def __post_init__(self) -> None:
        refuse_unbelievable(self.readings)

    def age_s(self, now: datetime) -> float:
        """Seconds since the measurement; never negative, whatever was done to the clock."""
        if self.profile.measured_at is None:
            raise ValueError(f"{self.profile.name} is a preset, not a measurement: it has no age")
        return max(0.0, (now - datetime.fromisoformat(self.profile.measured_at)).total_seconds())


def refuse_unbelievable(readings: Iterable[Reading]) -> None:
    """ValueError that names every reading which is zero, not a number or out of all reason."""
    wrong = []
    for reading in readings:
        lowest, highest = _BELIEVABLE_OF_UNIT[reading.unit]
        for kind, value in (("best", reading.best), ("median", reading.median)):
            if value is not None and not (math.isfinite(value) and lowest <= value <= highest):
                wrong.append(
                    f"{reading.name} = {value!r} {reading.unit} ({kind}) is not between {lowest:g} and {highest:g}"
                )
    if wrong:
        raise ValueError(f"measured what can't be, so no profile is made; measure again: {'; '.join(wrong)}")


def by_name(readings: Iterable[Reading]) -> dict[str, Reading]:
    """Those that were measured."""
    return {reading.name: reading for reading in readings if reading.best is not None}
