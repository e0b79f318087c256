"""Our scheduler: vLLM's, the plain or the asynchronous one, whichever would have run.

Thin for now: batch sizes are vLLM's limits, and the split into micro-batches is the worker's. It exists so that
admission by policy has its place, and so that half of a set-up is recognised.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.integration.register import WORKER_CLS


def _require_our_worker(vllm_config: Any) -> None:
    if vllm_config.parallel_config.worker_cls != WORKER_CLS:
        raise UnsupportedError(
            f"our scheduler without our worker pages nothing; use --worker-cls {WORKER_CLS} and drop --scheduler-cls"
        )


class MoELightningScheduler(Scheduler):
    """For synchronous scheduling (the CPU build)."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        _require_our_worker(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)


class AsyncMoELightningScheduler(AsyncScheduler):
    """For asynchronous scheduling, vLLM's default on CUDA."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        _require_our_worker(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
