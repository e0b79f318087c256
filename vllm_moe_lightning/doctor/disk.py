"""Looks at the disks: how long loading will take, and room for what an engine writes."""

from __future__ import annotations

import mmap
import os
import shutil
import time
from pathlib import Path

from vllm_moe_lightning.doctor.finding import Finding, ok, size_text, warning
from vllm_moe_lightning.host_limits import IN_MEMORY, ROOT, file_system_of

GB = 1e9
SAMPLE_S = 0.5
CHUNK_BYTES = 8 << 20
LEAST_SAMPLE_BYTES = 1 << 20
SLOW_LOADING_S = 600.0
LEAST_FREE_BYTES = 256 << 20
"""Metrics, profile, vLLM's caches of model classes and compiled ranks: some MiB each."""


def read_speed(files: list[Path], root: Path = ROOT) -> Finding:
    """From a sample of the largest shard, past the page cache where the file system can."""
    name = "checkpoint's disk"
    files = [file for file in files if file.is_file()]
    if not files:
        return ok(name, "no shard to read")
    total = sum(file.stat().st_size for file in files)
    largest = max(files, key=lambda file: file.stat().st_size)
    kind = file_system_of(largest.parent, root)
    if kind in IN_MEMORY:
        return ok(name, f"{kind}, which is memory")
    num_bytes, seconds, is_direct = _read_sample(largest)
    if num_bytes < LEAST_SAMPLE_BYTES:
        return ok(name, f"{kind}; {size_text(total)} are too little to time")
    rate = num_bytes / seconds
    how = "past the page cache" if is_direct else "perhaps from the page cache"
    loading_s = total / rate
    found = (
        f"{kind} reads {rate / GB:.3g} GB/s ({size_text(num_bytes)}, {how}): {loading_s:.2g} s for {size_text(total)}"
    )
    if loading_s > SLOW_LOADING_S:
        return warning(name, found, "copy the checkpoint to a local SSD", f"{SLOW_LOADING_S / 60:.0f} min")
    return ok(name, found)


def _read_sample(file: Path) -> tuple[int, float, bool]:
    """(bytes, seconds, past the page cache?) of reading from the start for SAMPLE_S at most."""
    try:
        descriptor, is_direct = os.open(file, os.O_RDONLY | os.O_DIRECT), True
    except OSError:  # a file system without
        descriptor, is_direct = os.open(file, os.O_RDONLY), False
    try:
        with mmap.mmap(-1, CHUNK_BYTES) as landing:  # page-aligned, as O_DIRECT wants it
            started_s, offset = time.perf_counter(), 0
            while (elapsed_s := time.perf_counter() - started_s) < SAMPLE_S:
                read = os.preadv(descriptor, [landing], offset)
                offset += read
                if read < CHUNK_BYTES:  # the end
                    elapsed_s = time.perf_counter() - started_s
                    break
            return offset, max(elapsed_s, 1e-9), is_direct
    finally:
        os.close(descriptor)


def free_space(what: str, folder: Path) -> Finding:
    """Of the file system that `folder` is on, or will be."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(there).free
    found, limit = f"{size_text(free)} free at {folder}", size_text(LEAST_FREE_BYTES)
    if free < LEAST_FREE_BYTES:
        return warning(what, found, "make room there", limit)
    return ok(what, found, limit)
