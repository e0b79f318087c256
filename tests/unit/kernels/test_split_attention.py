"""Long contexts that several threads share, and the log-sum-exp by which parts can be merged."""

import pytest
import torch

from tests.helpers.attention_batch import Batch, Case, bits
from vllm_moe_lightning.kernels import attention, reference
from vllm_moe_lightning.kernels.attention import AttentionPool, AttentionTask

all_isas = pytest.mark.parametrize("isa", attention.available_isas())


@all_isas
@pytest.mark.parametrize("block_size", [16, 48, 128])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 1500, "has_sinks": True}], ids=str)
def test_splitting_a_long_context_over_threads_changes_no_bit(
    isa: str, block_size: int, options: dict[str, object]
) -> None:
    case = Case(
        seq_lens=(5000, 2049, 300),
        query_lens=(1, 1, 1),
        num_heads=4,
        num_kv_heads=1,
        head_dim=32,
        block_size=block_size,
        dtype=torch.float32,
        **options,
    )
    batch = Batch(case)
    alone = batch.run(isa)
    torch.testing.assert_close(alone, batch.expected(), rtol=1e-5, atol=2e-5)
    for num_threads in (2, 7):
        with AttentionPool(num_threads) as pool:
            assert torch.equal(bits(Batch(case).run(isa, pool)), bits(alone))


def parts(batch: Batch, isa: str, seq_len: int, first_block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one decode row to keys from block `first_block` on, `seq_len` in all: (output, log_sum_exp)."""
    output, log_sum_exp = torch.empty(1, *batch.query.shape[1:]), torch.empty(1, batch.query.shape[1])
    AttentionTask(
        batch.kv_cache,
        query=batch.query,
        output=output,
        block_table=batch.block_table[:, first_block:].contiguous(),
        query_start=batch.query_start,
        seq_lens=torch.tensor([seq_len], dtype=torch.int32),
        log_sum_exp=log_sum_exp,
        isa=isa,
    ).run()
    return output, log_sum_exp


@all_isas
def test_two_parts_merged_by_their_log_sum_exp_are_the_whole(isa: str) -> None:
    batch = Batch(Case(seq_lens=(200,), query_lens=(1,), block_size=16, dtype=torch.float32))
    reference.append(batch.kv_cache, batch.key, batch.value, batch.slot_mapping)
    whole, whole_log = parts(batch, isa, 200, 0)
    left, left_log = parts(batch, isa, 96, 0)
    right, right_log = parts(batch, isa, 104, 6)
    merged_log = torch.logaddexp(left_log, right_log)
    merged = left * (left_log - merged_log).exp()[..., None] + right * (right_log - merged_log).exp()[..., None]
    torch.testing.assert_close(merged_log, whole_log, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged, whole, rtol=1e-5, atol=1e-5)


@all_isas
def test_log_sum_exp_counts_sinks_and_is_minus_infinity_without_context(isa: str) -> None:
    case = Case(seq_lens=(1, 0), query_lens=(1, 1), num_heads=2, num_kv_heads=1, dtype=torch.float32, has_sinks=True)
    batch, log_sum_exp = Batch(case), torch.empty(2, 2)
    batch.task(torch.empty_like(batch.query), isa, log_sum_exp=log_sum_exp).run()
    logits = (batch.query[0] * batch.key[0]).sum(dim=-1) * batch.case.head_dim**-0.5
    torch.testing.assert_close(log_sum_exp[0], torch.logaddexp(logits, batch.sinks), rtol=1e-5, atol=1e-5)
    assert (log_sum_exp[1] == -torch.inf).all()
