"""What limited a run, from its trace: how busy each resource was, what the busiest one waited for, what would help.

Counts whole sweeps and the time between them (sampling, scheduling), but not the idle engine: gaps of IDLE_GAP_S or
more. Everything here is measured (or simulated) time; the cost model is not asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from vllm_moe_lightning.pipeline.bubbles import (
    BETWEEN_SWEEPS,
    MEANINGS,
    NOT_LAUNCHED,
    Bubble,
    Interval,
    bubbles_of,
    difference,
    intersection,
    length,
)
from vllm_moe_lightning.pipeline.counters import IDLE_GAP_S
from vllm_moe_lightning.pipeline.trace import ROWS, SweepSpan, Trace, TraceSpan
from vllm_moe_lightning.resources import Resource, label_of

BOUND_SHARE = 0.85
"""From here on a resource is said to bind: what is left to gain without more of it is less than a fifth."""
RELIEF: Mapping[Resource, str] = {
    Resource.H2D: "a faster link, or fewer bytes for each token: more sequences in a sweep, more resident layers, "
    "experts in 8 bits",
    Resource.CPU: "more attention threads or host memory bandwidth, or a KV cache in 8 bits",
    Resource.GPU: "a faster device, or fewer and larger micro-batches",
    Resource.D2H: "a faster link from the device, or fewer and larger micro-batches",
}
"""What makes a resource's work less, or quicker."""


@dataclass(frozen=True)
class TraceSummary:
    device: str
    schedule: str
    num_sweeps: int
    num_dummy_sweeps: int
    micro_batches: Mapping[int, int]
    """Number of micro-batches -> sweeps."""
    time_s: float
    """Of the sweeps and of what lay between them."""
    between_s: float
    """Of this, between sweeps."""
    sweep_s: float
    """Median."""
    busy_s: Mapping[Resource, float]
    num_bytes: Mapping[Resource, int]
    bubbles: tuple[Bubble, ...]
    """Of the busiest resource, the largest first."""
    experts_on_cpu: bool = False
    """In some sweep or other."""

    def label(self, resource: Resource) -> str:
        return label_of(resource, experts_on_cpu=self.experts_on_cpu)

    def share(self, resource: Resource) -> float:
        return self.busy_s[resource] / self.time_s

    @property
    def by_share(self) -> list[Resource]:
        """Busiest first."""
        return sorted(self.busy_s, key=lambda resource: -self.busy_s[resource])

    @property
    def busiest(self) -> Resource:
        return self.by_share[0]

    @property
    def is_bound(self) -> bool:
        return self.share(self.busiest) >= BOUND_SHARE

    @property
    def next_limit(self) -> tuple[str, float]:
        """(what binds once the busiest resource is none, by how much throughput could rise until then).

        The launching thread computes between the sweeps too, so there that time counts with the device's.
        """
        others = {self.label(r): self.busy_s[r] for r in self.by_share[1:] if r is not Resource.GPU}
        if self.busiest is Resource.GPU:
            others["time between sweeps"] = self.between_s
        else:
            others[self.label(Resource.GPU) + " and the time between sweeps"] = (
                self.busy_s[Resource.GPU] + self.between_s
            )
        name = max(others, key=lambda key: others[key])
        return name, self.time_s / others[name] if others[name] > 0 else float("inf")

    def sentence(self) -> str:
        """What bound the run, what else was busy, and what would help most."""
        busiest = self.busiest
        rest = ", ".join(f"{self.label(r)} {self.share(r):.0%}" for r in self.by_share[1:])
        if self.is_bound:
            name, factor = self.next_limit
            gain = (
                f"at most {factor:.1f}x, the next limit being {name}"
                if factor < float("inf")
                else "nothing else was busy"
            )
            return (
                f"bound by {self.label(busiest)} {self.share(busiest):.0%}; {rest}; next best: {RELIEF[busiest]} "
                f"({gain}; from the measured times)"
            )
        if not self.bubbles:
            return f"bound by nothing: {self.label(busiest)} {self.share(busiest):.0%}; {rest}"
        bubble = self.bubbles[0]
        factor = self.time_s / (self.time_s - bubble.time_s)
        relief = _relief_of(bubble, "" if bubble.resource is None else self.label(bubble.resource))
        return (
            f"bound by no resource: {self.label(busiest)}, the busiest, {self.share(busiest):.0%}; {rest}; next best: "
            f"{relief} ({self.label(busiest)} idles {bubble.time_s / self.time_s:.0%} of the time for that "
            f"reason, so at most {factor:.1f}x; from the measured times)"
        )

    def to_dict(self) -> dict[str, object]:
        """Times in seconds, shares 0..1 of `time_s`."""
        return {
            "device": self.device,
            "schedule": self.schedule,
            "sweeps": self.num_sweeps,
            "dummy_sweeps": self.num_dummy_sweeps,
            "micro_batches": {str(count): sweeps for count, sweeps in sorted(self.micro_batches.items())},
            "time_s": self.time_s,
            "between_sweeps_s": self.between_s,
            "sweep_s_median": self.sweep_s,
            "busy": {str(resource): self.share(resource) for resource in self.by_share},
            "bytes_per_busy_s": {
                str(r): self.num_bytes[r] / self.busy_s[r] for r in ROWS if self.num_bytes[r] and self.busy_s[r]
            },
            "busiest": str(self.busiest),
            "is_bound": self.is_bound,
            "bubbles": [
                {
                    "reason": b.reason,
                    "resource": None if b.resource is None else str(b.resource),
                    "time_s": b.time_s,
                    "share": b.time_s / self.time_s,
                }
                for b in self.bubbles
            ],
            "sentence": self.sentence(),
        }


def summarise(trace: Trace) -> TraceSummary:
    """Raises ValueError for a trace without a whole sweep."""
    sweeps = sorted(sweep for sweep in trace.sweeps if not sweep.is_dummy)
    if not sweeps:
        raise ValueError(
            f"the trace holds no whole sweep that served requests ({len(trace.spans)} operations); let the engine "
            "answer something first, or raise trace_operations"
        )
    counted, between = _counted(sweeps)
    of_resource: dict[Resource, list[TraceSpan]] = {resource: [] for resource in Resource}
    for span in sorted(trace.spans, key=lambda span: span.start_s):
        of_resource[span.resource].append(span)
    busy = {r: intersection([(s.start_s, s.end_s) for s in spans], counted) for r, spans in of_resource.items()}
    busy_s = {resource: length(intervals) for resource, intervals in busy.items()}
    busiest = max(busy_s, key=lambda resource: busy_s[resource])
    return TraceSummary(
        device=trace.source.device,
        schedule=trace.source.schedule,
        num_sweeps=len(sweeps),
        num_dummy_sweeps=len(trace.sweeps) - len(sweeps),
        micro_batches=Counter(sweep.num_micro_batches for sweep in sweeps),
        time_s=length(counted),
        between_s=length(between),
        sweep_s=median(sweep.end_s - sweep.start_s for sweep in sweeps),
        busy_s=busy_s,
        num_bytes={
            r: sum(span.num_bytes for span in spans if any(begin <= span.start_s < end for begin, end in counted))
            for r, spans in of_resource.items()
        },
        bubbles=bubbles_of(trace, of_resource, busiest, difference(counted, busy[busiest]), between),
        experts_on_cpu=any(sweep.experts.on_cpu for sweep in sweeps),
    )


def _counted(sweeps: Sequence[SweepSpan]) -> tuple[list[Interval], list[Interval]]:
    """(time that counts, what of it lies between sweeps), each ascending and without overlaps."""
    counted: list[Interval] = [(sweeps[0].start_s, sweeps[0].end_s)]
    between: list[Interval] = []
    for sweep in sweeps[1:]:
        begin_s, end_s = counted[-1]
        if sweep.start_s - end_s < IDLE_GAP_S:
            between.append((end_s, sweep.start_s))
            counted[-1] = (begin_s, sweep.end_s)
        else:
            counted.append((sweep.start_s, sweep.end_s))
    return counted, between


def _relief_of(bubble: Bubble, label: str) -> str:
    """`label`: of the resource that was waited for, if one was."""
    if bubble.resource is not None:
        return f"quicker {label}, or more micro-batches to hide it ({bubble.reason})"
    match bubble.reason:
        case reason if reason == BETWEEN_SWEEPS:
            return f"more work in a sweep, against the time between them ({MEANINGS[BETWEEN_SWEEPS]})"
        case reason if reason == NOT_LAUNCHED:
            return "more work in a task (fewer, larger micro-batches and pages), against the time to launch it"
    return "more sequences in a sweep"
