# SPDX-License-Identifier: Apache-2.0
"""A start that is rehearsed in a process of its own: whatever becomes of it is a finding."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_moe_lightning.doctor.finding import State, findings_of, ok, refusal, will_fail, worst_of
from vllm_moe_lightning.doctor.question import Question
from vllm_moe_lightning.doctor.rehearsal import Rehearsal
from vllm_moe_lightning.errors import UnsupportedError

SAYING = """
import sys, time
question, answer = sys.argv[1:]
def say(line):
    with open(answer, "a") as file:
        file.write(line)
say('{"step": "import torch"}\\n{"finding": {"name": "torch", "state": "ok", "found": "2.13"}}\\n')
say('{"facts": {"dtype": "bfloat16"}}\\n{"step": "import vLLM"}\\n')
"""


@pytest.fixture
def rehearse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`rehearse(code)`: what comes of a child that runs SAYING and then the code."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))

    def rehearse(code: str, timeout_s: float = 60.0):
        (tmp_path / "a_rehearsal.py").write_text(SAYING + code)
        with Rehearsal(Question(model="x"), module="a_rehearsal") as rehearsal:
            return rehearsal.answer(timeout_s)

    return rehearse


def test_an_end_in_order_gives_findings_and_facts(rehearse) -> None:
    findings, facts = rehearse("""say('{"step": "end"}\\n')""")
    assert [finding.name for finding in findings] == ["torch"]
    assert facts.dtype == "bfloat16"


def test_an_exception_is_a_finding_named_after_its_step(rehearse) -> None:
    findings, facts = rehearse("raise RuntimeError('operator torchvision::nms does not exist')")
    assert [finding.state for finding in findings] == [State.OK, State.FAIL]
    assert findings[1].name == "import vLLM"
    assert findings[1].found == "ended with status 1: RuntimeError: operator torchvision::nms does not exist"
    assert facts.dtype == "bfloat16"


def test_a_signal_is_a_finding(rehearse) -> None:
    findings, _ = rehearse("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert findings[-1].found == "ended by SIGILL"


def test_a_hang_is_ended_and_a_finding(rehearse) -> None:
    findings, _ = rehearse("time.sleep(600)", timeout_s=1.0)
    assert findings[-1].name == "import vLLM"
    assert "no end after 1 s" in findings[-1].found


def test_a_line_that_was_cut_off_is_left_out(rehearse) -> None:
    findings, _ = rehearse("""say('{"finding": {"name": ')""")
    assert [finding.name for finding in findings] == ["torch", "import vLLM"]


def test_the_error_in_a_log_that_nobody_sees_is_added(rehearse) -> None:
    findings, _ = rehearse(
        "print('ERROR [registry.py:1120] ModuleNotFoundError: No module named x');"
        """say('{"finding": {"name": "c", "state": "will fail", "found": "Please check the logs."}}\\n')"""
    )
    assert findings[1].found == "Please check the logs. ModuleNotFoundError: No module named x"


def test_leaving_early_ends_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "a_rehearsal.py").write_text("import time; time.sleep(600)")
    with Rehearsal(Question(model="x"), module="a_rehearsal") as rehearsal:
        process = rehearsal._process
        assert process.poll() is None
    assert process.poll() is not None


def test_a_check_that_cannot_look_is_a_finding() -> None:
    def unreadable() -> None:
        raise PermissionError(13, "Permission denied", "/proc/meminfo")

    (finding,) = findings_of("swap", unreadable)
    assert finding.state is State.WARNING
    assert "/proc/meminfo" in finding.found


def test_the_cure_of_a_refusal_is_its_last_clause() -> None:
    finding = refusal("device", UnsupportedError("no, not so; not yet; drop --worker-cls"))
    assert (finding.found, finding.cure) == ("no, not so; not yet", "drop --worker-cls")
    assert refusal("device", UnsupportedError("no")).found == "no"


def test_the_worst_state_counts() -> None:
    fine, bad = ok("a", "b"), will_fail("a", "b", "c")
    assert worst_of([fine, bad, fine]) is State.FAIL
    assert worst_of([fine]) is State.OK
    assert worst_of([]) is State.OK
