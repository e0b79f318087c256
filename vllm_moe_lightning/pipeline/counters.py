"""What the pipeline did, counted: the figures behind reports, metrics and the tests' proof that pages moved."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass
class PipelineCounters:
    """Totals since the last reset. Times are seconds on the launching thread unless a stream is named."""

    sweeps: int = 0
    dummy_sweeps: int = 0  # warm-up and profiling runs: they page weights too, but serve nobody
    aborted_sweeps: int = 0
    refills: int = 0  # times the first layer was brought up outside of a sweep: at the start, after an abort
    steps: Counter[str] = field(default_factory=Counter)  # "decode x4": kind and number of micro-batches
    same_step_prefix_hits: int = 0  # steps with rows kept in one micro-batch, as one reads what another writes
    rows: int = 0
    tokens: int = 0
    sweep_s: float = 0.0
    first_sweep_began_s: float | None = None  # time.monotonic()
    last_sweep_ended_s: float = 0.0
    wait_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By kind of wait: "post_attention<-weight_page"."""

    @property
    def active_s(self) -> float:
        """From the first sweep's begin to the last one's end, sampling and scheduling between them included."""
        return 0.0 if self.first_sweep_began_s is None else self.last_sweep_ended_s - self.first_sweep_began_s

    @property
    def total_wait_s(self) -> float:
        return sum(self.wait_s.values())
