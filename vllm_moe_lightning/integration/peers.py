"""The ranks of one engine watch each other, so that none waits for ever in a collective for one that is no more.

vLLM notices a dead worker at once, but asks the others to leave before it tells anybody, and a rank that spins in a
collective does not hear it. So each rank looks itself, and leaves.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence
from contextlib import suppress
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


def watch_peers() -> PeerWatch | None:
    """After the distributed groups were made, on every rank. None where this is the only rank."""
    group = get_world_group()
    if group.world_size == 1:
        return None
    pids: list[int] = [0] * group.world_size
    torch.distributed.all_gather_object(pids, os.getpid(), group=group.cpu_group)
    return PeerWatch([pid for pid in pids if pid != os.getpid()])


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
