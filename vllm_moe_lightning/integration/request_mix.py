"""What requests have been like lately, and what the prefill share of a sweep should be for such.

Observes and computes; the scheduler applies it.
"""

from __future__ import annotations

import math
from collections import deque

from vllm_moe_lightning.engine_plan import GIVEN, EnginePlan

LEAST_OBSERVED = 64
"""Finished requests before their lengths are believed; more where more run at once, see RequestMix."""
EXPECTED_QUANTILE = 0.9
MARGIN_OVER_PLAN = 1.25
TINY = 1e-9  # keeps a mean of zero from dividing by it
DEPARTURE = 1.5
"""The share is computed anew when a mean length differs by this factor from what it was computed for."""


class RequestMix:
    """Prompt and generated lengths of the requests that finished last.

    Short answers finish first, so nothing is believed until as many have finished as can run at once.
    planned_generation: tokens to go by until then; None: none.
    """

    def __init__(self, most_running: int, planned_generation: float | None = None) -> None:
        self.window = max(LEAST_OBSERVED, most_running)
        self.num_finished = 0
        self._lengths: deque[tuple[int, int]] = deque(maxlen=self.window)
        self._expected: int | None = None
        self._planned = None if planned_generation is None else math.ceil(MARGIN_OVER_PLAN * planned_generation)

    def record(self, num_prompt_tokens: int, num_generated_tokens: int) -> None:
        self._lengths.append((num_prompt_tokens, num_generated_tokens))
        self.num_finished += 1
        self._expected = None

    def forget(self) -> None:
        self._lengths.clear()
        self._expected = self._planned = None

    @property
    def is_known(self) -> bool:
        return len(self._lengths) == self.window

    def means(self) -> tuple[float, float]:
        """(prompt tokens, generated tokens) of a request. Only where `is_known`."""
        count = len(self._lengths)
        return sum(prompt for prompt, _ in self._lengths) / count, sum(length for _, length in self._lengths) / count

    def expected_generation(self) -> int | None:
        """What EXPECTED_QUANTILE of the requests stayed within, or what was planned; None after `forget`, until enough
        have finished again."""
        if self._expected is None and self.is_known:
            lengths = sorted(length for _, length in self._lengths)
            self._expected = lengths[math.ceil(EXPECTED_QUANTILE * len(lengths)) - 1]
        return self._planned if self._expected is None else self._expected


class PrefillShare:
    """Prompt tokens that a sweep takes beside its decode tokens, by the plan, and by what comes instead.

    In the steady state each of N sequences is replaced after n sweeps by one with s prompt tokens, so that a sweep
    takes N s / n of them. A sweep that never takes more than N + N s / n tokens keeps requests from starting, and
    ending, all together, which would leave the CPU idle while prompts are read and the GPU idle after. A prompt of mean
    length is taken whole, however few run. A share that the user gave stays as it is.
    """

    def __init__(self, plan: EnginePlan, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._num_seqs, self._limit = max_num_seqs, max_num_batched_tokens
        self._means = (plan.expected_prompt_tokens, plan.expected_generation_tokens)
        self._is_given = plan.reasons.get("prefill_tokens_per_sweep") == GIVEN
        least = 1.0 if self._is_given else plan.expected_prompt_tokens
        self._tokens = self._within_limit(max(plan.prefill_tokens_per_sweep, least))
        self._next_look = 0
        self._is_suspected = False

    def _within_limit(self, tokens: float) -> int:
        return max(1, min(round(tokens), self._limit - self._num_seqs))

    @property
    def tokens_per_sweep(self) -> int:
        """Decoded and prompt tokens together."""
        return min(self._limit, self._num_seqs + self._tokens)

    def adapt(self, mix: RequestMix) -> str | None:
        """Compute the share anew if the requests have become others; the sentence to log then.

        At the first sign of it the window still holds requests of both kinds, so the second look, one window later,
        decides.
        """
        if self._is_given or not mix.is_known or mix.num_finished < self._next_look:
            return None
        means = mix.means()
        ratios = [now / max(was, TINY) for now, was in zip(means, self._means, strict=True)]
        is_other = not all(1 / DEPARTURE <= ratio <= DEPARTURE for ratio in ratios)
        if not is_other or not self._is_suspected:
            self._is_suspected = is_other
            self._next_look = mix.num_finished + (mix.window if is_other else 0)
            return None
        self._is_suspected = False
        (was_prompt, was_generated), was_tokens = self._means, self._tokens
        self._means, (prompt, generated) = means, means
        wanted = prompt * max(self._num_seqs / max(generated, TINY), 1.0)
        self._tokens = self._within_limit(wanted)
        sentence = (
            f"requests have {prompt:.0f} prompt and {generated:.0f} generated tokens on average, not {was_prompt:.0f} "
            f"and {was_generated:.0f}: a sweep takes up to {self._tokens} prompt tokens beside the decoding ones from "
            f"now on, before {was_tokens}"
        )
        if round(wanted) > self._tokens:
            sentence += f"; {wanted:.0f} would be right, but max_num_batched_tokens is {self._limit}"
        return sentence
