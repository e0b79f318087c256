# SPDX-License-Identifier: Apache-2.0
"""A step's rows are split into micro-batches of nearly equal work, and stay where they were."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_moe_lightning.pipeline.batching import (
    STABLE_WITHIN,
    MicroBatchSplitter,
    RowCosts,
    StepRows,
    balanced_micro_batches,
    micro_batch_count,
    token_ranges,
)

ROWS = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 5000)), min_size=1, max_size=60).map(
    lambda rows: ([query for query, _ in rows], [query + context for query, context in rows])
)
BLOCK = 16
COSTS = RowCosts()


def loads_of(rows: tuple[list[int], list[int]], groups: list[list[int]]) -> list[int]:
    return [sum(COSTS.of(rows[0][row], rows[1][row]) for row in group) for group in groups]


@given(ROWS, st.integers(1, 16))
def test_every_row_is_in_one_micro_batch_and_none_is_empty(rows: tuple[list[int], list[int]], count: int) -> None:
    groups = balanced_micro_batches(*rows, count)
    assert len(groups) == min(count, len(rows[0]))
    assert all(groups)
    assert sorted(row for group in groups for row in group) == list(range(len(rows[0])))
    assert all(group == sorted(group) for group in groups)


@given(ROWS, st.integers(1, 16))
def test_micro_batches_differ_by_at_most_the_costliest_row(rows: tuple[list[int], list[int]], count: int) -> None:
    loads = loads_of(rows, balanced_micro_batches(*rows, count))
    assert max(loads) - min(loads) <= max(COSTS.of(query, seq) for query, seq in zip(*rows, strict=True))


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


def test_each_token_of_a_prompt_reads_what_stands_before_it() -> None:
    costs = RowCosts(query_token=10)
    assert costs.of(1, 100) == 10 + 100
    assert costs.of(3, 5) == 3 * 10 + (3 + 4 + 5)
    assert costs.of(4, 4) == 4 * 10 + (1 + 2 + 3 + 4)


def test_a_step_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="without rows"):
        balanced_micro_batches([], [], 4)


@pytest.mark.parametrize(
    ("num_tokens", "planned_size", "expected"),
    [(1000, None, 8), (1000, 100, 8), (350, 100, 4), (20, 100, 2), (1, 100, 2), (801, 100, 8)],
)
def test_small_steps_take_fewer_micro_batches_of_the_planned_size(
    num_tokens: int, planned_size: int | None, expected: int
) -> None:
    assert micro_batch_count(num_tokens, 8, planned_size) == expected


# ---------------------------------------------------------------- from step to step


class Batch:
    """Sequences that decode, each over its own blocks; a sequence may take any row."""

    def __init__(self, lens: list[int]) -> None:
        self.lens = dict(enumerate(lens))
        self.order = list(self.lens)

    def step(self) -> StepRows:
        """One token more for each."""
        for name in self.order:
            self.lens[name] += 1
        table = np.array([[name * 500 + column for column in range(500)] for name in self.order], dtype=np.int32)
        return StepRows([1] * len(self.order), [self.lens[name] for name in self.order], [(table, BLOCK)])

    def places(self, splitter: MicroBatchSplitter, count: int) -> dict[int, int]:
        """Sequence -> micro-batch."""
        groups, _ = splitter.split(self.step(), count)
        return {self.order[row]: place for place, rows in enumerate(groups) for row in rows}


def test_sequences_stay_in_their_micro_batch_while_they_decode() -> None:
    batch, splitter = Batch([10 + 37 * index % 400 for index in range(40)]), MicroBatchSplitter(COSTS)
    first = batch.places(splitter, 4)
    for _ in range(100):
        assert batch.places(splitter, 4) == first


def test_sequences_stay_in_their_micro_batch_when_rows_move_and_others_come_and_go() -> None:
    batch, splitter = Batch([100 + index for index in range(40)]), MicroBatchSplitter(COSTS)
    before = batch.places(splitter, 4)
    moved = 0
    for step in range(60):
        if step % 3 == 0:  # one ends, the last row takes its place, and a new one comes
            gone = (7 * step) % len(batch.order)
            batch.order[gone] = batch.order[-1]
            batch.order[-1] = len(batch.lens)
            batch.lens[batch.order[-1]] = 120
        now = batch.places(splitter, 4)
        moved += sum(now[name] != place for name, place in before.items() if name in now)
        before = now
    assert moved == 0


def test_a_split_that_has_become_uneven_is_made_anew() -> None:
    batch, splitter = Batch([100] * 8), MicroBatchSplitter(COSTS)
    before = batch.places(splitter, 4)
    for name in batch.order:
        if before[name] == 0:
            batch.lens[name] = 2000
    now = batch.places(splitter, 4)
    assert len({now[name] for name in batch.order if batch.lens[name] > 1000}) == 2


@given(st.lists(st.lists(st.integers(1, 3000), min_size=1, max_size=30), min_size=2, max_size=4), st.integers(1, 8))
def test_a_kept_split_is_nearly_as_even_as_a_new_one(steps: list[list[int]], count: int) -> None:
    """Whatever the lengths become between two steps."""
    splitter = MicroBatchSplitter(COSTS)
    for lens in steps:
        step = Batch(lens).step()
        rows = (list(step.query_lens), list(step.seq_lens))
        groups, _ = splitter.split(step, count)
        assert len(groups) == min(count, len(lens))
        assert all(groups)
        assert sorted(row for group in groups for row in group) == list(range(len(lens)))
        anew = loads_of(rows, balanced_micro_batches(*rows, count))
        even = max(sum(anew) / len(groups), *(COSTS.of(1, seq) for seq in rows[1]))
        assert max(loads_of(rows, groups)) <= STABLE_WITHIN * max(even, max(anew))


# ---------------------------------------------------------------- same-step prefix hits


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
    ],
)
def test_rows_of_which_one_reads_what_another_writes_share_a_micro_batch(
    query_lens: list[int], seq_lens: list[int], tables: list[list[int]], expected: bool
) -> None:
    width = max(map(len, tables))
    table = np.array([row + [-1] * (width - len(row)) for row in tables], dtype=np.int32)
    groups, linked = MicroBatchSplitter(COSTS).split(StepRows(query_lens, seq_lens, [(table, BLOCK)]), 2)
    assert bool(linked) == expected
    assert len(groups) == (1 if expected else 2)


def test_rows_that_share_nothing_are_spread_beside_those_that_do() -> None:
    """Rows 1 and 4 read what row 2 writes, in one group of layers and in another."""
    queries, seqs = [40, 8, 40, 40, 8, 40], [40, 40, 40, 40, 40, 40]
    own = np.array([[10 * row, 10 * row + 1, 10 * row + 2] for row in range(6)], dtype=np.int32)
    first, second = own.copy(), own.copy()
    first[1, :2] = own[2, :2]
    second[4, :2] = own[2, :2]
    step = StepRows(queries, seqs, [(first, BLOCK), (second, BLOCK)])
    groups, linked = MicroBatchSplitter(COSTS).split(step, 4)
    assert linked
    assert [1, 2, 4] in groups
    assert len(groups) == 4


def test_one_row_goes_on_filling_the_block_that_it_began() -> None:
    step = StepRows([10], [20], [(np.array([[0, 1]], dtype=np.int32), BLOCK)])
    assert MicroBatchSplitter(COSTS).split(step, 4) == ([[0]], frozenset())


@pytest.mark.parametrize(
    ("num_tokens", "most", "least_tokens", "expected"),
    [
        (64, 3, 1, [(0, 22), (22, 44), (44, 64)]),
        (64, 1, 1, [(0, 64)]),
        (2, 4, 1, [(0, 1), (1, 2)]),
        (64, 4, 30, [(0, 30), (30, 60), (60, 64)]),
        (10, 4, 30, [(0, 10)]),
    ],
)
def test_tokens_without_rows_are_cut_into_ranges_of_a_least_size(
    num_tokens: int, most: int, least_tokens: int, expected: list[tuple[int, int]]
) -> None:
    assert token_ranges(num_tokens, most, least_tokens) == expected
