"""The worker's side of the metrics: gathers totals from the pipeline, makes rates of them, publishes both.

After each sweep, and once a second by a thread of its own, so that gauges move during a long sweep and fall to zero
after the last one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_moe_lightning.engine_plan import PredictedFigures
from vllm_moe_lightning.integration.metrics_file import MetricsFile
from vllm_moe_lightning.pipeline.comparison import AchievedFigures, achieved_figures
from vllm_moe_lightning.pipeline.executor import PipelineExecutor
from vllm_moe_lightning.pipeline.window import SlidingWindow
from vllm_moe_lightning.resources import STREAM_OF

TICK_S = 1.0
COUNTERS = (
    "bytes_paged", "pages_moved", "experts_fetched", "experts_found",
    "sweeps", "dummy_sweeps", "aborted_sweeps", "refills",
)  # fmt: skip
SWEEPS_PER_WINDOW = 3


class SampledTokens:
    """How many requests of a step get a token from it: those whose prompt has been read to its end."""

    def __init__(self) -> None:
        self._prompt_lens: dict[str, int] = {}

    def count(self, scheduler_output: Any) -> int:
        """Of one step, from vLLM's SchedulerOutput; call it for each step, once."""
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id in scheduler_output.finished_req_ids:
            self._prompt_lens.pop(request_id, None)
        sampled = 0
        for request in scheduler_output.scheduled_new_reqs:
            self._prompt_lens[request.req_id] = request.prompt_len
            # Model runner V2: a request that comes back after preemption has output tokens to read again, too.
            prefill = request.prefill_token_ids
            length = request.prompt_len if prefill is None else len(prefill)
            sampled += request.num_computed_tokens + scheduled[request.req_id] >= length
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, num_computed, num_output in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            sampled += num_computed + scheduled[request_id] >= self._prompt_lens[request_id] + num_output
        return sampled


class WorkerFigures:
    """Publishes one worker's metrics from its construction until `close`."""

    def __init__(
        self,
        executor: PipelineExecutor,
        directory: Path,
        labels: Mapping[str, str],
        rank: int,
        window_s: float,
        kv_bytes: int,
        predicted: PredictedFigures | None,
    ) -> None:
        self._executor = executor
        self._file = MetricsFile(directory, labels, rank)
        self._speaks_for_engine = rank == 0
        self._window = SlidingWindow(window_s)
        self._lock = threading.Lock()
        self._publish_facts(kv_bytes, predicted)
        self.publish()
        self._closing = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="moe_lightning_figures", daemon=True)
        self._ticker.start()

    def _tick(self) -> None:
        while not self._closing.wait(TICK_S):
            self.publish()

    def after_step(self, sampled_tokens: int) -> None:
        """On the launching thread, before the step's tokens go out: publishing takes some 30 us."""
        self._executor.counters.sampled_tokens += sampled_tokens
        self.publish()

    def publish(self) -> None:
        with self._lock:
            totals = self._totals()
            self._publish_counters(totals)
            self._publish_rates(time.monotonic(), totals)

    def close(self) -> AchievedFigures | None:
        """Stops publishing; the metrics are gone. Returns what was achieved in all, None if nothing was done."""
        self._closing.set()
        self._ticker.join()
        totals = self._totals()
        self._file.remove()
        return achieved_figures(
            generated_tokens=totals["sampled_tokens"],
            computed_tokens=totals["tokens"],
            sweeps=totals["sweeps"],
            sweep_s=totals["sweep_s"],
            working_s=totals["working_s"],
            busy_s={resource: totals[f"busy_s {resource}"] for resource in STREAM_OF},
        )

    def _totals(self) -> dict[str, float]:
        executor, streams = self._executor, self._executor.device.totals()
        counters, residency = executor.counters, executor.residency_counters
        return {
            "bytes_paged": executor.bytes_paged,
            "pages_moved": executor.pages_moved,
            "experts_fetched": residency.num_misses,
            "experts_found": residency.num_hits,
            "sweeps": counters.sweeps,
            "dummy_sweeps": counters.dummy_sweeps,
            "aborted_sweeps": counters.aborted_sweeps,
            "refills": counters.refills,
            "sweep_s": counters.sweep_s,
            "working_s": counters.working_s,
            "micro_batches": counters.micro_batches,
            "tokens": counters.tokens,
            "sampled_tokens": counters.sampled_tokens,
            **{f"busy_s {resource}": streams[stream].busy_s for resource, stream in STREAM_OF.items()},
            **{f"link_bytes {stream}": streams[stream].num_bytes for stream in ("h2d", "d2h")},
            **{f"wait_s {kind}": seconds for kind, seconds in dict(counters.wait_s).items()},
        }

    def _publish_counters(self, totals: Mapping[str, float]) -> None:
        write = self._file.set
        for name in COUNTERS:
            write(name, totals[name])
        write("sweep_seconds", totals["sweep_s"])
        write("working_seconds", totals["working_s"])
        write("device_memory_used_bytes", self._executor.device.memory_used_bytes)
        for total, value in totals.items():
            match total.split(" ", 1):
                case "wait_s", kind:
                    write("wait_seconds", value, kind)
                case "busy_s", resource:
                    write("busy_seconds", value, resource)
                case "link_bytes", direction:
                    write("link_bytes", value, direction)
        if self._speaks_for_engine:
            write("computed_tokens", totals["tokens"])
            write("generated_tokens", totals["sampled_tokens"])

    def _publish_rates(self, now_s: float, totals: Mapping[str, float]) -> None:
        counters = self._executor.counters
        rates = self._window.rates(now_s, totals, SWEEPS_PER_WINDOW * counters.last_sweep_s)
        if not self._executor.in_sweep and now_s - counters.last_sweep_ended_s > self._window.window_s:
            rates = dict.fromkeys(rates, 0.0)
        busy = {str(resource): min(1.0, rates[f"busy_s {resource}"]) for resource in STREAM_OF}
        busiest = max(busy, key=lambda resource: busy[resource]) if any(busy.values()) else None
        write = self._file.set
        for direction in ("h2d", "d2h"):
            write("link_busy_ratio", busy[direction], direction)
        write("cpu_attention_busy_ratio", busy["cpu"])
        write("compute_busy_ratio", busy["gpu"])
        write("wait_ratio", min(1.0, sum(rate for name, rate in rates.items() if name.startswith("wait_s "))))
        for resource in STREAM_OF:
            write("bottleneck", float(resource == busiest), resource)
        if self._speaks_for_engine:
            write("num_micro_batches", rates["micro_batches"] / rates["sweeps"] if rates["sweeps"] else 0.0)
            write("achieved_tokens_per_second", rates["sampled_tokens"], "generated")
            write("achieved_tokens_per_second", rates["tokens"], "total")

    def _publish_facts(self, kv_bytes: int, predicted: PredictedFigures | None) -> None:
        write, device, store = self._file.set, self._executor.device, self._executor.store
        if device.memory_budget_bytes is not None:
            write("device_memory_budget_bytes", device.memory_budget_bytes)
        write("host_kv_bytes", kv_bytes)
        write("expert_bytes", store.host_bytes, "host")
        write("expert_bytes", self._executor.expert_bytes_on_device, "device")
        if not self._speaks_for_engine:
            return
        write("engine_info", 1.0, device.kind)
        if predicted is None:
            return
        write("predicted_tokens_per_second", predicted.generated_tokens_per_s, "generated")
        write("predicted_tokens_per_second", predicted.total_tokens_per_s, "total")
        write("predicted_sweep_seconds", predicted.sweep_s)
        write("predicted_bottleneck", 1.0, predicted.bottleneck)
        for resource, share in predicted.busy.items():
            write("predicted_busy_ratio", share, resource)
