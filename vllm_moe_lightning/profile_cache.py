"""The measurement of this machine, kept in the user's cache directory: one file for each machine and set of limits.

A cache that can't be read or written costs a warning and the time to measure again, never the command.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from pathlib import Path

import msgspec

from vllm_moe_lightning.host_limits import ROOT, cgroup_memory_bytes, cpu_name, total_memory_bytes, usable_cpus
from vllm_moe_lightning.machine_readings import READINGS_VERSION, MeasuredMachine

FOLDER_NAME = "vllm-moe-lightning"
STALE_AFTER_S = 30 * 24 * 3600.0
"""Drivers, BIOS settings and neighbours change; a month is long."""


def fingerprint(root: Path = ROOT) -> str:
    """Of this machine and of what we may use of it: a home folder may be shared among machines, a machine among
    containers. The GPUs are the driver's list, so that nothing has to be initialised."""
    machine_id = root / "etc/machine-id"
    gpus = root / "proc/driver/nvidia/gpus"
    parts = [
        machine_id.read_text().strip() if machine_id.exists() else platform.node(),
        cpu_name(root),
        usable_cpus(root),
        total_memory_bytes(root),
        cgroup_memory_bytes(root),
        sorted(gpu.name for gpu in gpus.iterdir()) if gpus.is_dir() else [],
        os.environ.get("CUDA_VISIBLE_DEVICES"),
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def cache_folder() -> Path:
    """Under $XDG_CACHE_HOME; relative values are to be ignored, says the XDG specification."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / FOLDER_NAME


def cache_file(folder: Path, machine: str, *, quick: bool) -> Path:
    return folder / f"machine-{machine}{'-quick' if quick else ''}.json"


def load_cached(folder: Path, machine: str, *, quick: bool) -> tuple[MeasuredMachine | None, list[str]]:
    """(measurement or None, warnings). A full measurement stands for a quick one, not the other way round."""
    warnings: list[str] = []
    for is_quick in (False, True) if quick else (False,):
        file = cache_file(folder, machine, quick=is_quick)
        try:
            cached = msgspec.json.decode(file.read_bytes(), type=MeasuredMachine)
        except FileNotFoundError:
            continue
        # An older version's file, or a figure that can't be: measured anew, and written over.
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            warnings.append(f"the cached measurement {file} can't be used: {error}")
            continue
        if cached.version != READINGS_VERSION:
            warnings.append(
                f"the cached measurement {file} is of version {cached.version} of the readings, this is version "
                f"{READINGS_VERSION}: the machine is measured again"
            )
            continue
        if cached.fingerprint == machine and cached.quick == is_quick:
            return cached, warnings
    return None, warnings


def store_cached(folder: Path, measured: MeasuredMachine) -> list[str]:
    """Warnings. Written beside and renamed, so that nobody reads half of it."""
    file = cache_file(folder, measured.fingerprint, quick=measured.quick)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".json", delete=False) as part:
            part.write(msgspec.json.format(msgspec.json.encode(measured), indent=2))
        os.replace(part.name, file)
    except OSError as error:
        return [
            f"the measurement could not be kept ({error}), so the next run measures again; "
            f"point XDG_CACHE_HOME at a folder that can be written"
        ]
    return []
