# SPDX-License-Identifier: Apache-2.0
"""Chrome-trace output: one row per stream, times in microseconds."""

import json
from pathlib import Path

from vllm_moe_lightning.pipeline.trace import ROWS, TraceSpan, chrome_trace, write_chrome_trace

SPANS = [
    TraceSpan("compute", "post_attention(0,1)", 1.0, 1.5),
    TraceSpan("h2d", "weight_page(1,0)", 1.25, 1.75, num_bytes=4096),
]


def test_a_trace_names_the_device_and_its_rows_from_top_to_bottom() -> None:
    events = chrome_trace(SPANS, device="emulated")["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]  # type: ignore[attr-defined]
    assert names == ["moe_lightning (emulated)", *ROWS]


def test_a_span_keeps_its_label_place_and_times() -> None:
    events = chrome_trace(SPANS, device="simulated")["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]  # type: ignore[attr-defined]
    assert [(s["name"], ROWS[s["tid"]], s["ts"], s["dur"]) for s in spans] == [
        ("post_attention(0,1)", "compute", 1e6, 5e5),
        ("weight_page(1,0)", "h2d", 1.25e6, 5e5),
    ]
    assert [s.get("args") for s in spans] == [None, {"bytes": 4096}]


def test_a_trace_file_is_json_and_its_folder_is_made(tmp_path: Path) -> None:
    path = tmp_path / "traces" / "sweep.json"
    write_chrome_trace(path, SPANS, device="emulated")
    assert json.loads(path.read_text()) == chrome_trace(SPANS, device="emulated")
