"""The ranks of one engine: which of them share a machine, and that none waits for ever for one that is no more.

vLLM notices a dead worker at once, but asks the others to leave before it tells anybody, and a rank that spins in a
collective does not hear it. So each rank looks itself, and leaves. Ranks on other machines are Ray's to watch, whose
executor does not ask: it kills.
"""

from __future__ import annotations

import os
import platform
import select
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.distributed.parallel_state import get_tp_group, get_world_group
from vllm.logger import init_logger

logger = init_logger("vllm.vllm_moe_lightning.peers")

# In an orderly end all ranks leave at about the same time; one that is only a little later must not be taken for stuck.
GRACE_S = 2.0


class PeerWatch:
    """Ends this process GRACE_S after a peer died, unless `close` is called before."""

    def __init__(self, peer_pids: Sequence[int]) -> None:
        self._closing = threading.Event()
        self._pidfds = {os.pidfd_open(pid): pid for pid in peer_pids}  # readable once the process has ended
        self._poll = select.poll()
        for pidfd in self._pidfds:
            self._poll.register(pidfd, select.POLLIN)
        threading.Thread(target=self._watch, name="moe_lightning_peers", daemon=True).start()

    def _watch(self) -> None:
        pidfd, _ = self._poll.poll()[0]
        if self._closing.wait(GRACE_S):
            return
        logger.error(
            "moe_lightning: worker process %d, a rank of this engine, has ended; this rank cannot go on without it",
            self._pidfds[pidfd],
        )
        os._exit(1)  # the main thread may be inside a collective, which nothing interrupts

    def close(self) -> None:
        """This rank is leaving by itself."""
        self._closing.set()


@dataclass(frozen=True)
class NodeRanks:
    """The ranks of this engine in one machine, or container: they share its memory and cores, and see each other."""

    index: int
    """Of this rank, among them."""
    pids: tuple[int, ...]
    """In order of rank, its own included."""
    gpu_nodes: tuple[int | None, ...]
    """Memory node that each one's GPU hangs on, where that is known."""

    @property
    def gpu_node(self) -> int | None:
        return self.gpu_nodes[self.index]

    @property
    def count(self) -> int:
        return len(self.pids)


def node_identity() -> str:
    """The same for two processes if they can see each other."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    machine = boot_id.read_text().strip() if boot_id.exists() else platform.node()  # not every sandbox has the file
    return f"{machine} {os.readlink('/proc/self/ns/pid')}"


def ranks_of_node(gpu_node: int | None) -> NodeRanks:
    """After the distributed groups were made, on every rank. gpu_node: the memory node of this rank's GPU."""
    group = get_world_group()
    own = (node_identity(), os.getpid(), gpu_node)
    processes = [own] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(processes, own, group=group.cpu_group)
    return ranks_beside(own, processes)


Process = tuple[str, int, int | None]
"""(node_identity, process id, memory node of its GPU)"""


def ranks_beside(own: Process, processes: Sequence[Process]) -> NodeRanks:
    """processes: of every rank."""
    beside = [(pid, gpu_node) for machine, pid, gpu_node in processes if machine == own[0]]
    pids = tuple(pid for pid, _ in beside)
    return NodeRanks(pids.index(own[1]), pids, tuple(gpu_node for _, gpu_node in beside))


def watch_peers(ranks: NodeRanks) -> PeerWatch | None:
    """None where there is no other rank on this machine."""
    others = [pid for pid in ranks.pids if pid != os.getpid()]
    return PeerWatch(others) if others else None


def forget_shared_memory_names() -> None:
    """Unlink the segment that vLLM's CPU collectives made for this rank.

    All ranks have mapped it by now and nobody opens it again, so its name serves nothing but to stay behind when the
    processes are killed, as `vllm serve` kills them when it stops.
    """
    group = get_tp_group()
    name = getattr(getattr(group.device_communicator, "dist_module", None), "group_name", None)
    if name is not None:
        with suppress(FileNotFoundError):
            Path(f"/dev/shm/{name}_{group.rank_in_group}").unlink()
