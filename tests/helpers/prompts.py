# SPDX-License-Identifier: Apache-2.0
"""The standard prompts of the parity tests: token ids of mixed lengths, from a seed."""

from __future__ import annotations

import random

NUM_NEW_TOKENS = 24
MAX_PROMPT_TOKENS = 200  # with NUM_NEW_TOKENS below the engine's max_model_len of 256

# One token, and both sides of the block (32) and kernel boundaries. The rest of the lengths is random.
_BOUNDARY_LENGTHS = (1, 31, 32, 33, 63, 64, 65, 2, 96, 127, 128, 129, MAX_PROMPT_TOKENS)


def standard_prompts(num_prompts: int = 64, *, seed: int = 0, max_tokens: int = MAX_PROMPT_TOKENS) -> list[list[int]]:
    """The first `num_prompts` of a fixed endless list: a smaller set is a prefix of a larger one."""
    generator = random.Random(seed)
    prompts = []
    for index in range(num_prompts):
        # Every other prompt has a boundary length until those are used up, so that small sets are mixed, too.
        boundary = index // 2 if index % 2 == 0 else None
        length = generator.randint(1, max_tokens)
        if boundary is not None and boundary < len(_BOUNDARY_LENGTHS):
            length = min(_BOUNDARY_LENGTHS[boundary], max_tokens)
        prompts.append([generator.randrange(256) for _ in range(length)])
    return prompts
