# SPDX-License-Identifier: Apache-2.0
"""benchmarks/check_run.py: what is left of a run when parts of it fail, hang or find no time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.check_run import MOST_CHARACTERS, CheckRun
from vllm_moe_lightning.errors import DeviceStalledError

MakeRun = Callable[..., CheckRun]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(deadline_s: float = 60.0, *, on_gpu: bool = False) -> CheckRun:
        return CheckRun(tmp_path / "check.json", Console(quiet=True), deadline_s, on_gpu)

    return make


def on_disk(run: CheckRun) -> dict[str, Any]:
    return json.loads(run.path.read_text())


def raising(error: BaseException) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


def test_a_stage_that_raises_leaves_its_text_and_traceback_and_the_next_one_runs(make_run: MakeRun) -> None:
    run = make_run()
    assert run.stage("first", raising(torch.OutOfMemoryError("CUDA out of memory: tried 9 GiB\nmore"))) is None
    assert run.stage("second", lambda: 7) == 7
    first, second = (on_disk(run)["stages"][name] for name in ("first", "second"))
    assert first["status"] == "failed"
    assert first["error"] == ["OutOfMemoryError: CUDA out of memory: tried 9 GiB\nmore"]
    assert any("in fail" in line for line in first["traceback"])
    assert second["status"] == "ok"
    assert on_disk(run)["failed"] == ["first: OutOfMemoryError: CUDA out of memory: tried 9 GiB"]


def test_what_was_raised_while_cleaning_up_does_not_hide_what_went_wrong_first(make_run: MakeRun) -> None:
    def fail() -> None:
        try:
            raise ValueError("the first one")
        finally:
            raise RuntimeError("closing " + 9000 * "x")

    run = make_run()
    run.stage("both", fail)
    [failed] = on_disk(run)["failed"]
    assert failed.startswith("both: RuntimeError: closing xx")
    assert failed.endswith("(after ValueError: the first one)")
    assert len(run.result["stages"]["both"]["error"][1]) == MOST_CHARACTERS


def test_the_file_says_which_stage_runs_while_it_does(make_run: MakeRun) -> None:
    run = make_run()
    run.stage("first", lambda: None)
    found = run.stage("second", lambda: on_disk(run))
    assert found is not None
    assert found["status"] == "running"
    assert [(name, entry["status"]) for name, entry in found["stages"].items()] == [
        ("first", "ok"),
        ("second", "running"),
    ]
    assert not run.path.with_suffix(".part").exists()


def test_past_the_deadline_optional_stages_are_dropped_and_others_run(make_run: MakeRun) -> None:
    run = make_run(deadline_s=5.0)
    assert run.stage("short", lambda: "run", optional_s=0.5) == "run"
    assert run.stage("long", lambda: "run", optional_s=50.0) is None
    assert run.stage("needed", lambda: "run") == "run"
    assert not run.has_time_for("round 2", 1.0, reserve_s=30.0)
    result = on_disk(run)
    assert result["stages"]["long"]["status"] == "not run"
    assert result["dropped"]["long"].startswith("it takes about 50 s, and ")
    assert run.result["dropped"]["round 2"].endswith("30 s of them held back for later parts")
    assert result["failed"] == []


def test_after_a_stall_what_needs_the_device_is_not_run_and_says_why(make_run: MakeRun) -> None:
    run = make_run()
    run.stage("stalls", raising(DeviceStalledError("waited 60 s")))
    assert run.stage("device", lambda: 1) is None
    assert run.stage("host", lambda: 1, needs_device=False) == 1
    run.check("group", "a check", lambda: 0.0, 1.0)
    run.check("group", "on the host", lambda: 0.0, 1.0, needs_device=False)
    result = on_disk(run)
    assert result["stages"]["device"] == result["stages"]["device"] | {
        "status": "not run",
        "reason": "the device has stalled",
    }
    assert result["checks"]["group"][0]["why"] == "the device has stalled"
    assert result["checks"]["group"][1]["ok"]
    assert [line.partition(":")[0] for line in result["failed"]] == ["stalls", "device", "a check"]


def test_after_an_error_of_cuda_that_stays_its_device_is_not_used_again(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Event:
        broken = False

        def record(self) -> None:
            if self.broken:
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with")

        def query(self) -> bool:
            return True

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    run = make_run(on_gpu=True)
    run.stage("refused", raising(ValueError("a wrong argument")))
    assert run.lost is None
    Event.broken = True
    run.stage("breaks", raising(torch.AcceleratorError("CUDA error: an illegal memory access was encountered")))
    assert run.lost == "CUDA does nothing more in this process: CUDA error: an illegal memory access was encountered"
    assert run.stage("device", lambda: 1) is None


def test_a_kernel_that_gives_no_number_is_wrong_and_the_file_stays_json(make_run: MakeRun) -> None:
    run = make_run()
    run.check("kernels", "wrong", lambda: float("nan"), 0.1)
    run.check("kernels", "raises", raising(RuntimeError("no kernel image")), 0.1)
    run.check("kernels", "right", lambda: 0.05, 0.1)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    rows = json.loads(run.path.read_text(), parse_constant=refuse)["checks"]["kernels"]
    assert [row["ok"] for row in rows] == [False, False, True]
    assert rows[0]["error"] == "nan"
    assert run.result["failed"] == ["wrong: nan, allowed 0.1", "raises: RuntimeError: no kernel image"]


def test_nobody_swallows_the_user_s_own_interrupt(make_run: MakeRun) -> None:
    run = make_run()
    with pytest.raises(KeyboardInterrupt):
        run.stage("interrupted", raising(KeyboardInterrupt()))
    assert on_disk(run)["stages"]["interrupted"]["status"] == "running"
