# SPDX-License-Identifier: Apache-2.0
"""Which CPUs a rank's threads get: nobody's twice, wherever the rank was started."""

from __future__ import annotations

import pytest

from vllm_moe_lightning.integration import runtime
from vllm_moe_lightning.integration.peers import NodeRanks

FIRST, SECOND = (NodeRanks(index, (100, 101)) for index in (0, 1))
OWN, OF_PARENT = {0}, {0, 1, 2, 3}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch):
    """`started(is_cuda=..., by_vllm=..., own=...)`: a worker process with this affinity mask."""

    def started(*, is_cuda: bool = False, by_vllm: bool, own: set[int]) -> None:
        monkeypatch.setattr(runtime, "is_cuda", lambda: is_cuda)
        monkeypatch.setattr(runtime.multiprocessing, "parent_process", lambda: object() if by_vllm else None)
        monkeypatch.setattr(runtime.os, "sched_getaffinity", lambda pid: own if pid == 0 else OF_PARENT)

    return started


@pytest.mark.parametrize("is_cuda", [False, True], ids=["cpu", "cuda"])
def test_ray_actors_of_one_machine_share_its_cpus(is_cuda: bool, started) -> None:
    """Ray binds nobody."""
    started(is_cuda=is_cuda, by_vllm=False, own={0, 1, 2, 3})
    assert (runtime.stream_cpus(FIRST), runtime.stream_cpus(SECOND)) == ([0, 1], [2, 3])


def test_the_only_rank_of_a_machine_has_all_its_cpus(started) -> None:
    """However many ranks there are elsewhere."""
    started(by_vllm=False, own={0, 1, 2, 3})
    assert runtime.stream_cpus(NodeRanks(0, (100,))) == [0, 1, 2, 3]


def test_threads_stay_off_the_cpu_that_vllm_binds_the_rank_to(started) -> None:
    started(by_vllm=True, own=OWN)
    assert runtime.stream_cpus(FIRST) == [1, 2, 3]
    started(by_vllm=True, own=OF_PARENT)
    assert runtime.stream_cpus(FIRST) == [0, 1, 2, 3]
