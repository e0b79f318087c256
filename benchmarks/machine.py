"""What a benchmark ran on: its CPU, memory and the commit, for the head of its results."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from vllm_moe_lightning.host_limits import cpu_name, total_memory_bytes, usable_cpus

ROOT = Path(__file__).resolve().parents[1]
# Of the CPU's flags those that decide which attention kernels it can run.
VECTOR_FLAGS = ("avx", "amx", "fma", "f16c", "asimd", "sve")


def vector_flags() -> list[str]:
    """Of the first CPU; ARM's kernel says Features."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return sorted(flag for flag in flags.split() if flag.startswith(VECTOR_FLAGS))


def commit() -> str:
    if shutil.which("git") is None:  # a rented machine may have a copy and no git
        return ""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True).stdout.strip()
    return name + ("+changes" if changed else "")


def describe() -> dict[str, Any]:
    """As JSON values. Leaves out what tells one machine from another of its kind."""
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": cpu_name(),
        "isa_flags": vector_flags(),
        "num_cpus": usable_cpus(),
        "memory_gb": total_memory_bytes() / 1e9,
        "transparent_huge_pages": huge_pages.read_text().strip() if huge_pages.exists() else "none",
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "command": " ".join(["python", *(_relative(word) for word in sys.argv)]),
    }


def _relative(word: str) -> str:
    path = Path(word)
    return str(path.relative_to(ROOT)) if path.is_absolute() and path.is_relative_to(ROOT) else word
