"""Where a rank's own threads run, and how many of them attend: beside its GPU, out of the way of vLLM's and of other
ranks' threads."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence

from vllm.logger import init_logger

from vllm_moe_lightning.engine_plan import thread_difference
from vllm_moe_lightning.host_limits import usable_cpus
from vllm_moe_lightning.integration.peers import NodeRanks
from vllm_moe_lightning.integration.platform import is_cuda
from vllm_moe_lightning.numa import cpus_beside_gpu, cpus_of_rank

logger = init_logger("vllm.vllm_moe_lightning.thread_places")


def stream_cpus(ranks: NodeRanks) -> list[int]:
    """CPUs for our threads: not the one that vLLM binds the launching thread to, which they would keep interrupting.

    New threads inherit the launching thread's mask; the process that started the worker was not bound. Where nothing
    is bound, this rank's share of the CPUs beside its GPU, or of all that we may use if it has none there; where there
    is nothing else, the bound one.
    """
    own = os.sched_getaffinity(0)
    if is_bound_by_vllm():
        parent = os.sched_getaffinity(os.getppid())
        return sorted(parent - own if own < parent else own)
    near = cpus_beside_gpu(sorted(own), ranks.index, ranks.gpu_nodes)
    if near:
        logger.info("moe_lightning: CPU attention has %d CPUs of memory node %d, the GPU's", len(near), ranks.gpu_node)
        return near
    if ranks.gpu_node is not None:
        logger.warning(
            "moe_lightning: the GPU hangs on memory node %d, none of whose CPUs this process may use (affinity mask or "
            "cpuset): CPU attention runs on other nodes' CPUs, and copies cross over from there",
            ranks.gpu_node,
        )
    return cpus_of_rank(sorted(own), ranks.index, ranks.count)


def is_bound_by_vllm() -> bool:
    """Only the CPU build binds ranks, and only those that it starts itself: neither Ray's nor one in the user's own
    process."""
    return not is_cuda() and multiprocessing.parent_process() is not None


def attention_threads(given: int | None, measured: int, cpus: Sequence[int], ranks: NodeRanks) -> int:
    """As many as the user gave; else as the plan's figures were measured with, where there is room for them.

    measured: 0 where the plan does not say. cpus: as `stream_cpus` gave them.
    """
    num_ranks = 1 if is_bound_by_vllm() else ranks.count
    num_cpus = max(1, min(len(cpus), usable_cpus() // num_ranks))  # a cgroup's quota may be less than its CPUs
    is_launcher_apart = not os.sched_getaffinity(0) & set(cpus)
    most = num_cpus if is_launcher_apart else max(1, num_cpus - 1)
    threads = given or min(measured or most, most)
    if (difference := thread_difference(measured, threads)) is not None:
        logger.warning("moe_lightning: %s", difference)
    return threads
