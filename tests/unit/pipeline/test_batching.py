# SPDX-License-Identifier: Apache-2.0
"""A step's rows are split into micro-batches of nearly equal work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_moe_lightning.pipeline.batching import (
    balanced_micro_batches,
    reads_blocks_written_in_this_step,
    row_cost,
)

ROWS = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 5000)), min_size=1, max_size=60).map(
    lambda rows: ([query for query, _ in rows], [query + context for query, context in rows])
)
BLOCK = 16


@given(ROWS, st.integers(1, 16))
def test_every_row_is_in_one_micro_batch_and_none_is_empty(rows: tuple[list[int], list[int]], count: int) -> None:
    groups = balanced_micro_batches(*rows, count)
    assert len(groups) == min(count, len(rows[0]))
    assert all(groups)
    assert sorted(row for group in groups for row in group) == list(range(len(rows[0])))
    assert all(group == sorted(group) for group in groups)


@given(ROWS, st.integers(1, 16))
def test_micro_batches_differ_by_at_most_the_costliest_row(rows: tuple[list[int], list[int]], count: int) -> None:
    costs = [row_cost(query, context) for query, context in zip(*rows, strict=True)]
    loads = [sum(costs[row] for row in group) for group in balanced_micro_batches(*rows, count)]
    assert max(loads) - min(loads) <= max(costs)


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 5000))
def test_equal_rows_are_split_into_counts_that_differ_by_at_most_one(num_rows: int, count: int, context: int) -> None:
    sizes = [len(group) for group in balanced_micro_batches([1] * num_rows, [context] * num_rows, count)]
    assert max(sizes) - min(sizes) <= 1


@given(ROWS, st.integers(1, 16))
def test_the_split_depends_on_nothing_but_the_rows(rows: tuple[list[int], list[int]], count: int) -> None:
    assert balanced_micro_batches(*rows, count) == balanced_micro_batches(*map(tuple, rows), count)


def test_the_longest_rows_go_to_different_micro_batches() -> None:
    groups = balanced_micro_batches([1] * 6, [1000, 10, 1000, 10, 1000, 10], 3)
    assert [sum(row % 2 == 0 for row in group) for group in groups] == [1, 1, 1]


def test_a_prompt_costs_more_than_a_decoded_token_of_the_same_context() -> None:
    assert row_cost(100, 100) > row_cost(1, 100)


def test_a_step_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="without rows"):
        balanced_micro_batches([], [], 4)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "tables", "expected"),
    [
        # Row 1 finds in the cache the first block of the prompt that row 0 is only now computing.
        ([20, 4], [20, 20], [[0, 1], [0, 2]], True),
        # The same where just one token is left to compute, so that the row looks like decoding.
        ([17, 1], [17, 17], [[0, 1], [0, 2]], True),
        # A decoding row fills block 0, and a prompt finds it.
        ([1, 4], [16, 20], [[0, 1], [0, 2]], True),
        ([1, 1], [16, 17], [[0, 1], [0, 2]], True),
        # The order of the rows does not matter.
        ([4, 20], [20, 20], [[0, 2], [0, 1]], True),
        # The shared block was computed in an earlier step.
        ([4, 4], [20, 20], [[0, 1], [0, 2]], False),
        ([1, 1], [20, 25], [[0, 1], [0, 2]], False),
        # Nothing is shared; what stands behind the end of a row is not read.
        ([20, 4], [20, 20], [[0, 1], [3, 2]], False),
        ([20, 4], [20, 20], [[0, 1], [3, 2, 0, 1]], False),
        # A chunk goes on from its own blocks.
        ([16, 1], [32, 5], [[0, 1], [2, 9]], False),
        # A row that takes no part in the step reads nothing.
        ([20, 0], [20, 20], [[0, 1], [0, 2]], False),
        ([0, 0], [0, 0], [[0], [0]], False),
        # A row reads the block it began in an earlier step and goes on filling.
        ([10], [20], [[0, 1]], False),
    ],
)
def test_a_prefix_hit_on_blocks_of_the_same_step_is_seen(
    query_lens: list[int], seq_lens: list[int], tables: list[list[int]], expected: bool
) -> None:
    width = max(map(len, tables))
    padded = [table + [-1] * (width - len(table)) for table in tables]
    assert reads_blocks_written_in_this_step(query_lens, seq_lens, padded, BLOCK) == expected
