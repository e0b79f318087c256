# SPDX-License-Identifier: Apache-2.0
"""Traces: a row for the sweeps and one for each resource, times in microseconds, and what is written can be read."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_moe_lightning.pipeline.trace import (
    ROWS,
    SweepSpan,
    Trace,
    TraceSource,
    TraceSpan,
    chrome_trace,
    read_chrome_trace,
    write_chrome_trace,
)
from vllm_moe_lightning.resources import LABELS, Resource

SPANS = (
    TraceSpan(Resource.GPU, "post_attention(0,1)", 1.0, 1.5),
    TraceSpan(Resource.H2D, "weight_page(1,0)", 1.25, 1.75, num_bytes=4096),
)
SWEEPS = (SweepSpan(0.5, 1.0, 1, is_dummy=True), SweepSpan(1.0, 2.0, 3))
TRACE = Trace(TraceSource("emulated", "cgopipe", 2, (0, 1)), SWEEPS, SPANS)


def events(kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chrome_trace(TRACE)["traceEvents"]  # type: ignore[assignment]
    return [event for event in found if event["ph"] == kind]


def test_a_trace_names_the_device_and_its_rows_as_plans_and_logs_do() -> None:
    names = [event["args"]["name"] for event in events("M")]
    assert names == ["moe_lightning (emulated)", "sweeps", *(LABELS[row] for row in ROWS)]


def test_a_span_keeps_its_label_place_and_times() -> None:
    spans = [event for event in events("X") if event["tid"] > 0]
    assert [(s["name"], ROWS[s["tid"] - 1], s["ts"], s["dur"]) for s in spans] == [
        ("post_attention(0,1)", "gpu", 1e6, 5e5),
        ("weight_page(1,0)", "h2d", 1.25e6, 5e5),
    ]
    assert [s.get("args") for s in spans] == [None, {"bytes": 4096}]


def test_sweeps_say_how_many_micro_batches_they_had() -> None:
    sweeps = [event for event in events("X") if event["tid"] == 0]
    assert [(s["name"], s["args"]["micro_batches"]) for s in sweeps] == [("dummy sweep", 1), ("sweep x3", 3)]


def test_a_written_trace_is_read_back_and_its_folder_is_made(tmp_path: Path) -> None:
    path = tmp_path / "traces" / "sweep.json"
    write_chrome_trace(path, TRACE)
    assert read_chrome_trace(path) == TRACE  # the times above have no rounding
    assert [file.name for file in path.parent.iterdir()] == ["sweep.json"]


@pytest.mark.parametrize("change", [{"otherData": {}}, {"traceEvents": [{}]}, {"traceEvents": None}])
def test_a_trace_of_something_else_is_refused_with_what_to_give(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({**chrome_trace(TRACE), **change}))
    with pytest.raises(ValueError, match=r"other\.json is no trace of moe_lightning .* trace_file"):
        read_chrome_trace(path)


def test_a_trace_of_an_unknown_schedule_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(chrome_trace(TRACE)).replace("cgopipe", "fifo"))
    with pytest.raises(ValueError, match="unknown schedule 'fifo'"):
        read_chrome_trace(path)
