# SPDX-License-Identifier: Apache-2.0
"""Paged attention in torch operations against the plain reference; here on the CPU, as S4 runs it on a GPU."""

import pytest
import torch

from vllm_moe_lightning.kernels import reference, sdpa, torch_attention
from vllm_moe_lightning.kernels.torch_attention import PagedRows

BLOCK_SIZE, NUM_KV_HEADS, GROUP, HEAD_DIM = 16, 2, 3, 32
POISON = float("nan")
KEY_BYTES = 2 * HEAD_DIM * 4


@pytest.mark.parametrize("most_bytes", [None, 20_000, 1])
@pytest.mark.parametrize("window", [0, 7, 40])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ((1,), (1,)),
        ((1, 1, 1), (1, 16, 65)),
        ((5, 1, 17), (5, 33, 20)),
        ((3, 2), (48, 49)),
        ((2, 2, 0, 0, 1), (40, 90, 3, 5, 70)),
        ((0, 300), (2, 330)),
    ],
)
def test_it_agrees_with_the_reference_and_reads_no_row_that_nobody_wrote(
    query_lens: tuple[int, ...],
    seq_lens: tuple[int, ...],
    window: int,
    most_bytes: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole, in slices of queries and heads, and query by query."""
    if most_bytes is not None:
        monkeypatch.setattr(sdpa, "MASK_BYTES", most_bytes)
        monkeypatch.setattr(sdpa, "QUERY_BYTES", most_bytes)
        monkeypatch.setattr(torch_attention, "KEY_BYTES", most_bytes)
    rng = torch.Generator().manual_seed(0)
    num_tokens, num_seqs = sum(query_lens), len(query_lens)
    blocks_per_seq = -(-max(seq_lens) // BLOCK_SIZE) + 1
    table = torch.randperm(num_seqs * blocks_per_seq, generator=rng).to(torch.int32).view(num_seqs, blocks_per_seq)
    query_start = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0).to(torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    blocks = torch.full((num_seqs * blocks_per_seq, NUM_KV_HEADS, 2, BLOCK_SIZE, HEAD_DIM), POISON)
    slots = []
    for row, (new, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for position in range(length):
            block, offset = int(table[row, position // BLOCK_SIZE]), position % BLOCK_SIZE
            if position < length - new:
                blocks[block, :, :, offset] = torch.randn(NUM_KV_HEADS, 2, HEAD_DIM, generator=rng)
            else:
                slots.append(block * BLOCK_SIZE + offset)
    query = torch.randn(num_tokens, GROUP * NUM_KV_HEADS, HEAD_DIM, generator=rng)
    key, value = torch.randn(2, num_tokens, NUM_KV_HEADS, HEAD_DIM, generator=rng).unbind()
    mapping = torch.tensor(slots, dtype=torch.int64)
    expected_blocks = blocks.clone()
    reference.append(expected_blocks, key, value, mapping)
    expected = reference.paged_attention(
        query, expected_blocks, table, query_start, lens, scale=0.3, sliding_window=window
    )
    rows = PagedRows.of(table, query_start, lens, mapping, BLOCK_SIZE, KEY_BYTES, lambda tensor: tensor)
    torch_attention.append(blocks, key, value, rows)
    assert torch.equal(blocks.nan_to_num(), expected_blocks.nan_to_num())
    got = torch.full_like(query, POISON)
    torch_attention.paged_attention(query, blocks, rows, got, scale=0.3, sliding_window=window)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_token_without_a_slot_is_not_written() -> None:
    blocks = torch.zeros(2, 1, 2, BLOCK_SIZE, HEAD_DIM)
    table, start = torch.tensor([[1]], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    rows = PagedRows.of(
        table, start, torch.tensor([2], dtype=torch.int32), torch.tensor([-1, 17]), BLOCK_SIZE, KEY_BYTES, torch.clone
    )
    new = torch.ones(2, 1, HEAD_DIM)
    torch_attention.append(blocks, new, 2 * new, rows)
    assert blocks.count_nonzero() == 2 * HEAD_DIM
    assert (blocks[1, :, 0, 1] == 1).all()
    assert (blocks[1, :, 1, 1] == 2).all()
