"""What the streams did, or a simulated sweep: as spans, and as a chrome trace (chrome://tracing, Perfetto) and back.

The file says which schedule was followed, so that whoever reads it can tell what each task waited for.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vllm_moe_lightning.pipeline.expert_places import ALL_STREAMED, ExpertPlaces
from vllm_moe_lightning.pipeline.schedule import SCHEDULE_NAMES
from vllm_moe_lightning.resources import LABELS, Resource

ROWS = (Resource.GPU, Resource.D2H, Resource.CPU, Resource.H2D)  # from top to bottom, as in the paper's figure
SWEEPS_ROW = "sweeps"
SOURCE_KEY = "moe_lightning"
_US_PER_S = 1e6


class TraceSpan(NamedTuple):
    """Time that a task kept its resource busy, on time.monotonic()'s clock (a simulation's: from 0)."""

    resource: Resource
    label: str
    start_s: float
    end_s: float
    num_bytes: int = 0


class SweepSpan(NamedTuple):
    """One pass over the layers, as the launching thread saw it."""

    start_s: float
    end_s: float
    num_micro_batches: int
    is_dummy: bool = False
    """A warm-up or profiling pass: pages move, nobody attends."""
    experts: ExpertPlaces = ALL_STREAMED
    context: tuple[int, ...] = ()
    """Micro-batches whose prompts' context came up to the device."""


@dataclass(frozen=True)
class TraceSource:
    """What was traced."""

    device: str
    """emulated, cuda or simulated."""
    schedule: str
    lookahead: int
    pages_per_layer: tuple[int, ...]
    """Of each decoder layer; 0 for one that is dense or resident."""
    with_attention: bool = True
    """Whether attention was tasks of its own; else it was part of the device's."""


@dataclass(frozen=True)
class Trace:
    source: TraceSource
    sweeps: tuple[SweepSpan, ...]
    spans: tuple[TraceSpan, ...]


def chrome_trace(trace: Trace) -> dict[str, object]:
    """The trace as a JSON object: a row for the sweeps, then one for each resource."""
    source = trace.source
    names = [SWEEPS_ROW, *(LABELS[row] for row in ROWS)]
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": f"moe_lightning ({source.device})"}}
    ]
    events += [
        {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for tid, name in enumerate(names)
    ]
    for sweep in trace.sweeps:
        name = "dummy sweep" if sweep.is_dummy else f"sweep x{sweep.num_micro_batches}"
        args = {
            "micro_batches": sweep.num_micro_batches,
            "cpu_experts": sorted(sweep.experts.on_cpu),
            "fetched_experts": sorted(sweep.experts.fetched),
            "context": list(sweep.context),
        }
        events.append(_event(0, name, sweep.start_s, sweep.end_s, args))
    for span in trace.spans:
        tid = 1 + ROWS.index(span.resource)
        events.append(
            _event(tid, span.label, span.start_s, span.end_s, {"bytes": span.num_bytes} if span.num_bytes else {})
        )
    about = {
        "device": source.device,
        "schedule": source.schedule,
        "lookahead": source.lookahead,
        "pages_per_layer": list(source.pages_per_layer),
        "with_attention": source.with_attention,
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {SOURCE_KEY: about}}


def _event(tid: int, name: str, start_s: float, end_s: float, args: Mapping[str, object]) -> dict[str, object]:
    event: dict[str, object] = {"ph": "X", "pid": 0, "tid": tid, "name": name}
    event |= {"ts": start_s * _US_PER_S, "dur": (end_s - start_s) * _US_PER_S}
    return event | {"args": args} if args else event


def write_chrome_trace(path: Path, trace: Trace) -> None:
    """Whoever reads `path` meanwhile sees the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        unfinished.write_text(json.dumps(chrome_trace(trace)))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_chrome_trace(path: Path) -> Trace:
    """Raises ValueError for a file that `write_chrome_trace` did not write."""
    try:
        raw = json.loads(path.read_text())
        about = raw["otherData"][SOURCE_KEY]
        events = [event for event in raw["traceEvents"] if event["ph"] == "X"]
        source = TraceSource(
            device=str(about["device"]),
            schedule=str(about["schedule"]),
            lookahead=int(about["lookahead"]),
            pages_per_layer=tuple(int(pages) for pages in about["pages_per_layer"]),
            with_attention=bool(about["with_attention"]),
        )
        if source.schedule not in SCHEDULE_NAMES:
            raise ValueError(f"unknown schedule {source.schedule!r}")
        sweeps = [_sweep(event) for event in events if event["tid"] == 0]
        spans = [_span(event) for event in events if event["tid"] > 0]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"{path} is no trace of moe_lightning ({type(error).__name__}: {error}); give the file that the option "
            "trace_file, `trace --output` or `plan --trace` wrote"
        ) from error
    return Trace(source, tuple(sweeps), tuple(spans))


def _times_s(event: Mapping[str, Any]) -> tuple[float, float]:
    start_us, duration_us = float(event["ts"]), float(event["dur"])
    return start_us / _US_PER_S, (start_us + duration_us) / _US_PER_S


def _sweep(event: Mapping[str, Any]) -> SweepSpan:
    args, is_dummy = event["args"], event["name"] == "dummy sweep"
    on_cpu, fetched = (frozenset(map(int, args[name])) for name in ("cpu_experts", "fetched_experts"))
    places, context = ExpertPlaces(on_cpu, fetched), tuple(map(int, args["context"]))
    return SweepSpan(*_times_s(event), int(args["micro_batches"]), is_dummy, places, context)


def _span(event: Mapping[str, Any]) -> TraceSpan:
    num_bytes = int(event.get("args", {}).get("bytes", 0))
    return TraceSpan(ROWS[event["tid"] - 1], str(event["name"]), *_times_s(event), num_bytes)


def request_file_of(trace_file: Path) -> Path:
    """Whoever makes this file asks the running engine to write `trace_file` now; the engine takes it away."""
    return trace_file.with_name(f"{trace_file.name}.request")
