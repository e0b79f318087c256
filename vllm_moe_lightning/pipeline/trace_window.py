"""Which part of a trace is looked at: a typical sweep, a layer in the middle of it."""

from __future__ import annotations

from collections import Counter

from vllm_moe_lightning.pipeline.trace import SweepSpan, Trace, TraceSpan
from vllm_moe_lightning.resources import Resource


def typical_sweep(trace: Trace) -> SweepSpan:
    """The sweep of median time among those with the most frequent number of micro-batches. Raises as `summarise`."""
    sweeps = [sweep for sweep in trace.sweeps if not sweep.is_dummy]
    if not sweeps:
        raise ValueError("the trace holds no whole sweep that served requests")
    (count, _), *_ = Counter(sweep.num_micro_batches for sweep in sweeps).most_common()
    alike = sorted(
        (sweep for sweep in sweeps if sweep.num_micro_batches == count), key=lambda sweep: sweep.end_s - sweep.start_s
    )
    return alike[len(alike) // 2]


def spans_within(trace: Trace, start_s: float, end_s: float) -> list[TraceSpan]:
    return [span for span in trace.spans if span.end_s > start_s and span.start_s < end_s]


def layer_in_the_middle(trace: Trace, sweep: SweepSpan) -> tuple[int, float, float]:
    """(decoder layer, begin, end) of the device's tasks of the middle layer in this sweep; times in seconds."""
    layer = len(trace.source.pages_per_layer) // 2
    tasks = [
        span
        for span in spans_within(trace, sweep.start_s, sweep.end_s)
        if span.resource is Resource.GPU and f"({layer}," in span.label
    ]
    if not tasks:
        return layer, sweep.start_s, sweep.end_s
    return layer, min(span.start_s for span in tasks), max(span.end_s for span in tasks)
