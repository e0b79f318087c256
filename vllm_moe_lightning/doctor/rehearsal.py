"""Runs the rehearsed start (integration/rehearsal.py) in a process of its own, and turns its end into findings.

So a vLLM that cannot be imported, crashes or hangs is one line of the diagnosis.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from vllm_moe_lightning.doctor.finding import Finding, State, will_fail
from vllm_moe_lightning.doctor.question import Question, StartFacts

MODULE = "vllm_moe_lightning.integration.rehearsal"
TIMEOUT_S = 180.0
VLLM_POINTS_AT_LOG = "check the logs"


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Of the rehearsal's answer, one of: what it does next, a finding, facts."""

    step: str | None = None
    finding: Finding | None = None
    facts: StartFacts | None = None


LAST_STEP = "end"


class Rehearsal:
    """A context manager: the process runs from its beginning, and never longer than to its end."""

    def __init__(self, question: Question, module: str = MODULE) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="vllm-moe-lightning-doctor-")
        folder = Path(self._scratch.name)
        self._answer, self._log = folder / "answer", folder / "log"
        (folder / "question").write_bytes(msgspec.json.encode(question))
        # Not from the current folder, where a checkout of vLLM may lie: the `vllm` command does not look there either.
        command = [sys.executable, "-P", "-m", module, str(folder / "question"), str(self._answer)]
        quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **quiet},
                start_new_session=True,  # with the processes that vLLM starts to look at model classes
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()
        self._scratch.cleanup()

    def _end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def answer(self, timeout_s: float = TIMEOUT_S) -> tuple[list[Finding], StartFacts]:
        """Waits. An end before its time is a finding that names what it was at."""
        is_late = False
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            is_late = True
            self._end()
        raw = self._answer.read_bytes() if self._answer.exists() else b""
        # A line that was cut off by the end has no newline.
        lines = [msgspec.json.decode(line, type=Line) for line in raw.splitlines(True) if line.endswith(b"\n")]
        findings = [self._with_reason(line.finding) for line in lines if line.finding is not None]
        facts = next((line.facts for line in reversed(lines) if line.facts is not None), StartFacts())
        step = next((line.step for line in reversed(lines) if line.step is not None), "start Python")
        if step != LAST_STEP:
            how = f"no end after {timeout_s:.0f} s" if is_late else self._last_words()
            cure = "see `python -c 'import torch, vllm'` for the whole message; reinstall what it names"
            findings.append(will_fail(step, how, cure))
        return findings, facts

    def _with_reason(self, finding: Finding) -> Finding:
        """Where vLLM points at its log, which nobody sees, the last error in it is added."""
        errors = re.findall(r"\w+Error: .+", self._log.read_text(errors="replace"))
        if errors and finding.state is State.FAIL and VLLM_POINTS_AT_LOG in finding.found:
            return msgspec.structs.replace(finding, found=f"{finding.found} {errors[-1]}")
        return finding

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        code = self._process.returncode
        ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return f"{ended}: {said[-1]}" if said else ended
