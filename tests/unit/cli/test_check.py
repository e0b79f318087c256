# SPDX-License-Identifier: Apache-2.0
"""`check` on a terminal: findings, one verdict line, and an exit status; with engines that are made up."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.unit.test_parity import OURS, STOCK
from vllm_moe_lightning.cli.app import app
from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.integration import parity_run
from vllm_moe_lightning.parity import CheckReport, EngineAnswers, judge

SETTINGS = {"model": "m", "layers": 2, "layers_of_model": 8, "dtype": "float32", "prompts": 2, "prompt_tokens": 300}


def run(monkeypatch: pytest.MonkeyPatch, outcome: EngineAnswers | Exception, *arguments: str) -> Result:
    """`outcome`: what our engine answers, or what `check` raises."""

    def check(request: Any, scratch: Path, progress: Any) -> CheckReport:
        if isinstance(outcome, Exception):
            raise outcome
        return CheckReport(judge(STOCK, outcome), {**SETTINGS, "max_tokens": request.max_tokens}, STOCK, outcome)

    monkeypatch.setattr(parity_run, "check", check)
    return CliRunner().invoke(app, ["check", "--model", "m", *arguments], env={"COLUMNS": "400"})


def test_right_answers_end_with_pass_and_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours = replace(OURS, stats={**(OURS.stats or {}), "device": "emulated", "steps": {"decode x3": 4}})
    result = run(monkeypatch, ours, "--tokens", "5", "--json", str(tmp_path / "new" / "check.json"))
    assert result.exit_code == 0, result.output
    assert "m: 2 of 8 layers, float32; 2 prompts of 300 tokens in all, 5 tokens generated for each" in result.output
    assert "decode x3: 4" in result.output
    last = result.output.splitlines()[-1]
    assert last.startswith("PASS: experts held: ")
    assert last.endswith("(device: emulated)")
    assert json.loads((tmp_path / "new" / "check.json").read_text())["verdict"] in last


def test_wrong_answers_end_with_fail_and_1(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, replace(OURS, token_ids=[[1, 9, 3], [4, 5, 6]]))
    assert result.exit_code == 1
    assert "WRONG tokens: 1 of 2 answers differ" in result.output
    assert result.output.splitlines()[-1].startswith("FAIL: tokens: 1 of 2 answers differ")


@pytest.mark.parametrize(("error", "status"), [(ValueError("no such model"), 2), (UnsupportedError("quantised"), 1)])
def test_what_cannot_be_checked_is_said_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    result = run(monkeypatch, error)
    assert result.exit_code == status
    assert str(error) in result.output
