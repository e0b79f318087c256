"""The C++ attention against the fp32 reference: every instruction set that runs here, on awkward sizes.

Batches come from tests/helpers/attention_batch.py, with NaN in all memory that must not be read.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.attention_batch import Batch, Case, bits
from vllm_moe_lightning.kernels import attention, reference
from vllm_moe_lightning.kernels.attention import AttentionPool, AttentionTask

ISAS = attention.available_isas()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Reference and kernel read the same inputs and both add up in fp32, so what may differ is the order of adding
# (the absolute part: logits and outputs are of order 1, sums have up to a few thousand terms) and the
# rounding of the result to its dtype: half a unit in the last of 8 or 11 significant bits (the relative
# part).
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-5},
    torch.bfloat16: {"rtol": 2**-8, "atol": 2e-5},
    torch.float16: {"rtol": 2**-11, "atol": 2e-5},
}


def check(case: Case, isa: str) -> None:
    batch = Batch(case)
    expected = batch.expected()
    assert expected.isfinite().all(), "the reference itself met poison"
    torch.testing.assert_close(batch.run(isa).float(), expected, **TOLERANCES[case.dtype])


# Decode rows at 1 and at block and chunk boundaries and next to them, prefills, chunks of a prefill, a
# sequence without query tokens, and a padding row without context.
MIXED = Case(
    seq_lens=(1, 15, 16, 17, 63, 64, 65, 0, 129, 40, 5, 37, 150, 0, 80),
    query_lens=(1, 1, 1, 1, 1, 1, 1, 1, 1, 40, 5, 20, 70, 0, 0),
)
all_isas = pytest.mark.parametrize("isa", ISAS)
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def test_this_machine_runs_a_vector_kernel_or_says_so() -> None:
    assert "scalar" in ISAS
    if len(ISAS) == 1:
        pytest.skip("neither AVX2 nor AVX-512 here: only the scalar kernel is tested")


@all_isas
@all_dtypes
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 1},
        {"sliding_window": 16},
        {"sliding_window": 33},
        {"sliding_window": 1000},
        {"has_sinks": True},
        {"soft_cap": 2.0},
        {"sliding_window": 50, "has_sinks": True, "soft_cap": 30.0},
    ],
    ids=str,
)
def test_mixed_batches_match_the_reference(isa: str, dtype: torch.dtype, options: dict[str, object]) -> None:
    check(replace(MIXED, dtype=dtype, **options), isa)


@all_isas
@all_dtypes
@pytest.mark.parametrize("head_dim", [8, 24, 32, 40, 64, 72, 80, 96, 112, 120, 128, 192, 256])
def test_every_head_dim_matches_the_reference(isa: str, dtype: torch.dtype, head_dim: int) -> None:
    check(Case(seq_lens=(70, 19, 9), query_lens=(1, 19, 3), head_dim=head_dim, num_heads=6, dtype=dtype), isa)


@all_isas
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [(1, 1), (4, 4), (6, 2), (5, 1), (14, 2), (16, 1), (17, 1), (64, 1), (71, 1), (130, 1)],
)
def test_every_ratio_of_heads_matches_the_reference(isa: str, num_heads: int, num_kv_heads: int) -> None:
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    check(Case(seq_lens=(67, 21, 33), query_lens=(1, 21, 9), head_dim=32, **heads), isa)


@all_isas
@pytest.mark.parametrize("block_size", [1, 7, 16, 48, 64, 80, 128])
def test_every_block_size_matches_the_reference(isa: str, block_size: int) -> None:
    lengths = tuple(n for n in (1, block_size - 1, block_size, block_size + 1, 2 * block_size + 1, 200) if n)
    queries = tuple(min(n, 1 + 3 * i) for i, n in enumerate(lengths))
    check(Case(lengths, queries, block_size=block_size, sliding_window=70, head_dim=32), isa)


@all_isas
def test_a_long_context_matches_the_reference(isa: str) -> None:
    check(Case(seq_lens=(3000,), query_lens=(1,), dtype=torch.float32, num_heads=4), isa)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_random_shapes_match_the_reference(data: st.DataObject) -> None:
    seqs = data.draw(
        st.lists(st.integers(0, 100).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=5)
    )
    num_kv_heads = data.draw(st.integers(1, 3))
    case = Case(
        seq_lens=tuple(n for n, _ in seqs),
        query_lens=tuple(q for _, q in seqs),
        num_kv_heads=num_kv_heads,
        num_heads=num_kv_heads * data.draw(st.integers(1, 9)),
        head_dim=8 * data.draw(st.integers(1, 17)),
        block_size=data.draw(st.integers(1, 40)),
        dtype=data.draw(st.sampled_from(DTYPES)),
        sliding_window=data.draw(st.sampled_from([0, 1, 5, 64, 90])),
        soft_cap=data.draw(st.sampled_from([0.0, 5.0])),
        has_sinks=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 99)),
    )
    check(case, data.draw(st.sampled_from(ISAS)))


@all_isas
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_comes_through_a_context_of_one_unchanged(isa: str, dtype: torch.dtype) -> None:
    batch = Batch(Case((1,) * 256, (1,) * 256, num_heads=1, num_kv_heads=1, head_dim=256, dtype=dtype))
    batch.value = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(256, 1, 256)
    batch.key = torch.zeros_like(batch.value)
    torch.testing.assert_close(batch.run(isa), batch.value, rtol=0, atol=0, equal_nan=True)


@all_isas
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_halfway_between_two_16_bit_values_round_to_even(isa: str, dtype: torch.dtype) -> None:
    batch = Batch(Case((2,) * 256, (1,) * 256, num_heads=1, num_kv_heads=1, head_dim=256, dtype=dtype))
    patterns = torch.arange(-(2**15), 2**15).view(256, 1, 256)
    batch.key = torch.zeros(256, 1, 256, dtype=dtype)
    batch.value = patterns.to(torch.int16).view(dtype)
    neighbours = (patterns + 1).to(torch.int16).view(dtype)
    batch.kv_cache[batch.block_table[:, 0].long(), :, 0, 0] = 0  # equal logits: the result is the mean
    batch.kv_cache[batch.block_table[:, 0].long(), :, 1, 0] = neighbours
    mean = (neighbours.float() + batch.value.float()) * 0.5
    torch.testing.assert_close(batch.run(isa), mean.to(dtype), rtol=0, atol=0, equal_nan=True)


@all_isas
def test_one_changed_key_is_noticed(isa: str) -> None:
    batch = Batch(replace(MIXED, seq_lens=(100, 20), query_lens=(1, 4), dtype=torch.float32))
    expected = batch.expected()
    slot = int(batch.block_table[0, 2])  # positions 32..47 of the first sequence
    batch.kv_cache[slot, :, 0, 5] *= 1.5
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(batch.run(isa), expected, **TOLERANCES[torch.float32])


@all_isas
def test_a_nan_in_a_seen_key_or_value_is_not_hidden(isa: str) -> None:
    for part in (0, 1):
        batch = Batch(Case(seq_lens=(100,), query_lens=(1,), num_heads=2))
        batch.kv_cache[batch.block_table[0, 2].item(), :, part, 5] = torch.nan
        assert batch.run(isa).isnan().all()


# ---------------------------------------------------------------- the same bits, however it runs
@all_isas
def test_the_number_of_threads_changes_no_bit(isa: str) -> None:
    case = replace(MIXED, sliding_window=60, has_sinks=True)
    alone = Batch(case).run(isa)
    for num_threads in (1, 2, 3):
        with AttentionPool(num_threads) as pool:
            for _ in range(3):
                assert torch.equal(bits(Batch(case).run(isa, pool)), bits(alone))


@all_isas
@all_dtypes
def test_the_rest_of_the_batch_changes_no_bit(isa: str, dtype: torch.dtype) -> None:
    batch = Batch(replace(MIXED, dtype=dtype))
    together = batch.run(isa)
    for seq in range(len(MIXED.seq_lens)):
        tokens = slice(int(batch.query_start[seq]), int(batch.query_start[seq + 1]))
        alone = torch.empty(together[tokens].shape, dtype=dtype)
        AttentionTask(
            batch.kv_cache,
            query=batch.query[tokens],
            output=alone,
            block_table=batch.block_table[seq : seq + 1],
            query_start=torch.tensor([0, len(alone)], dtype=torch.int32),
            seq_lens=batch.seq_lens[seq : seq + 1],
            isa=isa,
        ).run()
        assert torch.equal(bits(alone), bits(together[tokens])), f"sequence {seq}"


@all_isas
@all_dtypes
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_prefill_in_chunks_gives_the_bits_of_the_whole(isa: str, dtype: torch.dtype, chunk: int) -> None:
    case = Case((150,), (150,), num_heads=6, head_dim=40, dtype=dtype, sliding_window=90, soft_cap=9.0)
    batch = Batch(case)
    whole = batch.run(isa)
    in_chunks = torch.empty_like(whole)
    for begin in range(0, 150, chunk):
        end = min(150, begin + chunk)
        AttentionTask(
            batch.kv_cache,
            query=batch.query[begin:end],
            output=in_chunks[begin:end],
            block_table=batch.block_table,
            query_start=torch.tensor([0, end - begin], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            isa=isa,
            scale=batch.options["scale"],
            sliding_window=90,
            soft_cap=9.0,
        ).run()
    assert torch.equal(bits(in_chunks), bits(whole))


@all_isas
def test_a_row_reads_blocks_that_another_row_of_the_same_task_writes(isa: str) -> None:
    batch = Batch(Case(seq_lens=(10, 64, 64), query_lens=(3, 64, 2), num_heads=4))
    batch.block_table[2, :3] = batch.block_table[1, :3]  # a prefix hit on what sequence 1 is only now computing
    batch.block_table[0, 0] = batch.block_table[1, 1]  # and an earlier row reads what a later one writes
    batch.slot_mapping[:3] = -1
    with AttentionPool(3) as pool:
        torch.testing.assert_close(batch.run(isa, pool).float(), batch.expected(), **TOLERANCES[torch.bfloat16])


# ---------------------------------------------------------------- append
@all_dtypes
def test_append_alone_writes_the_slots_and_skips_negative_ones(dtype: torch.dtype) -> None:
    batch = Batch(Case(seq_lens=(40,), query_lens=(40,), head_dim=8, dtype=dtype))
    batch.slot_mapping[3:9] = -1
    expected = batch.kv_cache.clone()
    reference.append(expected, batch.key, batch.value, batch.slot_mapping)
    AttentionTask(batch.kv_cache, key=batch.key, value=batch.value, slot_mapping=batch.slot_mapping).run()
    assert torch.equal(bits(batch.kv_cache), bits(expected))


def test_an_append_of_many_pieces_is_complete_whoever_helps() -> None:
    batch = Batch(Case(seq_lens=(600,), query_lens=(600,), num_kv_heads=4, head_dim=128))
    expected = batch.kv_cache.clone()
    reference.append(expected, batch.key, batch.value, batch.slot_mapping)
    with AttentionPool(3) as pool:
        options = {"key": batch.key, "value": batch.value, "slot_mapping": batch.slot_mapping}
        AttentionTask(batch.kv_cache, pool=pool, **options).run()
    assert torch.equal(bits(batch.kv_cache), bits(expected))


def test_a_task_without_tokens_or_sequences_does_nothing() -> None:
    check(Case(seq_lens=(), query_lens=()), ISAS[-1])
    check(Case(seq_lens=(0, 5), query_lens=(0, 0)), ISAS[-1])
