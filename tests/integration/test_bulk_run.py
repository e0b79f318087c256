# SPDX-License-Identifier: Apache-2.0
"""`vllm-moe-lightning run`, as `make demo` calls it: prompts in, texts, a table and a report out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.engine import ENVIRONMENT, ROOT

pytestmark = pytest.mark.integration
PROMPTS = ["ROMEO:\nO, she doth", "a line that ends in \\\\[/bold] and [red]brackets[/red]", "JULIET:\nGood"]


def test_a_job_answers_its_prompts_and_reports_what_moved(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    report_file, output_file = tmp_path / "out" / "report.json", tmp_path / "out" / "answers.jsonl"
    command = [str(Path(sys.executable).parent / "vllm-moe-lightning"), "run"]
    command += ["--model", str(ROOT / "examples/tiny-shakespeare-moe"), "--prompts", str(prompts), "--dtype", "float32"]
    command += ["--report", str(report_file), "--output", str(output_file), "--max-tokens", "8"]
    command += ["--page-mib", "0.5", "--device-memory-mib", "16", "--h2d-gb-per-s", "2", "--hardware", "t4"]
    command += ["--num-resident-layers", "0"]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}, timeout=300)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "moe_lightning, device: emulated" in result.stdout
    assert "brackets[/red]" in result.stdout

    answers = [json.loads(line) for line in output_file.read_text().split("\n") if line]
    assert [answer["prompt"] for answer in answers] == PROMPTS
    assert all(answer["text"] for answer in answers)

    report = json.loads(report_file.read_text())
    assert (report["device"], report["prompts"], report["generated_tokens"]) == ("emulated", 3, 24)
    assert report["refills"] == 1  # the first layer, before the first sweep
    assert report["pages_moved"] == report["sweeps"] * report["pages_per_sweep"] + report["pages_of_first_layer"]
    assert report["bytes_paged"] > report["sweeps"] * report["bytes_per_sweep"] > 0
    assert report["expert_bytes_on_device"] * 4 <= report["expert_bytes_on_host"]
    for share in ("link_busy", "cpu_attention_busy"):
        assert 0 < report[share] <= 1
    assert report["tokens_per_s"] > 0
    assert report["wait_s"] >= 0
    assert report["policy"]["schedule"] == "cgopipe"


def test_a_budget_that_is_too_small_ends_with_what_is_needed_and_what_there_is(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ROMEO:\n")
    command = [str(Path(sys.executable).parent / "vllm-moe-lightning"), "run", "--device-memory-mib", "2"]
    command += ["--hardware", "t4"]
    command += ["--model", str(ROOT / "examples/tiny-shakespeare-moe"), "--prompts", str(prompts)]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}, timeout=300)
    assert result.returncode == 1
    assert "no policy for tiny-shakespeare-moe fits" in result.stderr
    assert "need" in result.stderr
    assert "have" in result.stderr
    assert "device_memory_mib 2" in result.stderr
