"""Times several competitors in one process, interleaved: what disturbs one of them in a round disturbs all."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from benchmarks.cpu_clock import CpuClock

# OpenMP's threads spin for some milliseconds after torch's or vLLM's work; they must not take the next one's CPUs. The
# run-up of several threads then lets the kernel spread them over the CPUs: at first it may wake two on the same one.
SETTLE_S = 0.02
STOLEN_CORE_START_S = 0.3
MOST_ATTEMPTS = 2
# Ends by itself if we are killed.
BUSY_LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


Passes = Mapping[str, Callable[[], object]]


@dataclass
class Seconds:
    """One competitor's samples, one per round."""

    cpu: list[float] = field(default_factory=list)
    """CPU time of the calling thread: what one thread took, whoever else was on its core in between."""
    wall: list[float] = field(default_factory=list)

    def by(self, clock: str) -> list[float]:
        return self.cpu if clock == "cpu" else self.wall


@dataclass
class Rounds:
    seconds: dict[str, Seconds]
    others_cpu_share: list[float] = field(default_factory=list)
    """Of the CPUs' time in each round, what other processes took."""


def measure(
    passes: Passes,
    num_rounds: int,
    *,
    settle_s: float = 0.0,
    has_run_up: bool = False,
    most_others_share: float = math.inf,
) -> Rounds:
    """In each round every pass once, a different one first; after a round that does not count.

    `has_run_up`: each pass runs twice in a row, and the second time counts. A round in which other processes took more
    than `most_others_share` of the CPUs is taken again, and the one with least of it counts.
    """
    names = list(passes)
    rounds = Rounds({name: Seconds() for name in names})
    cpus = os.sched_getaffinity(0)
    for index in range(-1, num_rounds):
        first = index % len(names)
        order = names[first:] + names[:first]
        attempts = []
        for _ in range(1 if index < 0 else MOST_ATTEMPTS):
            before = CpuClock.read(cpus)
            taken = _take_round(passes, order, settle_s, has_run_up)
            attempts.append((before.others_share(CpuClock.read(cpus), len(cpus)), taken))
            if attempts[-1][0] <= most_others_share:
                break
        if index >= 0:
            share, taken = min(attempts, key=lambda attempt: attempt[0])
            rounds.others_cpu_share.append(share)
            for name, (cpu_s, wall_s) in taken.items():
                rounds.seconds[name].cpu.append(cpu_s)
                rounds.seconds[name].wall.append(wall_s)
    return rounds


def _take_round(passes: Passes, order: list[str], settle_s: float, has_run_up: bool) -> dict[str, tuple[float, float]]:
    """CPU and wall seconds of each."""
    taken = {}
    for name in order:
        time.sleep(settle_s)
        if has_run_up:
            passes[name]()
        started_s, started_cpu_s = time.perf_counter(), time.thread_time()
        passes[name]()
        cpu_s, wall_s = time.thread_time() - started_cpu_s, time.perf_counter() - started_s
        taken[name] = cpu_s, wall_s
    return taken


@contextlib.contextmanager
def one_core_stolen() -> Iterator[None]:
    """Another process computes on the last of our CPUs all the while."""
    with subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) as busy:
        try:
            os.sched_setaffinity(busy.pid, {max(os.sched_getaffinity(0))})
            time.sleep(STOLEN_CORE_START_S)
            yield
        finally:
            busy.kill()
