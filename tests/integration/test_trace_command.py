# SPDX-License-Identifier: Apache-2.0
"""`trace` on what a running engine writes when it is asked: pictures, a summary and one sentence."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.helpers.engine import Job, Rpc
from tests.helpers.engine_call import call, calls, result_of
from tests.helpers.paging import run_paged
from tests.helpers.prompts import standard_prompts
from vllm_moe_lightning.cli.app import app
from vllm_moe_lightning.pipeline.trace import read_chrome_trace, request_file_of

pytestmark = pytest.mark.integration


def ask_by_file(llm: Any, trace_file: str) -> bool:
    """In the engine's process: whether the request is answered while the engine is idle."""
    request = request_file_of(Path(trace_file))
    request.touch()
    for _ in range(200):
        if not request.exists():
            return Path(trace_file).exists()
        time.sleep(0.05)
    return False


def test_a_running_engine_writes_its_last_sweeps_and_the_command_says_what_limited_them(checkpoint, tmp_path):
    trace_file, output = tmp_path / "trace.json", tmp_path / "out"
    jobs = [
        Job(standard_prompts(8), {"max_tokens": 8}, stats=None),
        calls(
            call(f"{__name__}:ask_by_file", trace_file=str(trace_file)),
            Rpc("moe_lightning_trace"),
        ),
    ]
    options = {"trace_file": str(trace_file), "num_micro_batches": 2, "h2d_gb_per_s": 0.2}
    result = run_paged(checkpoint("mixtral", num_layers=4), jobs, options=options)
    assert result_of(result.jobs[1]) is True
    assert result_of(result.jobs[1], 1) == str(trace_file)
    assert f"`vllm-moe-lightning trace {trace_file} --live` shows the last sweeps" in result.log

    trace = read_chrome_trace(trace_file)
    sweeps = [sweep for sweep in trace.sweeps if not sweep.is_dummy]
    assert [sweep.num_micro_batches for sweep in sweeps] == [2] * len(sweeps)
    command = CliRunner().invoke(app, ["trace", str(trace_file), "--output", str(output)], env={"COLUMNS": "400"})
    assert command.exit_code == 0, command.output
    summary = json.loads((output / "summary.json").read_text())
    assert summary["sweeps"] == len(sweeps)
    assert summary["busiest"] == "h2d"  # 2.3 MB over a link of 0.2 GB/s: 12 ms a sweep
    assert 0 < summary["bytes_per_busy_s"]["h2d"] < 0.21e9
    idle = 1 - summary["busy"]["h2d"]
    assert sum(bubble["share"] for bubble in summary["bubbles"]) == pytest.approx(idle, abs=1e-6)
    assert summary["sentence"] in command.output
    assert "H2D link" in summary["sentence"]
    copy = read_chrome_trace(output / "trace.json")
    assert copy.source == trace.source
    assert [span.label for span in copy.spans] == [span.label for span in trace.spans]
    for name in ("sweep.png", "layer.png"):
        assert (output / name).read_bytes().startswith(b"\x89PNG")
