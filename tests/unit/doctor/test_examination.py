# SPDX-License-Identifier: Apache-2.0
"""All sections together, with the rehearsed start replaced: faults at once, none hidden by another."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.host_root import machine
from vllm_moe_lightning.doctor import examination, software
from vllm_moe_lightning.doctor.examination import Sections, examine
from vllm_moe_lightning.doctor.finding import Finding, State, ok, will_fail
from vllm_moe_lightning.doctor.question import Question, StartFacts


class Start:
    """In place of the rehearsal."""

    answered: tuple[list[Finding], StartFacts] = ([ok("plan", "8 sequences")], StartFacts(is_cuda_build=False))

    def __init__(self, question: Question) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        pass

    def answer(self) -> tuple[list[Finding], StartFacts]:
        return self.answered


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(examination, "Rehearsal", Start)
    monkeypatch.setattr(software, "try_solver", lambda: "cvxpy 1, highspy 2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = machine(tmp_path / "root")
    (root / "dev/shm").mkdir(parents=True)
    return root


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", "mixtral", max_shard_size="200KB")


def by_state(sections: Sections, state: State) -> dict[str, Finding]:
    return {finding.name: finding for found in sections.values() for finding in found if finding.state is state}


def test_a_sound_machine_and_model_fail_nowhere(model: Path, root: Path) -> None:
    sections = examine(Question(model=str(model)), root)
    assert list(sections) == ["model", "memory", "disk", "CPU", "GPU", "software", "start"]
    assert not by_state(sections, State.FAIL)
    assert sections["start"][0].found == "8 sequences"


def test_faults_of_all_sections_are_named_at_once(
    model: Path, root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing, truncated, *_ = sorted(model.glob("model-*.safetensors"))
    missing.unlink()
    os.truncate(truncated, 1000)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/memory.max").write_text(str(1 << 20))
    (root / "sys/fs/cgroup/memory.current").write_text("0")
    (tmp_path / "cache").touch()
    monkeypatch.setenv("VLLM_PLUGINS", "")
    monkeypatch.setattr(Start, "answered", ([will_fail("vLLM's version", "0.31.2", "another")], StartFacts()))
    sections = examine(Question(model=str(model)), root)
    failures, warnings = by_state(sections, State.FAIL), by_state(sections, State.WARNING)
    assert set(failures) >= {"shards", "host memory", "VLLM_PLUGINS", "vLLM's version"}
    assert "the cgroup's 1 MiB" in failures["host memory"].limit
    assert "profile cache" in warnings
    shards = [finding.found for finding in sections["model"] if finding.name == "shards"]
    assert [missing.name in shards[0], truncated.name in shards[1]] == [True, True]


def test_a_model_that_cannot_be_read_leaves_the_machine_s_checks(root: Path, tmp_path: Path) -> None:
    sections = examine(Question(model=str(tmp_path / "nowhere")), root)
    assert set(by_state(sections, State.FAIL)) == {"config.json"}
    assert {"swap", "shared memory", "huge pages"} <= {finding.name for finding in sections["memory"]}


@pytest.mark.parametrize(
    ("facts", "question", "cache"),
    [
        (StartFacts(kv_bytes_per_rank=3 << 30), {"kv_cache_gib": 9.0}, "KV cache 6 GiB"),  # the plan's
        (StartFacts(), {"kv_cache_gib": 4.0}, "KV cache 8 GiB"),
    ],
)
def test_the_cache_of_all_ranks_counts(
    model: Path, root: Path, monkeypatch: pytest.MonkeyPatch, facts: StartFacts, question: dict[str, float], cache: str
) -> None:
    monkeypatch.setattr(Start, "answered", ([], facts))
    sections = examine(Question(model=str(model), tensor_parallel_size=2, **question), root)
    (host,) = [finding for finding in sections["memory"] if finding.name == "host memory"]
    assert cache in host.found
