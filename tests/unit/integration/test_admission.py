# SPDX-License-Identifier: Apache-2.0
"""KV blocks that a request may still take, in the worst case and by expectation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_moe_lightning.integration.admission import BlockGroup, blocks_to_come, expected_slots, worst_case_slots

FULL = BlockGroup(block_size=32)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "expected"), [(1, 1, 1), (60, 60, 119), (200, 56, 255), (200, 57, 256), (10, 5000, 256)]
)
def test_the_last_token_is_never_cached_and_none_beyond_the_model(prompt: int, max_tokens: int, expected: int) -> None:
    assert worst_case_slots(prompt, max_tokens, 256) == expected


@pytest.mark.parametrize(("slots", "held", "expected"), [(1, 0, 1), (32, 0, 1), (33, 0, 2), (33, 1, 1), (33, 4, 0)])
def test_blocks_held_already_are_not_needed_again(slots: int, held: int, expected: int) -> None:
    assert blocks_to_come(slots, [held], [FULL]) == expected


def test_a_sliding_window_needs_no_more_than_its_window() -> None:
    window = BlockGroup(block_size=32, most_blocks=3)
    assert blocks_to_come(1000, [0], [window]) == 3
    assert blocks_to_come(33, [0], [window]) == 2
    assert blocks_to_come(1000, [32, 2], [FULL, window]) == 0 + 1


@given(st.integers(1, 300), st.integers(0, 300), st.integers(1, 400), st.floats(0, 500), st.integers(1, 64))
def test_the_expectation_lies_between_what_is_there_and_the_worst_case(
    prompt: int, generated: int, max_tokens: int, expectation: float, margin: int
) -> None:
    worst = worst_case_slots(prompt, max_tokens, 4096)
    slots = expected_slots(prompt, prompt + generated, expectation, margin, worst)
    assert slots <= worst
    assert slots >= min(worst, prompt + generated)


def test_a_request_that_outgrew_the_expectation_keeps_a_margin_ahead() -> None:
    assert expected_slots(10, 10, 20.0, 32, 500) == 42
    assert expected_slots(10, 40, 20.0, 32, 500) == 72
