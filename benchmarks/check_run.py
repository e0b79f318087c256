"""A run of many parts that brings home what it can: each part by itself, against a deadline, in a file that is written
again and again.

What a part is, what it costs and in which order they come is the caller's (gpu_check.py).
"""

from __future__ import annotations

import faulthandler
import gc
import json
import math
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from rich.console import Console

from vllm_moe_lightning.errors import DeviceStalledError

Value = TypeVar("Value")
Row = dict[str, Any]

TRACEBACK_LINES = 12
MOST_CHARACTERS = 2000
"""Of an error's text: some compilers print all that they know."""
LOST_AFTER_S = 20.0
"""A GPU that has not come to an end of what it was given by then will not."""


@dataclass(frozen=True)
class Attempt(Generic[Value]):
    """What a part gave; or why it gave nothing: `failure` if it was run, `not_run` if it was not."""

    value: Value | None = None
    failure: Row | None = None
    """{"error": one text for each exception of the chain, first to last, "traceback": its last lines}"""
    not_run: str | None = None

    @property
    def why(self) -> str | None:
        """In one line; None: it went well."""
        if self.failure is None:
            return self.not_run
        first, *_, last = [text.splitlines()[0] for text in [self.failure["error"][0], *self.failure["error"]]]
        return last if first == last else f"{last} (after {first})"


@dataclass
class CheckRun:
    """path: of the JSON. deadline_s: from now on, for what is optional. on_gpu: whether an error may be of the kind
    after which CUDA does nothing more in this process."""

    path: Path
    console: Console
    deadline_s: float
    on_gpu: bool
    result: Row = field(default_factory=dict)
    lost: str | None = None
    """Why the device is of no more use in this process."""

    def __post_init__(self) -> None:
        self._started_s = time.monotonic()
        self.result |= {"status": "running", "stages": {}, "dropped": {}, "failed": [], "checks": {}}

    @property
    def left_s(self) -> float:
        return self._started_s + self.deadline_s - time.monotonic()

    def has_time_for(self, name: str, expected_s: float, reserve_s: float = 0.0) -> bool:
        """If not, it is dropped, and the result says so. reserve_s: held back for later parts."""
        if self.left_s >= expected_s + reserve_s:
            return True
        held = f", {reserve_s:.0f} s of them held back for later parts" if reserve_s else ""
        why = f"it takes about {expected_s:.0f} s, and {max(0.0, self.left_s):.0f} s were left{held}"
        self.result["dropped"][name] = why
        self.console.print(f"{name}: dropped, {why}", markup=False)
        return False

    def stage(
        self,
        name: str,
        function: Callable[[], Value],
        *,
        optional_s: float | None = None,
        needs_device: bool = True,
    ) -> Value | None:
        """What the function returns; None if it failed or was not run. optional_s: it is dropped where the deadline is
        nearer than that; None: it never is."""
        entry: Row = {"status": "running"}
        self.result["stages"][name] = entry
        if optional_s is not None and not self.has_time_for(name, optional_s):
            entry |= {"status": "not run", "reason": f"dropped: {self.result['dropped'][name]}"}
            self.write()
            return None
        self.console.print(f"{name} ...")
        self.write()
        started_s = time.monotonic()
        attempt = self.attempt(function, needs_device=needs_device)
        entry["seconds"] = time.monotonic() - started_s
        if attempt.not_run is not None:
            entry |= {"status": "not run", "reason": attempt.not_run}
            self.fail(name, f"not run: {attempt.not_run}")
        elif attempt.failure is not None:
            entry |= {"status": "failed", **attempt.failure}
            self.fail(name, attempt.why or "")
        else:
            entry["status"] = "ok"
        self._let_go()
        self.write()
        return attempt.value

    def fail(self, name: str, why: str) -> None:
        self.result["failed"].append(f"{name}: {why}")
        self.console.print(f"FAILED {name}: {why}", markup=False)

    def attempt(self, function: Callable[[], Value], *, needs_device: bool = True) -> Attempt[Value]:
        if needs_device and self.lost is not None:
            return Attempt(not_run=self.lost)
        try:
            return Attempt(function())
        except Exception as error:  # whatever it is: the run has minutes on a rented machine, and other parts to show
            failure = _told(error)
            stalled = any(isinstance(each, DeviceStalledError) for each in _chain(error))
        if self.lost is None:
            self.lost = "the device has stalled" if stalled else self._lost_cuda()
        self._let_go()  # out here nothing holds the failed part's frames any more, and so its memory
        return Attempt(failure=failure)

    def check(
        self, group: str, name: str, error_of: Callable[[], float], limit: float, *, needs_device: bool = True
    ) -> None:
        """A row of a table of checks: an error against its limit."""
        attempt = self.attempt(error_of, needs_device=needs_device)
        row: Row = {"check": name, "limit": limit}
        if attempt.value is None:
            row |= {"ok": False, "why": attempt.why, "failure": attempt.failure}
            self.fail(name, attempt.why or "")
        else:
            row |= {"ok": attempt.value <= limit, "error": attempt.value}
            if not row["ok"]:
                self.fail(name, f"{attempt.value:.2g}, allowed {limit:g}")
        self.result["checks"].setdefault(group, []).append(row)
        self.write()

    def write(self) -> None:
        """All at once: whoever ends this process finds what was there before, or what is there now."""
        self.result["elapsed_s"] = time.monotonic() - self._started_s
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(_finite(self.result), indent=2) + "\n")
        os.replace(beside, self.path)

    def _let_go(self) -> None:
        """What a part had on the GPU: the next one asks the driver what is free."""
        gc.collect()
        if self.on_gpu and self.lost is None:
            torch.cuda.empty_cache()

    def _lost_cuda(self) -> str | None:
        """After an error, by a new event: it fails with every error that outlasts the call which it came from."""
        if not self.on_gpu:
            return None
        try:
            event, end_s = torch.cuda.Event(), time.monotonic() + LOST_AFTER_S
            event.record()
            while not event.query():
                if time.monotonic() >= end_s:
                    return f"the GPU did not finish within {LOST_AFTER_S:.0f} s of an error"
                time.sleep(0.01)
        except RuntimeError as error:  # of torch's, for any error of CUDA's
            return f"CUDA does nothing more in this process: {str(error).splitlines()[0]}"
        return None


def end_in_time(seconds: float, path: Path) -> None:
    """Ends the process with 1 after so long, whatever hangs, with every thread's stack in a file. What CheckRun wrote
    says which part it was. By a thread of the interpreter's own, which needs no GIL."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=path.open("w"))


def _told(error: BaseException) -> Row:
    chain = _chain(error)
    lines = "".join(traceback.format_exception(error)).splitlines()
    return {
        "error": [f"{type(each).__name__}: {each}"[:MOST_CHARACTERS] for each in chain],
        "traceback": [line[:MOST_CHARACTERS] for line in lines[-TRACEBACK_LINES:]],
    }


def _chain(error: BaseException) -> list[BaseException]:
    """First to last."""
    chain = [error]
    while (before := _before(chain[0])) is not None and before not in chain:
        chain.insert(0, before)
    return chain


def _before(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _finite(value: Any) -> Any:
    """JSON has no NaN, and a wrong kernel may give one."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
