"""What this process may take of its host: memory, locked memory and CPUs, as the kernel and cgroups v1 and v2 say.

Pure reading of /proc and /sys; decides nothing. `root` stands before every path, so that tests can bring their own.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from vllm_moe_lightning.hardware import HostLimits

ROOT = Path("/")
# cgroup v1 has no word for "no limit": it says the largest page-aligned number.
V1_UNLIMITED_BYTES = 1 << 60
# Of a node's memory, what is free or holds nothing but copies of files.
RECLAIMABLE = frozenset({"MemFree", "Active(file)", "Inactive(file)", "SReclaimable"})
IN_MEMORY = frozenset({"tmpfs", "ramfs"})


@dataclass(frozen=True)
class Mount:
    root: PurePosixPath
    """The folder of the file system that is mounted: in a container often not its top."""
    point: PurePosixPath
    file_system: str
    options: frozenset[str]
    """Of the file system: for cgroup v1 these name the controllers."""


def host_limits(root: Path = ROOT) -> HostLimits:
    return HostLimits(cgroup_memory_bytes=cgroup_memory_bytes(root), memlock_bytes=memlock_bytes())


def memlock_bytes() -> int | None:
    """What may be locked, and so pinned for copies. None: no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def total_memory_bytes(root: Path = ROOT) -> int:
    return meminfo_bytes("MemTotal", root)


def meminfo_bytes(name: str, root: Path = ROOT) -> int:
    """A line of /proc/meminfo, as MemTotal or SwapFree. Raises ValueError where it has none of that name."""
    for line in (root / "proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise ValueError(f"{root / 'proc/meminfo'} has no {name} line; is this Linux?")


def cgroup_memory_bytes(root: Path = ROOT) -> int | None:
    """The lowest memory limit of our cgroups, their parents included. None: no limit."""
    limits: list[int] = []
    for folder in _cgroup_folders("memory", root):
        for file in ("memory.max", "memory.limit_in_bytes"):  # v2, v1; a folder has one of them
            words = _words(folder / file)
            if words and words[0] != "max" and int(words[0]) < V1_UNLIMITED_BYTES:
                limits.append(int(words[0]))
    return min(limits, default=None)


def available_memory_bytes(num_nodes: int | None = None, root: Path = ROOT) -> int:
    """What could be taken now without pushing anybody out: the kernel's estimate, and what our cgroups have left.

    num_nodes: only that many NUMA nodes will be used, the emptiest; None: all.
    """
    available = [meminfo_bytes("MemAvailable", root)]
    if num_nodes is not None and (nodes := sorted(_available_bytes_by_node(root), reverse=True)):
        available.append(sum(nodes[:num_nodes]))
    for folder in _cgroup_folders("memory", root):
        limit = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes")
        used = _words(folder / "memory.current") or _words(folder / "memory.usage_in_bytes")
        if limit and used and limit[0] != "max":
            words = _words(folder / "memory.stat")
            stat = dict(zip(words[::2], words[1::2], strict=True))
            # v1 has the groups below under a prefix.
            cached = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            available.append(int(limit[0]) - int(used[0]) + cached)
    return max(0, min(available))


def _available_bytes_by_node(root: Path) -> Iterator[int]:
    """Lines as `Node 0 MemFree: 13682340 kB`. Nothing where the kernel knows of no nodes."""
    for file in root.glob("sys/devices/system/node/node*/meminfo"):
        lines = [line.split() for line in file.read_text().splitlines()]
        yield sum(int(words[3]) * 1024 for words in lines if words[2].rstrip(":") in RECLAIMABLE)


def cgroup_cpus(root: Path = ROOT) -> float | None:
    """CPU seconds per second that our cgroups allow. None: no limit."""
    quotas: list[float] = []
    for folder in _cgroup_folders("cpu", root):
        words = _words(folder / "cpu.max") or [
            *_words(folder / "cpu.cfs_quota_us"),
            *_words(folder / "cpu.cfs_period_us"),
        ]
        if len(words) == 2 and words[0] not in ("max", "-1"):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def usable_cpus(root: Path = ROOT) -> int:
    """CPUs that threads of ours run on at a time: the affinity mask (which follows the cpuset), and the CPU quota."""
    in_mask = len(os.sched_getaffinity(0))
    quota = cgroup_cpus(root)
    return in_mask if quota is None else max(1, min(in_mask, math.ceil(quota)))


def file_system_of(folder: Path, root: Path = ROOT) -> str:
    """Its type, as ext4 or tmpfs."""
    place = PurePosixPath(folder.resolve())
    above = [mount for mount in _mounts(root) if place.is_relative_to(mount.point)]
    # Of two mounts at one place the later one covers the other.
    return max(enumerate(above), key=lambda entry: (len(entry[1].point.parts), entry[0]))[1].file_system


def cpu_name(root: Path = ROOT) -> str:
    file = root / "proc/cpuinfo"
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:  # not there, or not for us
        return []


def _mounts(root: Path) -> list[Mount]:
    """Lines as `31 23 0:28 /docker/a1 /sys/fs/cgroup rw,relatime shared:9 - cgroup cgroup rw,memory`."""
    mounts = []
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        shown, point = before.split()[3:5]
        file_system, _, options = after.split(maxsplit=2)
        point = point.replace("\\040", " ")
        mounts.append(Mount(PurePosixPath(shown), PurePosixPath(point), file_system, frozenset(options.split(","))))
    return mounts


def _cgroup_folders(controller: str, root: Path) -> Iterator[Path]:
    """Our cgroup's folder and its parents', as far as they are mounted, under v1, v2 or both of them at once."""
    path_of: dict[str, str] = {}
    memberships = root / "proc/self/cgroup"
    if not memberships.exists():
        return
    for line in memberships.read_text().splitlines():
        _, controllers, path = line.split(":", maxsplit=2)
        path_of |= dict.fromkeys(controllers.split(","), path)  # v2 has an empty list of controllers
    for mount in _mounts(root):
        if mount.file_system == "cgroup2":
            member = path_of.get("")
        elif mount.file_system == "cgroup" and controller in mount.options:
            member = path_of.get(controller)
        else:
            continue
        if member is None:
            continue
        ours = PurePosixPath(member)
        # Without a cgroup namespace a container sees its own path, of which the mount shows the last part.
        inside = ours.relative_to(mount.root) if ours.is_relative_to(mount.root) else PurePosixPath()
        top = root / mount.point.relative_to("/")
        yield from (top / part for part in (inside, *inside.parents))
