"""When events of the GPU happened, on the clock that the host's threads are timed by."""

from __future__ import annotations

import time

from vllm_moe_lightning.device.cuda_runtime import CudaRuntime, EventHandle, StreamHandle

# CUDA counts between two events in 32-bit floats of milliseconds: after ten seconds to 1 us, after a day to 8 ms. And
# the GPU's clock drifts from the host's.
RENEW_AFTER_S = 10.0
# An event on an idle stream is complete within some 10 us; its time is known to half of what it took.
LONGEST_LOOK_S = 100e-6


class CudaClock:
    """Event times on time.monotonic()'s clock, counted from an origin: an event whose time is known."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._idle_stream = runtime.new_stream("clock")  # gets no work, so that its events wait for none
        self._origin: tuple[EventHandle, float] = (None, 0.0)  # one value, for the threads that read it meanwhile
        self._tried_s = 0.0

    def set(self, stream: StreamHandle) -> None:
        """Blocks the host until the stream is idle."""
        event = self._runtime.record(stream)
        self._runtime.host_wait(event, None)
        self._tried_s = time.monotonic()
        self._origin = event, self._tried_s

    def keep_recent(self) -> None:
        """Takes a new origin where the old one is old, without waiting for what the GPU is at. One that does not come
        at once is left for the next time."""
        begin_s = end_s = time.monotonic()
        if begin_s - self._tried_s < RENEW_AFTER_S:
            return
        self._tried_s = begin_s
        event = self._runtime.record(self._idle_stream)
        while not self._runtime.is_complete(event):
            end_s = time.monotonic()
            if end_s - begin_s > LONGEST_LOOK_S:
                return
        self._origin = event, (begin_s + end_s) / 2

    def time_s(self, event: EventHandle) -> float:
        """Of a complete event."""
        origin, origin_s = self._origin
        elapsed_s = self._runtime.seconds_between(origin, event)
        time_s = origin_s + elapsed_s
        if elapsed_s > 2 * RENEW_AFTER_S:  # no new origin came at once: count on from here, by the GPU's own clock
            self._origin = event, time_s
        return time_s
