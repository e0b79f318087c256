"""What the pipeline did, counted: the figures behind reports, metrics and the tests' proof that pages moved."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields
from typing import Any

IDLE_GAP_S = 1.0


@dataclass
class PipelineCounters:
    """Totals since the engine began. Times are seconds on the launching thread unless a stream is named."""

    sweeps: int = 0
    dummy_sweeps: int = 0  # warm-up and profiling runs: they page weights too, but serve nobody
    aborted_sweeps: int = 0
    refills: int = 0  # times the first layer was brought up outside of a sweep: at the start, after an abort
    steps: Counter[str] = field(default_factory=Counter)  # "decode x4": kind and number of micro-batches
    same_step_prefix_hits: int = 0  # steps with rows kept in one micro-batch, as one reads what another writes
    micro_batches: int = 0  # of all sweeps
    rows: int = 0
    tokens: int = 0
    sampled_tokens: int = 0
    sweep_s: float = 0.0
    working_s: float = 0.0  # sweeps, and what lies between them (sampling, scheduling) unless it is IDLE_GAP_S or more
    first_sweep_began_s: float | None = None  # time.monotonic(), of the first since the last report was begun
    last_sweep_ended_s: float = 0.0
    last_sweep_s: float = 0.0  # how long that one took
    wait_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By kind of wait: "post_attention<-weight_page"."""

    @property
    def active_s(self) -> float:
        """From the first sweep's begin to the last one's end, sampling and scheduling between them included."""
        return 0.0 if self.first_sweep_began_s is None else self.last_sweep_ended_s - self.first_sweep_began_s

    @property
    def total_wait_s(self) -> float:
        return sum(self.wait_s.values())

    def end_sweep(self, began_s: float, ended_s: float, num_micro_batches: int, *, is_dummy: bool) -> None:
        gap_s = began_s - self.last_sweep_ended_s
        self.sweep_s += ended_s - began_s
        self.last_sweep_ended_s, self.last_sweep_s = ended_s, ended_s - began_s
        if self.first_sweep_began_s is None:
            self.first_sweep_began_s = began_s
        if is_dummy:
            self.dummy_sweeps += 1
            return
        self.sweeps += 1
        self.micro_batches += num_micro_batches
        self.working_s += ended_s - began_s + (gap_s if gap_s < IDLE_GAP_S else 0.0)

    def since(self, before: PipelineCounters) -> PipelineCounters:
        """What was counted after `before` was copied from these."""
        changes: dict[str, Any] = {}
        for name in (entry.name for entry in fields(self)):
            now, then = getattr(self, name), getattr(before, name)
            if name in ("first_sweep_began_s", "last_sweep_ended_s", "last_sweep_s"):
                changes[name] = now
            elif isinstance(now, dict):
                # dict() first: in one piece, even while the launching thread adds a key.
                differences = {key: value - then.get(key, 0) for key, value in dict(now).items()}
                changes[name] = type(now)() if isinstance(now, Counter) else defaultdict(float)
                changes[name].update({key: value for key, value in differences.items() if value})
            else:
                changes[name] = now - then
        return PipelineCounters(**changes)
