"""Memory nodes: which CPUs lie at which, and pages spread over the nodes that will read them.

A machine of one socket has one node and nothing to decide. On more, a GPU's copies and the CPU attention beside them
belong on the node that the GPU hangs on, threads and KV cache. Without a GPU, blocks of the KV cache are handed out at
random, so its pages are interleaved over the nodes of the attention threads, each of which is kept on its node: every
node then reads at its own bandwidth, half of it (of two) from the other's memory. Not measured: no machine of two
sockets so far.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path("/")
MBIND_NUMBERS = {"x86_64": 237, "aarch64": 235}  # of the system call; libnuma is no more than a face to it
MPOL_INTERLEAVE = 3
MPOL_MF_MOVE = 2
MASK_BITS = 1024


def parse_list(text: str) -> list[int]:
    """The kernel's lists: "0-3,8" -> [0, 1, 2, 3, 8]."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def nodes_of(cpus: Iterable[int], root: Path = ROOT) -> dict[int, int]:
    """CPU -> node. CPUs that the kernel places nowhere (no NUMA support) are at node 0."""
    node_of: dict[int, int] = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        for cpu in parse_list((folder / "cpulist").read_text()):
            node_of[cpu] = int(folder.name.removeprefix("node"))
    return {cpu: node_of.get(cpu, 0) for cpu in cpus}


def node_of_pci_device(address: str, root: Path = ROOT) -> int | None:
    """The node that a device (0000:3b:00.0) hangs on; None where there is only one, or the kernel doesn't say."""
    file = root / "sys/bus/pci/devices" / address.lower() / "numa_node"
    if len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) < 2 or not file.exists():
        return None
    node = int(file.read_text())
    return node if node >= 0 else None


def cpus_beside_gpu(cpus: Sequence[int], rank: int, gpu_nodes: Sequence[int | None], root: Path = ROOT) -> list[int]:
    """A rank's even share of the CPUs of the node that its GPU hangs on, among the ranks whose GPUs hang there too;
    never none of them. Empty: the node is not known, or none of its CPUs is among `cpus`.

    gpu_nodes: of each rank of this machine.
    """
    node = gpu_nodes[rank]
    if node is None:
        return []
    near = [cpu for cpu, place in nodes_of(cpus, root).items() if place == node]
    beside = [other for other, place in enumerate(gpu_nodes) if place == node]
    return cpus_of_rank(near, beside.index(rank), len(beside), root)


def cpus_of_rank(cpus: Sequence[int], rank: int, num_ranks: int, root: Path = ROOT) -> list[int]:
    """An even share of the CPUs, of as few nodes as can be: GPUs are numbered along the buses, as nodes are."""
    node_of = nodes_of(cpus, root)
    ordered = sorted(cpus, key=lambda cpu: (node_of[cpu], cpu))
    begin, end = (len(ordered) * index // num_ranks for index in (rank, rank + 1))
    return sorted(ordered[begin:end]) or ordered[:1]


def interleave(address: int, num_bytes: int, nodes: Sequence[int]) -> None:
    """Spread the pages that lie wholly in the range over the nodes, moving those that are there already.

    Raises OSError where the kernel refuses (a container without the right) or the machine has no such call.
    """
    number = MBIND_NUMBERS.get(platform.machine())
    if number is None:
        raise OSError(f"no mbind on {platform.machine()}")
    if not nodes or max(nodes) >= MASK_BITS or min(nodes) < 0:
        raise ValueError(f"nodes must be some of 0..{MASK_BITS - 1}, got {list(nodes)}")
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin >= end:
        return
    words = (ctypes.c_ulong * (MASK_BITS // (8 * ctypes.sizeof(ctypes.c_ulong))))()
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    for node in nodes:
        words[node // bits] |= 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(begin),
        ctypes.c_ulong(end - begin),
        ctypes.c_int(MPOL_INTERLEAVE),
        words,
        ctypes.c_ulong(MASK_BITS + 1),  # the kernel reads one bit less
        ctypes.c_uint(MPOL_MF_MOVE),
    )
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"mbind over nodes {list(nodes)}: {os.strerror(error)}")
