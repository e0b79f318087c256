"""How much of the KV cache a request may come to fill: the arithmetic behind admitting it or letting it wait.

Counts only, nothing of vLLM. A request is admitted when its blocks fit beside those that the running ones hold or
will still take, so that nobody has to be preempted half way. `worst_case` counts on max_tokens; `expected` on what nine
of ten recent requests stayed within (request_mix.py), and on max_tokens again after a preemption, until that has been
learned anew; `auto` counts on max_tokens where a request says it, and is like `expected` else; `vllm` reserves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockGroup:
    """Layers that share one table of KV blocks."""

    block_size: int
    """Tokens of a block."""
    most_blocks: int | None = None
    """A sliding window hands blocks back, so that a request never holds more than these; None: it keeps them all."""

    def blocks(self, num_slots: int) -> int:
        needed = -(-num_slots // self.block_size)
        return needed if self.most_blocks is None else min(needed, self.most_blocks)


def blocks_to_come(num_slots: int, held: Sequence[int], groups: Sequence[BlockGroup]) -> int:
    """Blocks that a request still takes from the pool until `num_slots` tokens of it are cached.

    held: blocks per group that it holds already.
    """
    return sum(max(0, group.blocks(num_slots) - blocks) for group, blocks in zip(groups, held, strict=True))


def worst_case_slots(num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> int:
    """Tokens that a request caches at most. The last token that it generates is never fed back, so never cached."""
    return min(num_prompt_tokens + max_tokens - 1, max_model_len)


def expected_slots(
    num_prompt_tokens: int, num_tokens: int, expected_generation: float, margin: int, worst_case: int
) -> int:
    """The same, of a request that has `num_tokens` tokens by now and is expected to generate `expected_generation`.

    margin: tokens, reserved beyond what it has once it outgrew the expectation.
    """
    expected = num_prompt_tokens + math.ceil(expected_generation)
    return min(worst_case, max(expected, num_tokens + margin))
