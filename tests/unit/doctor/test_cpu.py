# SPDX-License-Identifier: Apache-2.0
"""What doctor says of CPUs, their quota, OpenMP's threads and memory nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.host_root import machine
from vllm_moe_lightning.doctor import cpu
from vllm_moe_lightning.doctor.finding import State


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda pid: set(range(8)))


def nodes(count: int) -> dict[str, str]:
    each = 8 // count
    return {f"sys/devices/system/node/node{n}/cpulist": f"{n * each}-{n * each + each - 1}" for n in range(count)}


def quota(cpus: int) -> dict[str, str]:
    return {"sys/fs/cgroup/cpu.max": f"{cpus * 100000} 100000"}


def test_all_cpus_of_the_mask_are_ok(tmp_path: Path) -> None:
    finding = cpu.threads(machine(tmp_path))
    assert finding.state is State.OK
    assert "8 usable" in finding.found


def test_a_quota_below_the_mask_is_a_warning_that_says_how_to_bind(tmp_path: Path) -> None:
    finding = cpu.threads(machine(tmp_path, quota(3)))
    assert finding.state is State.WARNING
    assert "quota of 3" in finding.found
    assert "taskset -c 0-2" in finding.cure


def test_one_cpu_is_a_warning(tmp_path: Path) -> None:
    assert "share it" in cpu.threads(machine(tmp_path, quota(1))).found


@pytest.mark.parametrize(
    ("environment", "state"),
    [
        ({"OMP_NUM_THREADS": "64"}, State.OK),  # vLLM sets another
        ({"OMP_NUM_THREADS": "64", cpu.BIND_VARIABLE: "nobind"}, State.WARNING),
        ({"OMP_NUM_THREADS": "8", cpu.BIND_VARIABLE: "nobind"}, State.OK),
        ({cpu.BIND_VARIABLE: "nobind"}, State.OK),
    ],
)
def test_openmp_threads_count_where_vllm_does_not_bind_them(
    tmp_path: Path, environment: dict[str, str], state: State
) -> None:
    assert cpu.openmp(environment, machine(tmp_path)).state is state


@pytest.mark.parametrize(
    ("value", "num_ranks", "words"),
    [
        (None, 2, "there are 1"),
        ("0-3", 2, "has 1 lists"),
        ("0-3|4-9", 2, "names CPUs [8, 9]"),
        ("all", 1, "no list of CPUs"),
    ],
)
def test_a_binding_that_ends_the_worker_is_named(tmp_path: Path, value: str | None, num_ranks: int, words: str) -> None:
    environment = {} if value is None else {cpu.BIND_VARIABLE: value}
    finding = cpu.binding(num_ranks, environment, machine(tmp_path, nodes(1)))
    assert finding.state is State.FAIL
    assert words in finding.found
    assert finding.cure


@pytest.mark.parametrize(
    ("environment", "num_ranks", "num_nodes"),
    [
        ({}, 1, 1),
        ({}, 2, 2),
        ({cpu.PRETENDS_NODES: "1"}, 2, 1),
        ({cpu.BIND_VARIABLE: "nobind"}, 2, 1),
        ({cpu.BIND_VARIABLE: "0-3|4-7"}, 2, 1),
    ],
)
def test_a_binding_that_vllm_can_make_is_ok(
    tmp_path: Path, environment: dict[str, str], num_ranks: int, num_nodes: int
) -> None:
    assert cpu.binding(num_ranks, environment, machine(tmp_path, nodes(num_nodes))).state is State.OK


def test_several_nodes_are_tried_with_a_real_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu.memory_nodes(machine(tmp_path / "one", nodes(1))).found == "1"
    root = machine(tmp_path / "two", nodes(2))
    asked: list[tuple[int, list[int]]] = []
    monkeypatch.setattr(cpu, "interleave", lambda address, size, nodes: asked.append((size, nodes)))
    assert cpu.memory_nodes(root).state is State.OK
    assert [nodes for _, nodes in asked] == [[0, 1]]

    def forbidden(address: int, size: int, nodes: list[int]) -> None:
        raise OSError(1, "mbind over nodes [0, 1]: Operation not permitted")

    monkeypatch.setattr(cpu, "interleave", forbidden)
    finding = cpu.memory_nodes(root)
    assert finding.state is State.WARNING
    assert "SYS_NICE" in finding.cure
