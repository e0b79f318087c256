"""Rates over the last seconds, from totals that only grow."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

SAMPLES_PER_WINDOW = 50


class SlidingWindow:
    """Keeps samples of some totals, no denser than it needs; `add` must be called now and then, with rising times."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._samples: deque[tuple[float, dict[str, float]]] = deque()

    def rates(self, now_s: float, totals: Mapping[str, float], at_least_s: float = 0.0) -> dict[str, float]:
        """Growth per second over the last `window_s`, or `at_least_s` if that is longer: a rate of what comes in
        large steps must look back over some of them. Remembers `totals` as those of `now_s`."""
        length_s = max(self.window_s, at_least_s)
        while len(self._samples) > 1 and self._samples[1][0] <= now_s - length_s:
            self._samples.popleft()
        if not self._samples or now_s - self._samples[-1][0] >= length_s / SAMPLES_PER_WINDOW:
            self._samples.append((now_s, dict(totals)))
        began_s, before = self._samples[0]
        elapsed_s = now_s - began_s
        if elapsed_s <= 0:
            return dict.fromkeys(totals, 0.0)
        return {name: (total - before.get(name, 0.0)) / elapsed_s for name, total in totals.items()}
