"""How many tokens a step takes, and how many of them one prompt: keeps long prompts from starving short ones.

Plain arithmetic on token counts; what may be scheduled at all (slots, KV blocks) is decided before.

The bound. Let B be the prefill budget of a step: its token limit less one token for each decoding request. A share is
q = B // max(2, number of micro-batches); a prompt of at most q tokens is short, any other long. While short prompts
wait, those already begun and the long ones together get at most B - min(W, B // 2) tokens of a step, W being the tokens
of the short ones that wait. So a short prompt that finds a slot and blocks, with S tokens of short prompts ahead of it
in the queue (its own counted), has its first token at most

    ceil(S / (B // 2)) + 2

steps after it came, for any number and length of long ones. B is the smallest budget of those steps, and at least four
tokens per micro-batch. The long ones keep half, so that a prompt takes at most twice its time. With no short prompt
waiting they share the whole budget, at least q tokens each, so that the pipeline has a row for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

MOST_SCANNED = 1024
"""Waiting requests that are looked at in a step; the bound holds among these."""


@dataclass(frozen=True)
class StepLimits:
    num_tokens: int
    """Of the step, decoded tokens included."""
    chunk_tokens: int
    """Most prompt tokens of one request in this step."""
    short_tokens: int
    """A waiting prompt of more tokens than these is a long one."""
    new_long_prompts: int
    """How many long prompts may start in this step."""


def step_limits(
    num_tokens: int, num_decoding: int, started: Sequence[int], waiting: Iterable[int], num_micro_batches: int
) -> StepLimits:
    """num_tokens: most tokens of this step. started: tokens left of each prompt begun before. waiting: tokens of each
    prompt that could start now, in the queue's order."""
    budget = max(0, num_tokens - num_decoding)
    share = max(1, budget // max(2, num_micro_batches))
    short_tokens = 0
    long_prompts: list[int] = []
    for tokens in islice(waiting, MOST_SCANNED):
        if tokens > share:
            long_prompts.append(tokens)
        else:
            short_tokens += tokens
    for_long = budget - min(short_tokens, budget // 2)
    fed = sum(min(share, tokens) for tokens in started)
    num_new = max(0, -(-(for_long - fed) // share))
    return StepLimits(num_tokens, _level([*started, *long_prompts[:num_new]], for_long), share, num_new)


def _level(prompts: Sequence[int], budget: int) -> int:
    """The cap under which the prompts together take just `budget` tokens; at least 1, so that each moves on."""
    left = budget
    for index, tokens in enumerate(sorted(prompts)):
        level = left // (len(prompts) - index)
        if tokens > level:
            return max(1, level)
        left -= tokens
    return max(1, budget)
