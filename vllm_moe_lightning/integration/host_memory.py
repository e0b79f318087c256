# SPDX-License-Identifier: Apache-2.0
"""Makes freed tensors leave the process while a model is loaded and its experts move into host pages.

glibc serves large blocks from mappings of their own, but raises its threshold to the size of the largest one ever
freed (up to 32 MiB). From then on, the loaded experts lie in the heap and stay resident after they were moved: host
memory would hold them twice.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
LOADING_THRESHOLD_BYTES = 128 * 1024  # glibc's own at the start of a process
# Where glibc's adjustment would have ended: an engine's steps reuse the heap instead of faulting new pages in.
RUNNING_THRESHOLD_BYTES = 32 * 1024 * 1024


@contextmanager
def freed_tensors_leave_the_process() -> Iterator[None]:
    """Large blocks made inside lie in mappings of their own. Does nothing under an allocator without mallopt."""
    _set_mmap_threshold(LOADING_THRESHOLD_BYTES)
    try:
        yield
    finally:
        _set_mmap_threshold(RUNNING_THRESHOLD_BYTES)


@contextmanager
def packed_experts_stay_pageable() -> Iterator[None]:
    """vLLM packs experts on the GPU and brings them back into pinned memory, which torch keeps for good: they would be
    held twice, since ours are pinned in pages of our own."""
    name = "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _set_mmap_threshold(num_bytes: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, num_bytes)
        mallopt(_M_TRIM_THRESHOLD, 2 * num_bytes)
