# SPDX-License-Identifier: Apache-2.0
"""`doctor` on the command line, with the examination itself replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from vllm_moe_lightning.cli import doctor as doctor_cli
from vllm_moe_lightning.doctor import examination
from vllm_moe_lightning.doctor.finding import Finding, ok, warning, will_fail
from vllm_moe_lightning.doctor.question import Question

APP = typer.Typer()
APP.command()(doctor_cli.doctor)
FINE = ok("shards", "19 whole", "")
SLOW = warning("disk", "reads 0.1 GB/s [nfs4]", "copy it", "10 min")
SHORT = will_fail("host memory", "needs 90 GiB", "a smaller --kv-cache-gib", "64 GiB available")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """`found["sections"]` is what comes out; `found["question"]` what was asked."""
    told: dict[str, Any] = {}

    def examine(question: Question) -> dict[str, list[Finding]]:
        told["question"] = question
        return told["sections"]

    monkeypatch.setattr(examination, "examine", examine)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")
    return told


def run(*arguments: str) -> Any:
    return CliRunner().invoke(APP, ["--model", "m", *arguments])


@pytest.mark.parametrize(
    ("findings", "code", "verdict"),
    [
        ([FINE], 0, "nothing found that would fail"),
        ([FINE, SLOW], 0, "warning: disk"),
        ([SHORT, FINE, SLOW], 1, "will fail: host memory; warning: disk"),
    ],
)
def test_only_what_will_fail_makes_the_exit_code_1(
    found: dict[str, Any], findings: list[Finding], code: int, verdict: str
) -> None:
    found["sections"] = {"all": findings}
    result = run()
    assert result.exit_code == code, result.output
    assert verdict in result.stdout
    for finding in findings:
        for cell in (finding.name, finding.state, finding.found, finding.limit, finding.cure):
            assert cell in result.stdout


def test_json_is_all_that_goes_to_stdout(found: dict[str, Any]) -> None:
    found["sections"] = {"model": [FINE], "memory": [SHORT]}
    result = run("--json")
    assert result.exit_code == 1
    shown = json.loads(result.stdout)
    assert shown["state"] == "will fail"
    assert shown["model"] == "m"
    assert shown["findings"][1] == {
        "section": "memory",
        "name": "host memory",
        "state": "will fail",
        "found": "needs 90 GiB",
        "limit": "64 GiB available",
        "cure": "a smaller --kv-cache-gib",
    }


def test_all_options_reach_the_examination(found: dict[str, Any]) -> None:
    found["sections"] = {}
    options = {
        "--dtype": "float32",
        "--max-model-len": "100",
        "--kv-cache-gib": "0.5",
        "--device-memory-mib": "6",
        "--tensor-parallel-size": "2",
    }
    assert run(*(word for option in options.items() for word in option)).exit_code == 0
    assert found["question"] == Question(
        model=str(Path("m")),
        dtype="float32",
        max_model_len=100,
        kv_cache_gib=0.5,
        device_memory_mib=6.0,
        tensor_parallel_size=2,
    )
    assert found["question"].options == {"kv_cache_gib": 0.5, "device_memory_mib": 6.0}
