# SPDX-License-Identifier: Apache-2.0
"""How a step's prefill budget is divided between prompts: invariants, and the bound over many steps."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_moe_lightning.integration.step_limits import StepLimits, step_limits

TOKENS = st.lists(st.integers(1, 4000), max_size=40)


@given(st.integers(64, 4096), st.integers(0, 60), TOKENS, TOKENS, st.integers(1, 16))
def test_prompts_under_way_never_take_the_tokens_of_decoding_requests(
    num_tokens: int, num_decoding: int, started: list[int], waiting: list[int], num_micro_batches: int
) -> None:
    limits = step_limits(num_tokens, num_decoding, started, waiting, num_micro_batches)
    taken = sum(min(limits.chunk_tokens, tokens) for tokens in started)
    assert taken <= max(num_tokens - num_decoding, len(started))
    assert limits.chunk_tokens >= 1


@given(st.integers(64, 4096), TOKENS, TOKENS, st.integers(1, 16))
def test_half_of_the_budget_is_left_to_short_prompts_that_wait(
    budget: int, started: list[int], waiting: list[int], num_micro_batches: int
) -> None:
    limits = step_limits(budget, 0, started, waiting, num_micro_batches)
    short = sum(tokens for tokens in waiting if tokens <= limits.short_tokens)
    taken = sum(min(limits.chunk_tokens, tokens) for tokens in started)
    if len(started) <= budget // 2:
        assert budget - taken >= min(short, budget // 2)


@given(st.integers(64, 4096), TOKENS, st.integers(1, 16))
def test_the_whole_budget_is_used_while_there_are_prompts(
    budget: int, waiting: list[int], num_micro_batches: int
) -> None:
    limits = step_limits(budget, 0, [], waiting, num_micro_batches)
    _, taken = one_step(limits, 0, [], list(waiting))
    assert taken >= min(budget, sum(waiting)) * 0.9 - num_micro_batches


def test_one_prompt_alone_takes_everything() -> None:
    assert step_limits(256, 56, [3000], [], 4) == StepLimits(256, 200, 50, 3)
    assert step_limits(256, 56, [], [3000], 4).chunk_tokens == 200


def test_a_long_prompt_gives_up_only_what_short_ones_need() -> None:
    assert step_limits(200, 0, [3000], [8], 4).chunk_tokens == 192
    assert step_limits(200, 0, [3000], [40, 40, 40], 4).chunk_tokens == 100


def test_long_prompts_share_the_budget_so_that_each_micro_batch_has_a_row() -> None:
    limits = step_limits(200, 0, [], [3000] * 10, 4)
    assert (limits.chunk_tokens, limits.new_long_prompts) == (50, 4)
    limits = step_limits(200, 0, [900, 3], [3000] * 10, 4)
    assert limits.new_long_prompts == 3
    assert 45 <= limits.chunk_tokens <= 50


def one_step(
    limits: StepLimits, num_decoding: int, started: list[int], waiting: list[int]
) -> tuple[list[int | None], int]:
    """As vLLM's scheduler does it: those begun first, then the queue. Tokens given to each, None: passed over."""
    left, new_long, given = limits.num_tokens - num_decoding, 0, []
    for tokens in started:
        given.append(min(tokens, limits.chunk_tokens, left))
        left -= given[-1]
    for tokens in waiting:
        is_long = tokens > limits.short_tokens
        if left == 0 or (is_long and new_long == limits.new_long_prompts):
            given.append(None)
            continue
        new_long += is_long
        given.append(min(tokens, limits.chunk_tokens, left))
        left -= given[-1]
    return given, limits.num_tokens - num_decoding - left


@pytest.mark.parametrize("seed", range(20))
def test_no_short_prompt_waits_longer_than_the_bound(seed: int) -> None:
    generator = random.Random(seed)
    micro_batches, budget = generator.choice([1, 2, 4, 8]), generator.randint(64, 300)
    share = budget // max(2, micro_batches)
    left, arrived, done = {}, {}, {}
    for step in range(600):
        if step < 300:
            for _ in range(generator.choice([0, 0, 1, 1, 2])):
                is_long = generator.random() < 0.1
                name = len(arrived)
                left[name] = generator.randint(share + 1, 20 * share) if is_long else generator.randint(1, share)
                arrived[name] = (step, left[name])
        begun = [name for name in left if left[name] < arrived[name][1]]
        queue = [name for name in left if left[name] == arrived[name][1]]
        limits = step_limits(budget, 0, [left[n] for n in begun], [left[n] for n in queue], micro_batches)
        given, _ = one_step(limits, 0, [left[n] for n in begun], [left[n] for n in queue])
        for name, tokens in zip(begun + queue, given, strict=True):
            left[name] -= tokens or 0
            if left[name] == 0:
                del left[name]
                done[name] = step
    for name, (step, tokens) in arrived.items():
        if tokens <= share:
            ahead = sum(
                other_tokens
                for other, (_, other_tokens) in arrived.items()
                if other <= name and other_tokens <= share and done.get(other, 10**9) >= step
            )
            assert done[name] - step <= math.ceil(ahead / (budget // 2)) + 2
    assert not left or max(arrived[name][1] for name in left) > share
