"""Splits the rows of a step into micro-batches of equal work (the paper's Algorithm 2, mended), and keeps the split
from step to step.

Longest first to the least loaded micro-batch. Unlike the listing: every row is placed (admission is the scheduler's
business, so nothing is aborted), the count of rows is capped so that no micro-batch is empty, and ties are broken by
row number. All that decides is in the step's own figures, so that all tensor-parallel ranks split alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

QUERY_TOKEN_COST = 64
"""Without a plan: projections and MoE on the GPU, against reading one K and one V row on the CPU."""
STABLE_WITHIN = 1.1
"""A split is kept while its largest micro-batch is within this factor of what splitting anew could reach."""


@dataclass(frozen=True)
class RowCosts:
    """Relative work of a row, in units of one context token that attention reads for one query token."""

    query_token: int = QUERY_TOKEN_COST
    """Work of a query token outside of attention."""

    def of(self, query_len: int, seq_len: int) -> int:
        """query_len new tokens, of seq_len in all: each reads the tokens up to itself."""
        context_tokens = query_len * (2 * seq_len - query_len + 1) // 2
        return query_len * self.query_token + context_tokens


@dataclass(frozen=True)
class StepRows:
    """The rows of a step, in the batch's order, each with a new token at least."""

    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    """New tokens included."""
    tables: Sequence[tuple[npt.NDArray[np.int32], int]]
    """(block table [rows, >= blocks of the longest row], block size) of each group of layers with blocks of its own."""


class MicroBatchSplitter:
    """Remembers which micro-batch a sequence was in, so that it stays there and the micro-batches keep their sizes.

    A sequence is known by the block that holds its last token: it is written there next, so no other sequence has it.
    """

    def __init__(self, costs: RowCosts) -> None:
        self._costs = costs
        self._place_of_block: Mapping[int, int] = {}

    def split(self, step: StepRows, num_micro_batches: int) -> tuple[list[list[int]], frozenset[int]]:
        """Rows of each micro-batch, ascending: at most `num_micro_batches` lists, none empty; and the rows that had to
        be kept together because one reads what another writes in this very step."""
        units = _linked_rows(step)
        costs = [sum(self._costs.of(step.query_lens[row], step.seq_lens[row]) for row in unit) for unit in units]
        count = min(num_micro_batches, len(units))
        computed = [seq - query for query, seq in zip(step.query_lens, step.seq_lens, strict=True)]
        before = [self._place_of_block.get(block, -1) for block in _last_blocks(step, computed)]
        places = _stable_places(costs, [before[unit[0]] for unit in units], count)
        rows_of: list[list[int]] = [[] for _ in range(count)]
        for unit, place in zip(units, places, strict=True):
            rows_of[place] += unit
        groups = [sorted(rows) for rows in rows_of]
        place_of_row = {row: place for place, rows in enumerate(groups) for row in rows}
        self._place_of_block = {
            block: place_of_row[row] for row, block in enumerate(_last_blocks(step, step.seq_lens)) if block >= 0
        }
        return groups, frozenset(row for unit in units if len(unit) > 1 for row in unit)


def micro_batch_count(num_tokens: int, most: int, planned_size: int | None) -> int:
    """Micro-batches for a step of `num_tokens`: no smaller than planned, since each costs launches and reads a layer's
    experts again; but two, so that the CPU's work hides behind the device's. `planned_size`: None without a plan."""
    if planned_size is None:
        return most
    return min(most, max(2, -(-num_tokens // planned_size)))


def token_ranges(num_tokens: int, most: int, least_tokens: int) -> list[tuple[int, int]]:
    """[begin, end) of `most` micro-batches of tokens without rows, of `least_tokens` each if there are as many."""
    size = max(1, -(-num_tokens // most), least_tokens)
    return [(begin, min(num_tokens, begin + size)) for begin in range(0, num_tokens, size)]


def balanced_micro_batches(
    query_lens: Sequence[int], seq_lens: Sequence[int], num_micro_batches: int, costs: RowCosts | None = None
) -> list[list[int]]:
    """Rows of each micro-batch, ascending. At most `num_micro_batches` lists, none empty.

    query_lens, seq_lens: per row, new tokens and context length with the new tokens included.
    """
    if not query_lens:
        raise ValueError("a step without rows cannot be split")
    costs = costs or RowCosts()
    row_costs = [costs.of(query, context) for query, context in zip(query_lens, seq_lens, strict=True)]
    count = min(num_micro_batches, len(row_costs))
    rows_of: list[list[int]] = [[] for _ in range(count)]
    for row, place in enumerate(_balanced_places(row_costs, [-1] * len(row_costs), count)):
        rows_of[place].append(row)
    return rows_of


def _balanced_places(costs: Sequence[int], fixed: Sequence[int], count: int) -> list[int]:
    """The micro-batch of each unit: its fixed one where that is not -1, else, costliest first, the least loaded."""
    places = list(fixed)
    loads, sizes = [0] * count, [0] * count
    for place, cost in zip(places, costs, strict=True):
        if place >= 0:
            loads[place] += cost
            sizes[place] += 1
    heap = [(loads[place], sizes[place], place) for place in range(count)]
    heapq.heapify(heap)
    for unit in sorted((u for u in range(len(costs)) if places[u] < 0), key=lambda unit: (-costs[unit], unit)):
        load, size, place = heap[0]
        heapq.heapreplace(heap, (load + costs[unit], size + 1, place))
        places[unit] = place
    return places


def _stable_places(costs: Sequence[int], before: Sequence[int], count: int) -> list[int]:
    """`before`: where each unit was in the last step, -1 for a new one."""
    kept = _balanced_places(costs, [place if place < count else -1 for place in before], count)
    if len(set(kept)) == count and _largest(costs, kept, count) <= STABLE_WITHIN * max(sum(costs) / count, max(costs)):
        return kept
    anew = _balanced_places(costs, [-1] * len(costs), count)
    is_kept = len(set(kept)) == count and _largest(costs, kept, count) <= STABLE_WITHIN * _largest(costs, anew, count)
    return kept if is_kept else anew


def _largest(costs: Sequence[int], places: Sequence[int], count: int) -> int:
    loads = [0] * count
    for cost, place in zip(costs, places, strict=True):
        loads[place] += cost
    return max(loads)


def _last_blocks(step: StepRows, lens: Sequence[int]) -> list[int]:
    """Per row, the block with the last of its first `lens` tokens; -1 for none."""
    table, block_size = step.tables[0]
    columns = (np.asarray(lens) - 1) // block_size
    blocks = table[np.arange(len(columns)), np.maximum(columns, 0)]
    found: list[int] = np.where(columns >= 0, blocks, -1).tolist()
    return found


def _linked_rows(step: StepRows) -> list[list[int]]:
    """Rows that must share a micro-batch, since one's cached context lies in blocks that another writes in this step (a
    same-step prefix hit): the kernel appends all keys and values of a micro-batch before it reads any.

    A hit may leave a prompt a single token to compute, so that no row can be passed over as decoding.
    """
    root = list(range(len(step.query_lens)))

    def find(row: int) -> int:
        while root[row] != row:
            root[row] = root[root[row]]
            row = root[row]
        return row

    for table, block_size in step.tables:
        for reader, writer in _reads_of_blocks_written(step, table, block_size):
            first, second = sorted((find(reader), find(writer)))
            root[second] = first
    units: dict[int, list[int]] = {}
    for row in range(len(root)):
        units.setdefault(find(row), []).append(row)
    return list(units.values())


def _reads_of_blocks_written(step: StepRows, table: npt.NDArray[np.int32], block_size: int) -> list[tuple[int, int]]:
    """(row that reads, row that writes) for each block both read and written in this step."""
    query, seq = np.asarray(step.query_lens)[:, None], np.asarray(step.seq_lens)[:, None]  # [rows, 1]
    computed_blocks, num_blocks = (seq - query) // block_size, -(-seq // block_size)
    columns = np.arange(num_blocks.max())
    table = table[:, : len(columns)]
    is_read = columns < computed_blocks
    is_written = (columns >= computed_blocks) & (columns < num_blocks)
    # A block stands once in the table of its row, so a block both written and read is shared by two rows.
    writer_of = np.full(max(0, int(table.max(initial=0))) + 1, -1)
    rows, places = np.nonzero(is_written)
    writer_of[table[rows, places]] = rows
    rows, places = np.nonzero(is_read)
    writers = writer_of[table[rows, places]]
    hits = np.flatnonzero(writers >= 0)
    return list(zip(rows[hits].tolist(), writers[hits].tolist(), strict=True))
