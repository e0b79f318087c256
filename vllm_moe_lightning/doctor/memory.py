"""Looks at the host's memory: what the run needs of it, and the limits that stand in its way."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_moe_lightning.doctor.finding import Finding, ok, size_text, warning, will_fail
from vllm_moe_lightning.host_limits import (
    ROOT,
    available_memory_bytes,
    cgroup_memory_bytes,
    meminfo_bytes,
    memlock_bytes,
    total_memory_bytes,
)
from vllm_moe_lightning.model_spec import MoeModelSpec

GIB, MIB = 1 << 30, 1 << 20
# While it loads, the engine holds at most this share more than after, and one shard.
LOADING_SHARE = 1.10
EXPECTED_TOKENS = 640
"""Of a sequence, where neither plan nor user says how large the KV cache is: it holds one at least."""
SWAP_SHARE = 0.05
"""Of all memory: with more of it swapped out, something of somebody's is in the way."""
STRICT_OVERCOMMIT = "2"
# /dev/shm: the collectives of several ranks on the CPU build have a buffer for each of their threads (seen with two
# ranks of one), and the largest message of the executor's queue is this long.
SHM_THREAD_BYTES = 4 * MIB
SHM_MESSAGE_BYTES = 16 * MIB


@dataclass(frozen=True)
class Need:
    """Of the whole machine, all ranks together."""

    weight_bytes: float
    """In host memory: the emulated device has no other."""
    pinned_bytes: float
    """What a GPU would copy from: experts and KV cache."""
    kv_bytes: float
    largest_shard_bytes: int

    @property
    def after_bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    @property
    def peak_bytes(self) -> float:
        return LOADING_SHARE * self.after_bytes + self.largest_shard_bytes


def need_of(
    spec: MoeModelSpec | None,
    shard_bytes: Sequence[int],
    *,
    kv_bytes: float | None,
    max_model_len: int | None,
    on_gpu: bool,
) -> Need:
    """kv_bytes: of all ranks; None: as for one sequence. Without a spec, the files' sizes stand for the weights'."""
    largest = max(shard_bytes, default=0)
    if spec is None:
        weights = float(sum(shard_bytes))
        return Need(weights, weights + (kv_bytes or 0.0), kv_bytes or 0.0, largest)
    if kv_bytes is None:
        kv_bytes = (max_model_len or EXPECTED_TOKENS) * spec.kv_bytes_per_token
    weights = spec.expert_bytes_total if on_gpu else spec.total_bytes
    return Need(weights, spec.expert_bytes_total + kv_bytes, kv_bytes, largest)


def host_memory(need: Need, num_ranks: int = 1, root: Path = ROOT) -> Finding:
    """Peak and steady need against what is free now, and what our cgroup has left."""
    available = available_memory_bytes(num_ranks if num_ranks > 1 else None, root)
    limit, total = cgroup_memory_bytes(root), total_memory_bytes(root)
    is_held = limit is not None and limit < total
    have = f"{size_text(available)} available of " + (
        f"the cgroup's {size_text(limit)}" if is_held and limit is not None else size_text(total)
    )
    found = (
        f"needs {size_text(need.after_bytes)} (weights {size_text(need.weight_bytes)}, KV cache "
        f"{size_text(need.kv_bytes)}), while loading up to {size_text(need.peak_bytes)}"
    )
    more = "raise the cgroup's limit (docker run --memory, MemoryMax=)" if is_held else "end other processes"
    cure = f"{more}, give a smaller --kv-cache-gib, or take a quantised checkpoint"
    if need.after_bytes > available:
        return will_fail("host memory", found, cure, have)
    if need.peak_bytes > available:
        return warning("host memory", f"{found}; that last figure is more than there is", cure, have)
    return ok("host memory", found, have)


def locked_memory(need: Need, *, on_gpu: bool) -> Finding:
    """RLIMIT_MEMLOCK of this process, which those that it starts inherit."""
    limit = memlock_bytes()
    wanted = f"{size_text(need.pinned_bytes)} to pin"
    if limit is None:
        return ok("locked memory", "no limit", wanted)
    found = f"limit {size_text(limit)}"
    if limit >= need.pinned_bytes:
        return ok("locked memory", found, wanted)
    cure = "ulimit -l unlimited (docker run --ulimit memlock=-1, systemd LimitMEMLOCK=infinity)"
    # No failure: not every driver counts what it pins against the limit, and ours was not tried.
    what = "a driver may refuse to pin more" if on_gpu else "the emulated device pins nothing, a GPU will"
    return warning("locked memory", f"{found}; {what}", cure, wanted)


def address_space(need: Need) -> Finding:
    """RLIMIT_AS, which some clusters set for each job."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return ok("address space", "no limit")
    found, wanted = f"limit {size_text(limit)}", size_text(need.peak_bytes)
    if limit < need.peak_bytes:
        return will_fail("address space", found, "ulimit -v unlimited, or ask the scheduler for more memory", wanted)
    return ok("address space", found, wanted)


def swap(root: Path = ROOT) -> Finding:
    used = meminfo_bytes("SwapTotal", root) - meminfo_bytes("SwapFree", root)
    if used > SWAP_SHARE * total_memory_bytes(root):
        cure = "end what holds the memory, then swapoff -a && swapon -a: a swapped page costs each step a disk access"
        return warning("swap", f"{size_text(used)} in use", cure)
    return ok("swap", f"{size_text(used)} in use of {size_text(meminfo_bytes('SwapTotal', root))}")


def shared_memory(num_ranks: int, num_threads: int, folder: Path) -> Finding:
    """num_threads: of all ranks together. folder: /dev/shm, where a write that finds no room is a SIGBUS."""
    state = os.statvfs(folder)
    free = state.f_bavail * state.f_frsize
    found = f"{size_text(free)} free of {size_text(state.f_blocks * state.f_frsize)} in {folder}"
    need = SHM_MESSAGE_BYTES + (num_threads * SHM_THREAD_BYTES if num_ranks > 1 else 0)
    wanted = f"{size_text(need)} for {num_ranks} rank{'s' * (num_ranks > 1)}"
    if free >= need:
        return ok("shared memory", found, wanted)
    cure = "docker run --shm-size=2g (or --ipc=host); delete what other engines left there"
    if num_ranks > 1:
        return will_fail("shared memory", found, cure, wanted)
    return warning("shared memory", found, cure, wanted)


def overcommit(need: Need, root: Path = ROOT) -> Finding:
    mode = (root / "proc/sys/vm/overcommit_memory").read_text().strip()
    if mode != STRICT_OVERCOMMIT:
        return ok("overcommit", f"vm.overcommit_memory={mode}")
    left = meminfo_bytes("CommitLimit", root) - meminfo_bytes("Committed_AS", root)
    found, wanted = f"vm.overcommit_memory=2, {size_text(left)} may still be asked for", size_text(need.peak_bytes)
    if left < need.peak_bytes:
        return will_fail("overcommit", found, "sysctl vm.overcommit_memory=0", wanted)
    return ok("overcommit", found, wanted)


def huge_pages(root: Path = ROOT) -> Finding:
    file = root / "sys/kernel/mm/transparent_hugepage/enabled"
    if not file.exists():
        return ok("huge pages", "this kernel has no transparent ones")
    words = file.read_text().split()
    chosen = next((word.strip("[]") for word in words if word.startswith("[")), "unknown")
    small = "" if chosen == "always" else ": weights and KV cache take pages of 4 KiB (what that costs is not measured)"
    return ok("huge pages", f"{chosen}{small}")
