"""Splits the rows of a step into micro-batches of equal work (the paper's Algorithm 2, mended).

Longest first to the least loaded micro-batch. Unlike the listing: every row is placed (admission is the scheduler's
business, so nothing is aborted), the count of rows is capped so that no micro-batch is empty, and ties are broken by
row number, so that all tensor-parallel ranks split alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# A query token costs projections and MoE on the GPU; a context token one K and one V row on the CPU.
QUERY_TOKEN_COST = 64


def row_cost(query_len: int, seq_len: int) -> int:
    """Relative work of a row: its new tokens, and the context that each of them reads."""
    return query_len * (QUERY_TOKEN_COST + seq_len)


def balanced_micro_batches(
    query_lens: Sequence[int], seq_lens: Sequence[int], num_micro_batches: int
) -> list[list[int]]:
    """Rows of each micro-batch, ascending. At most `num_micro_batches` lists, none empty.

    query_lens, seq_lens: per row, new tokens and context length with the new tokens included.
    """
    num_rows = len(query_lens)
    if num_rows == 0:
        raise ValueError("a step without rows cannot be split")
    count = min(num_micro_batches, num_rows)
    if count == 1:
        return [list(range(num_rows))]
    costs = [row_cost(query, context) for query, context in zip(query_lens, seq_lens, strict=True)]
    loads = [(0, 0, index) for index in range(count)]  # (cost, rows, micro-batch): a heap of the least loaded
    rows_of: list[list[int]] = [[] for _ in range(count)]
    for row in sorted(range(num_rows), key=lambda row: (-costs[row], row)):
        cost, rows, index = loads[0]
        heapq.heapreplace(loads, (cost + costs[row], rows + 1, index))
        rows_of[index].append(row)
    return [sorted(rows) for rows in rows_of]


def reads_blocks_written_in_this_step(
    query_lens: Sequence[int], seq_lens: Sequence[int], block_tables: npt.ArrayLike, block_size: int
) -> bool:
    """Whether a row's cached context lies in blocks that another row of the same step writes (a same-step prefix
    hit). Such a step must run as one micro-batch: the kernel appends all keys and values before it reads any.

    block_tables: [rows, >= blocks of the longest row]. A hit may leave a prompt a single token to compute, so that no
    row can be passed over as decoding.
    """
    query, seq = np.asarray(query_lens)[:, None], np.asarray(seq_lens)[:, None]  # [rows, 1]
    computed_blocks, num_blocks = (seq - query) // block_size, -(-seq // block_size)
    columns = np.arange(num_blocks.max())
    tables = np.asarray(block_tables)[:, : len(columns)]
    is_read = (query > 0) & (columns < computed_blocks)
    is_written = (query > 0) & (columns >= computed_blocks) & (columns < num_blocks)
    # A block stands once in the table of its row, so a block both written and read is shared by two rows.
    return bool(np.isin(tables[is_read], tables[is_written]).any())
