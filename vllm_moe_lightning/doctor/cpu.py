"""Looks at the CPUs that threads of the engine may run on, and at the memory nodes that they lie at.

Whether they have the vector instructions is found by the rehearsed start, which loads the kernels.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from vllm_moe_lightning.doctor.finding import Finding, ok, warning, will_fail
from vllm_moe_lightning.host_limits import ROOT, cgroup_cpus, cpu_name, usable_cpus
from vllm_moe_lightning.numa import interleave, nodes_of, parse_list

BIND_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
BINDS_NOBODY, BINDS_BY_NODE = "nobind", "auto"
PRETENDS_NODES = "VLLM_CPU_SIM_MULTI_NUMA"
PROBE_PAGES = 4


def threads(root: Path = ROOT) -> Finding:
    """The launching thread has one CPU, attention and experts the others."""
    mask, quota = sorted(os.sched_getaffinity(0)), cgroup_cpus(root)
    usable = usable_cpus(root)
    found = f"{usable} usable on {cpu_name(root)}: {len(mask)} in the affinity mask"
    found += ", no cgroup quota" if quota is None else f", a cgroup quota of {quota:g}"
    if usable == 1:
        return warning(
            "CPUs", f"{found}; launching and CPU attention share it", "give the process more (taskset, docker --cpus)"
        )
    if quota is not None and quota < len(mask):
        cure = f"bind it to as many CPUs as it may use, e.g. taskset -c {mask[0]}-{mask[usable - 1]}"
        return warning("CPUs", f"{found}, so threads for all of the mask are throttled", cure)
    return ok("CPUs", found)


def openmp(environment: Mapping[str, str] = os.environ, root: Path = ROOT) -> Finding:
    """Threads of the device's computation on vLLM's CPU build, where vLLM does not bind them and so counts them."""
    name, given, usable = "OpenMP threads", environment.get("OMP_NUM_THREADS", ""), usable_cpus(root)
    if environment.get(BIND_VARIABLE) != BINDS_NOBODY:
        return ok(name, "vLLM sets their number")
    found, limit = f"OMP_NUM_THREADS={given}" if given else "OMP_NUM_THREADS is not set", f"{usable} usable CPUs"
    if given.isdigit() and int(given) > usable:
        return warning(name, found, f"set it to {usable} at most", limit)
    return ok(name, found, limit)


def binding(num_ranks: int, environment: Mapping[str, str] = os.environ, root: Path = ROOT) -> Finding:
    """Where vLLM's CPU build binds each rank's threads: its worker ends at an assertion if it cannot."""
    name, value = "thread binding", environment.get(BIND_VARIABLE, BINDS_BY_NODE)
    cpus = os.sched_getaffinity(0)
    found = f"{BIND_VARIABLE}={value}"
    if value == BINDS_NOBODY:
        return ok(name, found)
    if value == BINDS_BY_NODE:
        num_nodes = len(set(nodes_of(cpus, root).values()))
        if num_ranks <= num_nodes or environment.get(PRETENDS_NODES, "0") != "0":
            return ok(name, f"{BIND_VARIABLE} is auto: a memory node for each rank")
        shares = "|".join(str(cpu) for cpu in sorted(cpus)[:num_ranks])
        return will_fail(
            name,
            f"{BIND_VARIABLE} is auto, which gives each rank a memory node of its own; there are {num_nodes}",
            f"set {BIND_VARIABLE}, e.g. '{shares}', or to {BINDS_NOBODY}",
            f"{num_ranks} ranks",
        )
    lists = value.split("|")
    if len(lists) != num_ranks:
        cure = "give one list of CPUs for each rank, with | between"
        return will_fail(name, f"{found} has {len(lists)} lists", cure, f"{num_ranks} ranks")
    try:
        outside = sorted(set().union(*map(parse_list, lists)) - cpus)
    except ValueError:
        return will_fail(name, f"{found} is no list of CPUs", f"write it as 0-3|4-7, or set {BINDS_NOBODY}")
    if outside:
        mask = ",".join(map(str, sorted(cpus)))
        return will_fail(name, f"{found} names CPUs {outside}", "name CPUs that the process may use", f"CPUs {mask}")
    return ok(name, found)


def memory_nodes(root: Path = ROOT) -> Finding:
    """On several nodes the KV cache is spread over them, which containers may forbid."""
    nodes = sorted(set(nodes_of(os.sched_getaffinity(0), root).values()))
    if len(nodes) == 1:
        return ok("memory nodes", "1")
    found = f"{len(nodes)}, of our CPUs"
    try:
        _interleave_some(nodes)
    except OSError as error:
        cure = "docker run --cap-add SYS_NICE; else bind the process to one node: numactl -N 0 -m 0"
        return warning("memory nodes", f"{found}; the KV cache cannot be spread over them ({error})", cure)
    return ok("memory nodes", f"{found}; the KV cache is spread over them")


def _interleave_some(nodes: Iterable[int]) -> None:
    with mmap.mmap(-1, PROBE_PAGES * mmap.PAGESIZE) as memory:
        start = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(start)
        try:
            interleave(address, len(memory), list(nodes))
        finally:
            del start  # the mapping cannot be closed while somebody looks into it
