# SPDX-License-Identifier: Apache-2.0
"""Which CPUs a rank's threads get: nobody's twice, wherever the rank was started, and those beside its GPU."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_moe_lightning import numa
from vllm_moe_lightning.device import cuda_runtime
from vllm_moe_lightning.integration import platform, runtime, thread_places
from vllm_moe_lightning.integration.peers import NodeRanks
from vllm_moe_lightning.integration.planning import measured_threads
from vllm_moe_lightning.integration.thread_places import attention_threads, stream_cpus

NO_GPUS = (None, None)
FIRST, SECOND = (NodeRanks(index, (100, 101), NO_GPUS) for index in (0, 1))
ALONE = NodeRanks(0, (100,), (None,))
OWN, OF_PARENT = {0}, {0, 1, 2, 3}
TWO_NODES = {0: "0-3,8-11", 1: "4-7,12-15"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch):
    """`started(is_cuda=..., by_vllm=..., own=...)`: a worker process with this affinity mask."""

    def started(*, is_cuda: bool = False, by_vllm: bool = False, own: set[int]) -> None:
        monkeypatch.setattr(thread_places, "is_cuda", lambda: is_cuda)
        monkeypatch.setattr(thread_places, "usable_cpus", lambda: len(own))
        monkeypatch.setattr(thread_places.multiprocessing, "parent_process", lambda: object() if by_vllm else None)
        monkeypatch.setattr(thread_places.os, "sched_getaffinity", lambda pid: own if pid == 0 else OF_PARENT)

    return started


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine of two sockets with eight CPUs each."""
    for node, cpus in TWO_NODES.items():
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    monkeypatch.setattr(thread_places, "cpus_beside_gpu", partial(numa.cpus_beside_gpu, root=tmp_path))
    monkeypatch.setattr(thread_places, "cpus_of_rank", partial(numa.cpus_of_rank, root=tmp_path))
    monkeypatch.setattr(runtime, "nodes_of", partial(numa.nodes_of, root=tmp_path))


@pytest.mark.parametrize("is_cuda", [False, True], ids=["cpu", "cuda"])
def test_ray_actors_of_one_machine_share_its_cpus(is_cuda: bool, started) -> None:
    """Ray binds nobody."""
    started(is_cuda=is_cuda, own={0, 1, 2, 3})
    assert (stream_cpus(FIRST), stream_cpus(SECOND)) == ([0, 1], [2, 3])


def test_the_only_rank_of_a_machine_has_all_its_cpus(started) -> None:
    """However many ranks there are elsewhere."""
    started(own={0, 1, 2, 3})
    assert stream_cpus(ALONE) == [0, 1, 2, 3]


def test_threads_stay_off_the_cpu_that_vllm_binds_the_rank_to(started) -> None:
    started(by_vllm=True, own=OWN)
    assert stream_cpus(FIRST) == [1, 2, 3]
    started(by_vllm=True, own=OF_PARENT)
    assert stream_cpus(FIRST) == [0, 1, 2, 3]


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize(
    ("gpu_nodes", "expected"),
    [
        ((1,), [[4, 5, 6, 7, 12, 13, 14, 15]]),
        ((None,), [list(range(16))]),
        ((0, 1), [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]),
        ((1, 1), [[4, 5, 6, 7], [12, 13, 14, 15]]),  # both at one socket, whatever their order says
        ((1, 0, 1), [[4, 5, 6, 7], [0, 1, 2, 3, 8, 9, 10, 11], [12, 13, 14, 15]]),
        ((1,) * 9, [[4], [4], [5], [6], [7], [12], [13], [14], [15]]),  # never none at all
    ],
)
def test_a_rank_has_its_share_of_the_cpus_beside_its_gpu(
    gpu_nodes: tuple[int | None, ...], expected: list[list[int]], started
) -> None:
    started(is_cuda=True, by_vllm=True, own=set(range(16)))
    pids = tuple(range(100, 100 + len(gpu_nodes)))
    assert [stream_cpus(NodeRanks(index, pids, gpu_nodes)) for index in range(len(pids))] == expected


@pytest.mark.usefixtures("two_nodes")
def test_where_none_of_those_may_be_used_others_are_and_the_log_says_so(
    started, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_places.logger, "propagate", True)
    started(is_cuda=True, own={0, 1, 2, 3})
    with caplog.at_level(logging.WARNING):
        assert stream_cpus(NodeRanks(1, (100, 101), (1, 1))) == [2, 3]
    [record] = caplog.records
    assert "the GPU hangs on memory node 1, none of whose CPUs this process may use" in record.getMessage()
    caplog.clear()
    started(is_cuda=True, own={3, 4})  # one of them is enough
    with caplog.at_level(logging.WARNING):
        assert stream_cpus(NodeRanks(0, (100,), (1,))) == [4]
    assert not caplog.records


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize(
    ("gpu_node", "cpus", "nodes"),
    [
        (1, [4, 5], [1]),
        (1, [0, 1], [0]),  # none beside the GPU: attention reads it where its threads are
        (None, [0, 4], [0, 1]),
        (None, [0, 1], None),  # no GPU: it stays where it was first touched
    ],
)
def test_the_kv_cache_is_bound_to_the_memory_beside_the_gpu(
    gpu_node: int | None, cpus: list[int], nodes: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[tuple[int, int, list[int]]] = []
    monkeypatch.setattr(runtime, "interleave", lambda *given: bound.append(given))
    layers = [SimpleNamespace(kv_cache=torch.zeros(size)) for size in (8, 16)]
    self = SimpleNamespace(_cpus=cpus, _gpu_node=gpu_node, _attention_layers=layers)
    runtime.Runtime._spread_kv_caches(self)
    expected = [(layer.kv_cache.data_ptr(), layer.kv_cache.nbytes, nodes) for layer in layers]
    assert bound == ([] if nodes is None else expected)


@pytest.mark.parametrize(
    ("given", "measured", "expected"),
    [
        (None, 0, 3),  # one CPU is the launcher's
        (None, 3, 3),
        (None, 2, 2),
        (None, 7, 3),  # there is no room for as many
        (2, 3, 2),
    ],
)
def test_attention_has_the_threads_that_it_was_measured_with_or_the_log_says_so(
    given: int | None,
    measured: int,
    expected: int,
    started,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thread_places.logger, "propagate", True)
    started(own={0, 1, 2, 3})
    with caplog.at_level(logging.WARNING):
        assert attention_threads(given, measured, [0, 1, 2, 3], ALONE) == expected
    told = [record.getMessage() for record in caplog.records]
    assert [f"{expected} threads on this rank and was measured with {measured}" in text for text in told] == (
        [] if measured in (0, expected) else [True]
    )


@pytest.mark.parametrize(
    ("hardware", "on_device", "expected"),
    [(None, False, 7), ("t4", False, 0), ("other.json", False, 0), (None, True, 0)],
)
def test_a_plan_says_what_was_measured_only_of_this_machine(
    hardware: str | None, on_device: bool, expected: int
) -> None:
    planned: Any = SimpleNamespace(
        plan=SimpleNamespace(attention_on_device=on_device), machine=SimpleNamespace(cpu=SimpleNamespace(num_threads=8))
    )
    assert measured_threads(hardware, planned) == expected


def test_the_node_of_the_gpu_is_asked_for_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_runtime, "TorchCuda", lambda: SimpleNamespace(numa_node=lambda: 1))
    for is_cuda, expected in ((False, None), (True, 1)):
        monkeypatch.setattr(platform, "is_cuda", lambda is_cuda=is_cuda: is_cuda)
        assert platform.gpu_memory_node() == expected
