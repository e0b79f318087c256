# SPDX-License-Identifier: Apache-2.0
"""What doctor says of the host's memory and of the limits on it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.host_root import V2_MOUNT, machine, make_root, meminfo
from vllm_moe_lightning.doctor import memory
from vllm_moe_lightning.doctor.finding import State
from vllm_moe_lightning.doctor.memory import GIB, Need
from vllm_moe_lightning.model_spec import AttentionSpec, MoeModelSpec

NEED = Need(weight_bytes=10 * GIB, pinned_bytes=9 * GIB, kv_bytes=2 * GIB, largest_shard_bytes=GIB)
SPEC = MoeModelSpec(
    name="tiny",
    model_type="mixtral",
    num_layers=2,
    num_dense_layers=0,
    hidden=64,
    vocab=100,
    num_experts=4,
    top_k=2,
    expert_intermediate=32,
    attention=AttentionSpec.grouped_query(64, 4, 2, 16),
)


@pytest.fixture
def lowered_memlock() -> Iterator[int]:
    """64 KiB, the default of old systems and of containers; the soft limit, so that it can be put back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = 65536
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, hard))
    yield limit
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def test_enough_memory_is_ok_and_says_need_and_have(tmp_path: Path) -> None:
    finding = memory.host_memory(NEED, root=machine(tmp_path))
    assert finding.state is State.OK
    assert "needs 12 GiB" in finding.found
    assert "up to 14.2 GiB" in finding.found
    assert finding.limit == "64 GiB available of 64 GiB"


def test_less_free_memory_than_needed_fails(tmp_path: Path) -> None:
    finding = memory.host_memory(NEED, root=machine(tmp_path, MemAvailable=11 << 20))
    assert finding.state is State.FAIL
    assert "11 GiB available of 64 GiB" in finding.limit
    assert "end other processes" in finding.cure


def test_memory_for_the_run_but_not_for_loading_is_a_warning(tmp_path: Path) -> None:
    finding = memory.host_memory(NEED, root=machine(tmp_path, MemAvailable=13 << 20))
    assert finding.state is State.WARNING


@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_below_the_need_is_named(tmp_path: Path, version: int) -> None:
    if version == 2:
        mounts, memberships = [V2_MOUNT], "0::/job\n"
        files = {"sys/fs/cgroup/job/memory.max": str(8 * GIB), "sys/fs/cgroup/job/memory.current": str(GIB)}
    else:
        mounts, memberships = ["40 31 0:32 / /cg rw - cgroup cgroup rw,memory"], "4:memory:/job\n"
        files = {"cg/job/memory.limit_in_bytes": str(8 * GIB), "cg/job/memory.usage_in_bytes": str(GIB)}
    root = make_root(tmp_path, mounts, memberships, {"proc/meminfo": meminfo(), **files})
    finding = memory.host_memory(NEED, root=root)
    assert finding.state is State.FAIL
    assert finding.limit == "7 GiB available of the cgroup's 8 GiB"
    assert "--memory" in finding.cure


def test_the_default_memlock_is_named_with_its_cure(lowered_memlock: int) -> None:
    finding = memory.locked_memory(NEED, on_gpu=True)
    assert finding.state is State.WARNING
    assert "may refuse to pin more" in finding.found
    assert "limit 64 KiB" in finding.found
    assert "9 GiB to pin" in finding.limit
    assert "ulimit -l unlimited" in finding.cure
    assert "memlock=-1" in finding.cure


def test_where_nothing_is_pinned_a_low_memlock_says_so(lowered_memlock: int) -> None:
    finding = memory.locked_memory(NEED, on_gpu=False)
    assert finding.state is State.WARNING
    assert "the emulated device pins nothing" in finding.found


@pytest.mark.parametrize("limit", [resource.RLIM_INFINITY, 10 * GIB])
def test_enough_memlock_is_ok(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert memory.locked_memory(NEED, on_gpu=True).state is State.OK


def test_swap_in_use_is_a_warning_and_a_little_is_not(tmp_path: Path) -> None:
    total = 16 << 20
    finding = memory.swap(machine(tmp_path / "used", SwapTotal=total, SwapFree=total - (5 << 20)))
    assert finding.state is State.WARNING
    assert "5 GiB in use" in finding.found
    assert memory.swap(machine(tmp_path / "idle", SwapTotal=total, SwapFree=total - 100)).state is State.OK


def test_a_small_dev_shm_fails_for_several_ranks_and_may_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker's default of 64 MiB, of which engines of other runs left 54 MiB."""

    class State64:
        f_frsize, f_blocks, f_bavail = 4096, (64 << 20) // 4096, (10 << 20) // 4096

    monkeypatch.setattr(memory.os, "statvfs", lambda folder: State64)
    ranks = memory.shared_memory(2, 16, tmp_path)
    assert ranks.state is State.FAIL
    assert "10 MiB free of 64 MiB" in ranks.found
    assert "--shm-size" in ranks.cure
    assert ranks.limit == "80 MiB for 2 ranks"
    assert memory.shared_memory(1, 16, tmp_path).state is State.WARNING


def test_strict_overcommit_fails_only_below_the_need(tmp_path: Path) -> None:
    strict = {"proc/sys/vm/overcommit_memory": "2"}
    short = machine(tmp_path / "short", strict, CommitLimit=20 << 20, Committed_AS=15 << 20)
    finding = memory.overcommit(NEED, short)
    assert finding.state is State.FAIL
    assert "5 GiB may still be asked for" in finding.found
    assert "vm.overcommit_memory=0" in finding.cure
    wide = machine(tmp_path / "wide", strict, CommitLimit=60 << 20, Committed_AS=15 << 20)
    assert memory.overcommit(NEED, wide).state is State.OK
    assert memory.overcommit(NEED, machine(tmp_path / "usual")).state is State.OK


def test_huge_pages_are_a_fact(tmp_path: Path) -> None:
    assert memory.huge_pages(machine(tmp_path / "a")).found.startswith("madvise")
    assert "no transparent" in memory.huge_pages(make_root(tmp_path / "b", [], "", {})).found


def test_the_need_counts_weights_and_the_cache_once() -> None:
    need = memory.need_of(SPEC, [100, 300], kv_bytes=5000.0, max_model_len=None, on_gpu=False)
    assert need.weight_bytes == SPEC.total_bytes
    assert need.after_bytes == SPEC.total_bytes + 5000
    assert need.pinned_bytes == SPEC.expert_bytes_total + 5000
    assert need.peak_bytes == pytest.approx(1.1 * need.after_bytes + 300)
    on_gpu = memory.need_of(SPEC, [300], kv_bytes=5000.0, max_model_len=None, on_gpu=True)
    assert on_gpu.weight_bytes == SPEC.expert_bytes_total


def test_without_a_plan_the_cache_holds_one_sequence() -> None:
    need = memory.need_of(SPEC, [], kv_bytes=None, max_model_len=1000, on_gpu=False)
    assert need.kv_bytes == 1000 * SPEC.kv_bytes_per_token


def test_of_an_unknown_family_the_files_count() -> None:
    need = memory.need_of(None, [100, 300], kv_bytes=None, max_model_len=None, on_gpu=False)
    assert need.weight_bytes == 400
