"""Who used the CPUs while something was measured: on a shared machine a figure is worth as much as this."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CpuClock:
    """CPU seconds of everybody on some CPUs, and of this process."""

    all_s: float
    ours_s: float
    wall_s: float

    @classmethod
    def read(cls, cpus: Collection[int]) -> CpuClock:
        all_ticks = 0
        for line in Path("/proc/stat").read_text().splitlines():
            name, *fields = line.split()
            if name.removeprefix("cpu") in {str(cpu) for cpu in cpus}:
                user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
                all_ticks += user + nice + system + irq + softirq + steal
        ours = os.times()
        return cls(all_ticks / os.sysconf("SC_CLK_TCK"), ours.user + ours.system, time.monotonic())

    def others_share(self, later: CpuClock, num_cpus: int) -> float:
        """Of the CPUs' time between the two readings, what went to others."""
        others_s = later.all_s - self.all_s - (later.ours_s - self.ours_s)
        return max(0.0, others_s) / ((later.wall_s - self.wall_s) * num_cpus)
