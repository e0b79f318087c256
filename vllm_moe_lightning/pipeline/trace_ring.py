"""The last sweeps of a running engine: what its streams recorded, kept until somebody asks for it."""

from __future__ import annotations

import threading
import time
from collections import deque

from vllm_moe_lightning.pipeline.executor import PipelineExecutor
from vllm_moe_lightning.pipeline.trace import Trace, TraceSource, TraceSpan
from vllm_moe_lightning.resources import RESOURCE_OF, STREAM_OF


class TraceRing:
    """Switches recording on. Each stream keeps its newest `num_operations`.

    `trace` may be called by any thread, again and again, while sweeps run.
    """

    def __init__(self, executor: PipelineExecutor, num_operations: int) -> None:
        self._executor = executor
        self._num_operations = num_operations
        self._spans: deque[TraceSpan] = deque(maxlen=num_operations * len(STREAM_OF))
        self._begin_s = time.monotonic()  # before it, some stream's records are gone
        self._lock = threading.Lock()
        executor.device.set_recording(num_operations)

    def trace(self) -> Trace:
        """All sweeps and spans since the moment from which on every stream's records are there."""
        executor = self._executor
        with self._lock:
            # First: a sweep that ends from now on may have spans that are not drained yet.
            sweeps = executor.recent_sweeps.copy()
            fresh = [
                TraceSpan(RESOURCE_OF[r.stream], r.label, r.start_s, r.end_s, r.num_bytes)
                for r in executor.device.drain_records()
            ]
            for resource in STREAM_OF:
                of_resource = [span.start_s for span in fresh if span.resource is resource]
                if len(of_resource) >= self._num_operations:
                    self._begin_s = max(self._begin_s, of_resource[0])
            if len(self._spans) + len(fresh) > self._num_operations * len(STREAM_OF):
                kept = [*self._spans, *fresh][-self._num_operations * len(STREAM_OF) :]
                self._begin_s = max(self._begin_s, kept[0].start_s)
            self._spans.extend(fresh)
            spans = tuple(span for span in self._spans if span.start_s >= self._begin_s)
        policy = executor.policy
        source = TraceSource(
            executor.device.kind,
            policy.schedule,
            policy.lookahead,
            executor.pages_per_layer,
            with_attention=not policy.attention_on_device,
        )
        return Trace(source, tuple(sweep for sweep in sweeps if sweep.start_s >= self._begin_s), spans)
