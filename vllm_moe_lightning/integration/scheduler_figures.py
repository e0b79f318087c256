"""The scheduler's side of the metrics: counts what it decides, and publishes that after each step.

The last step of an engine that becomes idle schedules nothing, and brings the gauges back to zero; so no thread of its
own is needed. Publishing takes some 10 us.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from vllm_moe_lightning.integration.metrics_file import MetricsFile


class KvWaits:
    """Requests that were next in turn, and had to wait because there were no KV blocks for them."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}
        self.num_requests = 0
        self._ended_s = 0.0

    def refused(self, request_id: str) -> None:
        if request_id not in self._since_s:
            self._since_s[request_id] = time.monotonic()
            self.num_requests += 1

    def ended(self, request_id: str) -> None:
        """It got its blocks, or is no longer wanted. Of any other request: nothing."""
        if self._since_s and (since_s := self._since_s.pop(request_id, None)) is not None:
            self._ended_s += time.monotonic() - since_s

    @property
    def num_waiting(self) -> int:
        return len(self._since_s)

    @property
    def total_s(self) -> float:
        """Of waits that have ended and of those that last."""
        if not self._since_s:
            return self._ended_s
        return self._ended_s + len(self._since_s) * time.monotonic() - sum(self._since_s.values())


class SchedulerFigures:
    """Totals since the start. file: None where nobody reads them."""

    def __init__(self, file: MetricsFile | None, waits: KvWaits) -> None:
        self._file = file
        self._waits = waits
        self.num_admitted = self.num_preemptions = self.num_passed_over = self.num_replans = 0
        self.prefill_tokens = self.decode_tokens = 0
        self.publish(kv_reserved_ratio=0.0, step_tokens=0)

    def count_step(self, output: Any, started: Collection[str]) -> None:
        """output: vLLM's SchedulerOutput of a step. started: requests whose prompt was being read before it."""
        scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
        # Model runner V2 is told of a request that comes back after preemption as of a new one, V1 as of a resumed one.
        new = [request.req_id for request in output.scheduled_new_reqs]
        prefill = sum(scheduled.get(name, 0) for name in {*started, *new, *cached.resumed_req_ids})
        self.prefill_tokens += prefill
        self.decode_tokens += output.total_num_scheduled_tokens - prefill
        self.num_admitted += len(new) + len(cached.resumed_req_ids)
        self.num_preemptions += len(output.preempted_req_ids or ())

    def publish(self, *, kv_reserved_ratio: float, step_tokens: int) -> None:
        """step_tokens: scheduled in the last step."""
        if self._file is None:
            return
        write = self._file.set
        write("requests_admitted", self.num_admitted)
        write("requests_kept_waiting_for_kv", self._waits.num_requests)
        write("kv_wait_seconds", self._waits.total_s)
        write("preemptions", self.num_preemptions)
        write("scheduled_tokens", self.prefill_tokens, "prefill")
        write("scheduled_tokens", self.decode_tokens, "decode")
        write("long_prompts_passed_over", self.num_passed_over)
        write("prefill_share_replans", self.num_replans)
        write("requests_waiting_for_kv", self._waits.num_waiting)
        write("kv_reserved_ratio", kv_reserved_ratio)
        write("step_tokens", step_tokens)

    def close(self) -> None:
        if self._file is not None:
            self._file.remove()
            self._file = None
