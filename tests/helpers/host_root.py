# SPDX-License-Identifier: Apache-2.0
"""A folder that stands for / of a machine: /proc and /sys as far as a test wants them."""

from __future__ import annotations

from pathlib import Path

ROOT_MOUNT = "23 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw"
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"


def make_root(root: Path, mounts: list[str], memberships: str, files: dict[str, str]) -> Path:
    proc = root / "proc/self"
    proc.mkdir(parents=True)
    (proc / "mountinfo").write_text("\n".join(mounts) + "\n")
    (proc / "cgroup").write_text(memberships)
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content + "\n")
    return root


def meminfo(**kib: int) -> str:
    """/proc/meminfo with these lines, in KiB; 64 GiB, all of it free, and no swap where nothing is said."""
    lines = {"MemTotal": 64 << 20, "MemAvailable": 64 << 20, "SwapTotal": 0, "SwapFree": 0, **kib}
    return "\n".join(f"{name}:  {value} kB" for name, value in lines.items())


def machine(root: Path, files: dict[str, str] | None = None, **kib: int) -> Path:
    """An idle machine of one node, without limits."""
    usual = {
        "proc/meminfo": meminfo(**kib),
        "proc/version": "Linux version 6.1.0 (gcc 12) #1 SMP",
        "proc/sys/vm/overcommit_memory": "0",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    }
    return make_root(root, [ROOT_MOUNT, V2_MOUNT], "0::/\n", {**usual, **(files or {})})
