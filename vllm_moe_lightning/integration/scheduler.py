"""Our scheduler: vLLM's, the plain or the asynchronous one, whichever would have run, with its limits set anew for
each step.

Three decisions, each made elsewhere: who may start (admission_gate.py), how many tokens a step takes and how many of
them one prompt (step_limits.py), and what the prefill share is for the requests that really come (request_mix.py).
Priorities, groups of samples, grammars, stops and aborts are vLLM's, untouched. The split into micro-batches is the
worker's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from vllm_moe_lightning.engine_plan import plan_of
from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.integration.admission_gate import AdmissionGate
from vllm_moe_lightning.integration.configure import options_in_force
from vllm_moe_lightning.integration.exposition import metrics_directory, metrics_labels
from vllm_moe_lightning.integration.metrics_file import MetricsFile
from vllm_moe_lightning.integration.register import WORKER_CLS
from vllm_moe_lightning.integration.request_mix import PrefillShare, RequestMix
from vllm_moe_lightning.integration.scheduler_figures import SchedulerFigures
from vllm_moe_lightning.integration.step_limits import MOST_SCANNED, StepLimits, step_limits
from vllm_moe_lightning.policy.policy import DEFAULT_NUM_MICRO_BATCHES

logger = init_logger("vllm.vllm_moe_lightning.scheduler")

MOSTLY_IDLE = 0.5
"""Share of the KV blocks in use under which waiting for blocks deserves a hint."""


class MoELightningScheduler(Scheduler):
    """For synchronous scheduling (the CPU build)."""

    scheduler_config: Any
    max_num_scheduled_tokens: int
    adaptive_long_prefill_threshold: bool

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if vllm_config.parallel_config.worker_cls != WORKER_CLS:
            raise UnsupportedError(
                f"our scheduler without our worker pages nothing; use --worker-cls {WORKER_CLS} and drop "
                "--scheduler-cls"
            )
        super().__init__(vllm_config, *args, **kwargs)
        options, plan = options_in_force(vllm_config), plan_of(vllm_config)
        # Our own copy: the cap on a prompt's chunk is set in it for each step.
        self.scheduler_config = copy.copy(self.scheduler_config)
        self._mix = RequestMix(self.max_num_running_reqs, plan.expected_generation_tokens if plan else None)
        self._gate = AdmissionGate(self.kv_cache_manager, options.admission, self.max_model_len, self._mix)
        self._admission = options.admission
        self._num_micro_batches = options.num_micro_batches or DEFAULT_NUM_MICRO_BATCHES
        self._share = plan and PrefillShare(plan, self.max_num_running_reqs, self.max_num_scheduled_tokens)
        self._limits: StepLimits | None = None
        self._num_new_long = self._num_passed_over = 0
        self._is_warned = self._is_told = False
        directory = metrics_directory(vllm_config)
        file = None if directory is None else MetricsFile(directory, metrics_labels(vllm_config), rank=None)
        self._figures = SchedulerFigures(file, self._gate.waits)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._share and (sentence := self._share.adapt(self._mix)):
            self._figures.num_replans += 1
            logger.info("moe_lightning: %s", sentence)
        self._gate.begin_step(self.running)
        started = [request.request_id for request in self.running if request.is_prefill_chunk]
        self._limits = self._limits_of_step()
        with self._in_force(self._limits):
            output = super().schedule(*args, **kwargs)
        self._figures.count_step(output, started)
        if output.preempted_req_ids:
            self._heed_preemptions(len(output.preempted_req_ids))
        if self._gate.holds_back:
            self._tell_of_idle_blocks()
        self._figures.num_passed_over += self._num_passed_over
        self._figures.publish(
            kv_reserved_ratio=self._gate.reserved_ratio(), step_tokens=output.total_num_scheduled_tokens
        )
        return output

    @property
    def num_preemptions(self) -> int:
        return self._figures.num_preemptions

    def shutdown(self) -> None:
        self._figures.close()
        super().shutdown()

    @contextmanager
    def _in_force(self, limits: StepLimits | None) -> Iterator[None]:
        """vLLM reads its limits at the start of each step; a cap given by the user stays one."""
        if limits is None:
            yield
            return
        config = self.scheduler_config
        before = (
            self.max_num_scheduled_tokens,
            config.long_prefill_token_threshold,
            self.adaptive_long_prefill_threshold,
        )
        self.max_num_scheduled_tokens = limits.num_tokens
        config.long_prefill_token_threshold = min(before[1] or limits.chunk_tokens, limits.chunk_tokens)
        self.adaptive_long_prefill_threshold = False  # it would raise the cap again
        try:
            yield
        finally:
            self.max_num_scheduled_tokens, config.long_prefill_token_threshold = before[:2]
            self.adaptive_long_prefill_threshold = before[2]

    def _limits_of_step(self) -> StepLimits | None:
        """None without chunked prefill: a prompt is then taken whole, or not at all."""
        if not self.scheduler_config.enable_chunked_prefill:
            return None
        self._num_new_long = self._num_passed_over = 0
        started = [r.num_tokens - r.num_computed_tokens for r in self.running if r.is_prefill_chunk]
        free_slots = max(0, self.max_num_active_reqs - len(self.running) - self.num_waiting_for_streaming_input)
        queue = chain(self.kv_holding_waiting, self.waiting) if free_slots else ()
        startable = self._gate.startable(islice(queue, MOST_SCANNED), is_idle=not self.running)
        return step_limits(
            self._share.tokens_per_sweep if self._share else self.max_num_scheduled_tokens,
            len(self.running) - len(started),
            started,
            [request.num_tokens for request in islice(startable, free_slots)],
            self._num_micro_batches,
        )

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """Whether vLLM may start this request in this step, or shall pass over it to the next one in the queue."""
        if not super()._handle_blocked_waiting_request(request):
            return False
        limits = self._limits
        if limits is None or request.num_tokens <= limits.short_tokens:
            return True
        if self._num_new_long < limits.new_long_prompts:
            self._num_new_long += 1
            return True
        self._num_passed_over += 1  # each costs a little, so not without end
        return self._num_passed_over > MOST_SCANNED

    def _heed_preemptions(self, count: int) -> None:
        self._mix.forget()
        if not self._is_warned:
            self._is_warned = True
            logger.warning(
                "moe_lightning: %d requests were preempted for want of KV blocks and will be computed again "
                "(admission: %s); a larger KV cache, fewer --max-num-seqs, or admission 'worst_case' prevent it",
                count,
                self._admission,
            )

    def _tell_of_idle_blocks(self) -> None:
        """Once, where the worst case is far from what happens; clients often leave max_tokens to the server."""
        expected, usage = self._mix.expected_generation(), self.get_kv_cache_usage()
        by_worst_case = self._admission == "worst_case" or (
            self._admission == "auto" and not self._gate.held_back_is_open
        )
        if self._is_told or not by_worst_case or expected is None or usage > MOSTLY_IDLE:
            return
        self._is_told = True
        logger.info(
            "moe_lightning: requests wait for KV blocks although %.0f%% of these are free, since the running ones may "
            "generate up to their max_tokens; of the last answers 9 in 10 had at most %d tokens. Give a max_tokens "
            "near that, or set moe_lightning.admission to 'expected'",
            100 * (1 - usage),
            expected,
        )

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
            self._mix.record(request.num_prompt_tokens, request.num_output_tokens)
        self._gate.waits.ended(request.request_id)
        return super()._free_request(request, *args, **kwargs)


class AsyncMoELightningScheduler(MoELightningScheduler, AsyncScheduler):
    """For asynchronous scheduling, vLLM's default on CUDA: the same limits, around AsyncScheduler."""
