"""Chrome-trace output (chrome://tracing, Perfetto) of what the streams did, or of a simulated sweep."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROWS = ("compute", "d2h", "cpu", "h2d")  # from top to bottom, as in the paper's figure


class TraceSpan(NamedTuple):
    row: str
    label: str
    start_s: float
    end_s: float
    num_bytes: int = 0


def chrome_trace(spans: Iterable[TraceSpan], *, device: str) -> dict[str, object]:
    """The trace as a JSON object. `device` ("emulated", "cuda" or "simulated") stands in the process name."""
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": f"moe_lightning ({device})"}}
    ]
    events += [
        {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": row}} for tid, row in enumerate(ROWS)
    ]
    for span in spans:
        event: dict[str, object] = {
            "ph": "X",
            "pid": 0,
            "tid": ROWS.index(span.row),
            "name": span.label,
            "ts": span.start_s * 1e6,
            "dur": (span.end_s - span.start_s) * 1e6,
        }
        if span.num_bytes:
            event["args"] = {"bytes": span.num_bytes}
        events.append(event)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(path: Path, spans: Iterable[TraceSpan], *, device: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome_trace(spans, device=device)))
