"""The figures of a run: counters and stream totals since a point in time, as plain JSON values."""

from __future__ import annotations

import copy
import time
from dataclasses import replace

from vllm_moe_lightning.device.base import StreamTotals
from vllm_moe_lightning.pipeline.executor import PipelineExecutor


class RunReport:
    """Counts from its construction on."""

    def __init__(self, executor: PipelineExecutor) -> None:
        self._executor = executor
        executor.counters.first_sweep_began_s = None
        self._counters_before = copy.deepcopy(executor.counters)
        self._paged_before = (executor.pages_moved, executor.bytes_paged)
        self._residency_before = replace(executor.residency_counters)
        self._totals_before = executor.device.totals()
        self._started_s = time.monotonic()

    def _since(self, stream: str) -> StreamTotals:
        now, before = self._executor.device.totals()[stream], self._totals_before[stream]
        return StreamTotals(
            now.busy_s - before.busy_s,
            now.num_bytes - before.num_bytes,
            now.num_operations - before.num_operations,
        )

    def to_dict(self) -> dict[str, object]:
        """`*_busy` are shares (0..1) of `active_s`, the time from the first sweep to the last. Times in seconds.

        The pages that the last sweep sends ahead for the next may end after it, hence the cut at 1.
        """
        executor = self._executor
        counters, residency = executor.counters.since(self._counters_before), executor.residency_counters
        gpu, h2d, d2h, cpu = (self._since(stream) for stream in ("compute", "h2d", "d2h", "cpu"))
        active_s = counters.active_s

        def share(busy_s: float) -> float:
            return min(1.0, busy_s / active_s) if active_s else 0.0

        return {
            "device": executor.device.kind,
            "policy": executor.policy.to_dict(),
            "elapsed_s": time.monotonic() - self._started_s,
            "active_s": active_s,
            "working_s": counters.working_s,
            "sweep_s": counters.sweep_s,
            "sweeps": counters.sweeps,
            "dummy_sweeps": counters.dummy_sweeps,
            "aborted_sweeps": counters.aborted_sweeps,
            "refills": counters.refills,
            "steps": dict(counters.steps),
            "same_step_prefix_hits": counters.same_step_prefix_hits,
            "rows": counters.rows,
            "tokens": counters.tokens,
            "sampled_tokens": counters.sampled_tokens,
            "pages_moved": executor.pages_moved - self._paged_before[0],
            "bytes_paged": executor.bytes_paged - self._paged_before[1],
            "experts_fetched": residency.num_misses - self._residency_before.num_misses,
            "experts_found": residency.num_hits - self._residency_before.num_hits,
            "experts_evicted": residency.num_evictions - self._residency_before.num_evictions,
            "bytes_fetched": residency.bytes_moved - self._residency_before.bytes_moved,
            "pages_per_sweep": executor.store.sweep_pages(),
            "pages_of_first_layer": executor.pages_of_first_layer(),
            "bytes_per_sweep": executor.store.sweep_bytes(),
            "bytes_of_first_layer": executor.bytes_of_first_layer(),
            "gpu_busy": share(gpu.busy_s),
            "link_busy": share(h2d.busy_s),
            "link_bytes": h2d.num_bytes,
            "d2h_busy": share(d2h.busy_s),
            "d2h_bytes": d2h.num_bytes,
            "cpu_attention_busy": share(cpu.busy_s),
            "cpu_attention_tasks": cpu.num_operations,
            "wait_s": counters.total_wait_s,
            "wait_s_by_kind": dict(counters.wait_s),
            "device_memory_used_bytes": executor.device.memory_used_bytes,
            "device_memory_budget_bytes": executor.device.memory_budget_bytes,
            "expert_bytes_on_host": executor.store.host_bytes,
            "expert_bytes_on_device": executor.expert_bytes_on_device,
        }
