# SPDX-License-Identifier: Apache-2.0
"""`trace` without an engine: which options go together, a request to a running engine, and a job's own trace."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from vllm_moe_lightning.cli import trace as trace_cli
from vllm_moe_lightning.cli.app import app
from vllm_moe_lightning.integration import bulk_run
from vllm_moe_lightning.pipeline.trace import (
    SweepSpan,
    Trace,
    TraceSource,
    TraceSpan,
    request_file_of,
    write_chrome_trace,
)
from vllm_moe_lightning.resources import Resource

TRACE = Trace(
    TraceSource("emulated", "cgopipe", 2, (1,)),
    (SweepSpan(0.0, 1.0, 1),),
    (
        TraceSpan(Resource.GPU, "pre_attention(0,0)", 0.0, 0.1),
        TraceSpan(Resource.H2D, "weight_page(0,0)", 0.0, 0.9, 900),
        TraceSpan(Resource.GPU, "post_attention(0,0)", 0.9, 1.0),
    ),
)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["trace", *arguments], env={"COLUMNS": "400"})


def test_a_trace_file_is_summarised_in_one_sentence(tmp_path: Path) -> None:
    write_chrome_trace(tmp_path / "trace.json", TRACE)
    result = run(str(tmp_path / "trace.json"))
    assert result.exit_code == 0, result.output
    assert "bound by H2D link 90%; device compute 20%, CPU attention 0%, D2H link 0%; next best: " in result.output
    assert "1 sweeps in 1.00 s (device: emulated, schedule cgopipe)" in result.output
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give either a trace file, or --model"),
        (["t.json", "--model", "m"], "give either a trace file, or --model"),
        (["--model", "m"], "--model needs --prompts"),
        (["t.json", "--prompts", "p"], "--prompts are of a job"),
        (["no-such-file.json"], "no-such-file.json"),
    ],
)
def test_options_that_do_not_go_together_are_named(arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_a_running_engine_is_asked_and_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"

    def engine() -> None:
        while not request_file_of(file).exists():
            time.sleep(0.01)
        write_chrome_trace(file, TRACE)
        request_file_of(file).unlink()

    thread = threading.Thread(target=engine)
    thread.start()
    result = run(str(file), "--live")
    thread.join()
    assert result.exit_code == 0, result.output
    assert "bound by H2D link" in result.output


def test_without_a_running_engine_the_request_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_cli, "LIVE_TIMEOUT_S", 0.05)
    result = run(str(tmp_path / "trace.json"), "--live")
    assert result.exit_code == 1
    assert "none with trace_file" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_paged", [True, False])
def test_a_job_of_its_own_is_traced_unless_stock_vllm_ran_it(
    is_paged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = []

    def run_bulk_job(job: bulk_run.BulkJob, prompts: list[str], **more: Any) -> None:
        jobs.append((job, prompts))
        if is_paged:
            write_chrome_trace(Path(job.options["trace_file"]), TRACE)

    monkeypatch.setattr(bulk_run, "run_bulk_job", run_bulk_job)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    output = tmp_path / "out"
    arguments = ["--model", str(tmp_path), "--prompts", str(tmp_path / "prompts.txt"), "--output", str(output)]
    result = run(*arguments, "--steps", "5", "--options", '{"page_mib": 1}')
    ((job, prompts),) = jobs
    assert (job.max_tokens, job.options["page_mib"], prompts) == (5, 1, ["one", "two"])
    if is_paged:
        assert result.exit_code == 0, result.output
        assert json.loads((output / "summary.json").read_text())["busiest"] == "h2d"
    else:
        assert result.exit_code == 1
        assert "stock vLLM ran this job" in result.output
