"""Limits of memory and CPUs, from /proc and /sys as cgroup v1, v2, hybrids and containers show them."""

import resource
from pathlib import Path

import pytest

from tests.helpers.host_root import ROOT_MOUNT, V2_MOUNT, make_root
from vllm_moe_lightning import host_limits
from vllm_moe_lightning.hardware import GIB


def test_v2_takes_the_lowest_limit_of_the_groups_above_it(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/user.slice/memory.max": str(8 * GIB),
        "sys/fs/cgroup/user.slice/job.scope/memory.max": "max",
        "sys/fs/cgroup/user.slice/cpu.max": "150000 100000",
    }
    root = make_root(tmp_path, [ROOT_MOUNT, V2_MOUNT], "0::/user.slice/job.scope\n", files)
    assert host_limits.cgroup_memory_bytes(root) == 8 * GIB
    assert host_limits.cgroup_cpus(root) == 1.5


def test_v2_without_a_limit_says_none(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/a/memory.max": "max", "sys/fs/cgroup/a/cpu.max": "max 100000"}
    root = make_root(tmp_path, [V2_MOUNT], "0::/a\n", files)
    assert host_limits.cgroup_memory_bytes(root) is None
    assert host_limits.cgroup_cpus(root) is None


def test_v1_in_a_container_without_a_namespace_finds_its_group_at_the_mount(tmp_path: Path) -> None:
    mounts = [
        "40 31 0:32 /docker/a1 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
        "41 31 0:33 /docker/a1 /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
    ]
    memberships = "4:memory:/docker/a1\n3:cpu,cpuacct:/docker/a1\n"
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(4 * GIB),
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    root = make_root(tmp_path, mounts, memberships, files)
    assert host_limits.cgroup_memory_bytes(root) == 4 * GIB
    assert host_limits.cgroup_cpus(root) == 3.0


def test_v1_says_no_limit_with_a_huge_number_and_a_negative_quota(tmp_path: Path) -> None:
    mounts = ["40 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory", "41 31 0:33 / /c rw - cgroup c rw,cpu"]
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "c/cpu.cfs_quota_us": "-1",
        "c/cpu.cfs_period_us": "100000",
    }
    root = make_root(tmp_path, mounts, "4:memory:/\n3:cpu:/\n", files)
    assert host_limits.cgroup_memory_bytes(root) is None
    assert host_limits.cgroup_cpus(root) is None


def test_a_hybrid_reads_the_controller_where_it_is(tmp_path: Path) -> None:
    mounts = [
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
    ]
    files = {"sys/fs/cgroup/memory/api/memory.limit_in_bytes": str(2 * GIB)}
    root = make_root(tmp_path, mounts, "4:memory:/api\n0::/\n", files)
    assert host_limits.cgroup_memory_bytes(root) == 2 * GIB


def test_no_cgroups_at_all_is_no_limit(tmp_path: Path) -> None:
    assert host_limits.cgroup_memory_bytes(tmp_path) is None


def test_total_memory_is_read_from_meminfo(tmp_path: Path) -> None:
    file = tmp_path / "proc/meminfo"
    file.parent.mkdir()
    file.write_text("MemTotal:       24684092 kB\nMemFree:  1 kB\n")
    assert host_limits.total_memory_bytes(tmp_path) == 24684092 * 1024
    file.write_text("MemFree:  1 kB\n")
    with pytest.raises(ValueError, match="MemTotal"):
        host_limits.total_memory_bytes(tmp_path)


@pytest.mark.parametrize(("soft", "expected"), [(resource.RLIM_INFINITY, None), (8 << 20, 8 << 20)])
def test_locked_memory_without_a_limit_is_none(
    soft: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, resource.RLIM_INFINITY))
    assert host_limits.memlock_bytes() == expected


def test_a_cpu_quota_lowers_the_count_of_cpus_but_not_below_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_limits.os, "sched_getaffinity", lambda pid: set(range(8)))
    root = make_root(tmp_path, [V2_MOUNT], "0::/\n", {"sys/fs/cgroup/cpu.max": "250000 100000"})
    assert host_limits.usable_cpus(root) == 3
    (root / "sys/fs/cgroup/cpu.max").write_text("10000 100000")
    assert host_limits.usable_cpus(root) == 1
    (root / "sys/fs/cgroup/cpu.max").write_text("max 100000")
    assert host_limits.usable_cpus(root) == 8


def test_the_file_system_is_that_of_the_innermost_latest_mount(tmp_path: Path) -> None:
    mounts = [
        ROOT_MOUNT,
        "50 23 0:40 / /data rw - xfs /dev/vdb rw",
        "51 50 0:41 / /data/with\\040space rw - tmpfs tmpfs rw",
        "52 23 0:42 / /data rw - btrfs /dev/vdc rw",
    ]
    root = make_root(tmp_path, mounts, "", {})
    assert host_limits.file_system_of(Path("/data/with space/x"), root) == "tmpfs"
    assert host_limits.file_system_of(Path("/data/x"), root) == "btrfs"
    assert host_limits.file_system_of(Path("/elsewhere"), root) == "ext4"


def test_this_machine_has_believable_limits() -> None:
    assert host_limits.usable_cpus() >= 1
    assert host_limits.total_memory_bytes() > GIB
    limit = host_limits.host_limits().cgroup_memory_bytes
    assert limit is None or limit > 0


MEMINFO = "MemTotal:       1000 kB\nMemAvailable:    800 kB\n"


def test_available_memory_is_the_kernel_s_estimate(tmp_path: Path) -> None:
    root = make_root(tmp_path, [ROOT_MOUNT], "0::/\n", {"proc/meminfo": MEMINFO})
    assert host_limits.available_memory_bytes(root=root) == 800 * 1024


@pytest.mark.parametrize(
    ("mount", "memberships", "files"),
    [
        (
            V2_MOUNT,
            "0::/a\n",
            {
                "sys/fs/cgroup/a/memory.max": "500000",
                "sys/fs/cgroup/a/memory.current": "300000",
                "sys/fs/cgroup/a/memory.stat": "anon 200000\ninactive_file 60000",
            },
        ),
        (
            "40 31 0:32 / /cg rw - cgroup cgroup rw,memory",
            "4:memory:/a\n",
            {
                "cg/a/memory.limit_in_bytes": "500000",
                "cg/a/memory.usage_in_bytes": "300000",
                "cg/a/memory.stat": "inactive_file 1\ntotal_inactive_file 60000",
            },
        ),
    ],
    ids=["v2", "v1"],
)
def test_available_memory_is_what_a_group_has_left_with_its_file_cache(
    tmp_path: Path, mount: str, memberships: str, files: dict[str, str]
) -> None:
    root = make_root(tmp_path, [mount], memberships, {"proc/meminfo": MEMINFO, **files})
    assert host_limits.available_memory_bytes(root=root) == 500000 - 300000 + 60000


def test_with_fewer_nodes_only_the_emptiest_count(tmp_path: Path) -> None:
    files = {"proc/meminfo": MEMINFO}
    for node, free in enumerate((100, 300, 200)):
        lines = [f"MemTotal: {free} kB", f"MemFree: {free - 30} kB", "Active(file): 20 kB", "SReclaimable: 10 kB"]
        files[f"sys/devices/system/node/node{node}/meminfo"] = "\n".join(f"Node {node} {line}" for line in lines)
    root = make_root(tmp_path, [ROOT_MOUNT], "0::/\n", files)
    assert host_limits.available_memory_bytes(1, root) == 300 * 1024
    assert host_limits.available_memory_bytes(2, root) == 500 * 1024
    assert host_limits.available_memory_bytes(root=root) == 800 * 1024


def test_a_machine_without_nodes_has_what_the_kernel_says(tmp_path: Path) -> None:
    root = make_root(tmp_path, [ROOT_MOUNT], "0::/\n", {"proc/meminfo": MEMINFO})
    assert host_limits.available_memory_bytes(1, root) == 800 * 1024
