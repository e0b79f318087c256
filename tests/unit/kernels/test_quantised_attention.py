"""Attention over 8-bit caches: what append writes, and what the kernels make of it, on every instruction set."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.helpers.attention_batch import Batch, Case
from vllm_moe_lightning.kernels import attention, reference
from vllm_moe_lightning.kernels.attention import AttentionPool, AttentionTask
from vllm_moe_lightning.kernels.quantised_cache import QuantisedCache

ISAS = attention.available_isas()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = ("int8", "fp8")
# The reference reads the same quantised elements; left are the order of adding and the rounding of the result.
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 3e-5},
    torch.bfloat16: {"rtol": 2**-8, "atol": 3e-5},
    torch.float16: {"rtol": 2**-11, "atol": 3e-5},
}
# Products of integers: a chunk's weights are rounded to 8 bits of their greatest. Relative RMS over a sequence's rows.
INTEGER_ISAS = ("avx512vnni",)
INTEGER_BOUND = 0.008
MIXED = Case(
    seq_lens=(1, 15, 16, 17, 33, 64, 65, 0, 129, 40, 5, 37, 150, 0, 80),
    query_lens=(1, 1, 1, 1, 1, 1, 1, 1, 1, 40, 5, 20, 70, 0, 0),
)

all_isas = pytest.mark.parametrize("isa", ISAS)
all_kinds = pytest.mark.parametrize("kind", KINDS)


def stale(num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, kind: str) -> QuantisedCache:
    """Bytes that are NaN as scales and as fp8."""
    cache = QuantisedCache.empty(num_blocks, num_kv_heads, block_size, head_dim, kind)
    cache.blocks.fill_(0xFF)
    return cache


def quantised_batch(case: Case, kind: str) -> tuple[Batch, QuantisedCache]:
    """The batch's context, appended to a quantised cache row by row."""
    batch = Batch(case)
    cache = stale(batch.kv_cache.shape[0], case.num_kv_heads, case.block_size, case.head_dim, kind)
    is_known = ~batch.kv_cache[:, 0, 0, :, 0].isnan()
    blocks, offsets = is_known.nonzero(as_tuple=True)
    rows = batch.kv_cache[blocks, :, :, offsets]  # [tokens, Hk, 2, D]
    AttentionTask(
        cache,
        key=rows[:, :, 0].contiguous(),
        value=rows[:, :, 1].contiguous(),
        slot_mapping=blocks * case.block_size + offsets,
    ).run()
    return batch, cache


def run(
    batch: Batch, cache: QuantisedCache, isa: str, pool: AttentionPool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log_sum_exp)"""
    output = torch.full(batch.query.shape, 9.0, dtype=batch.query.dtype)
    log_sum_exp = torch.full(batch.query.shape[:2], 9.0)
    batch.task(output, isa, pool, kv_cache=cache, log_sum_exp=log_sum_exp).run()
    return output, log_sum_exp


def expected(batch: Batch, cache: QuantisedCache) -> torch.Tensor:
    return reference.paged_attention(
        batch.query, cache.dequantised(), batch.block_table, batch.query_start, batch.seq_lens, **batch.options
    )


def check(output: torch.Tensor, batch: Batch, cache: QuantisedCache, isa: str) -> None:
    wanted = expected(batch, cache)
    if cache.kind != "int8" or isa not in INTEGER_ISAS or cache.head_dim % 64 != 0:
        torch.testing.assert_close(output.float(), wanted, **TOLERANCES[output.dtype])
        return
    for begin, end in pairwise(batch.query_start.tolist()):
        error = (output[begin:end].float() - wanted[begin:end]).norm()
        assert error <= INTEGER_BOUND * wanted[begin:end].norm()


@all_isas
@all_kinds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"head_dim": 128, "block_size": 32},
        {"head_dim": 80, "block_size": 48, "sliding_window": 50, "has_sinks": True, "soft_cap": 30.0},
        {"num_heads": 34, "block_size": 20},
        {"num_heads": 2, "head_dim": 256, "block_size": 30, "sliding_window": 50, "has_sinks": True, "soft_cap": 30.0},
        {"num_heads": 6, "head_dim": 192, "block_size": 1},
    ],
    ids=str,
)
def test_attention_matches_the_reference_on_the_same_elements(
    isa: str, kind: str, dtype: torch.dtype, options: dict[str, object]
) -> None:
    batch, cache = quantised_batch(replace(MIXED, dtype=dtype, **options), kind)
    output, _ = run(batch, cache, isa)
    check(output, batch, cache, isa)


@all_isas
@all_kinds
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_a_prefill_in_chunks_gives_the_bits_of_the_whole(isa: str, kind: str, chunk: int) -> None:
    batch, cache = quantised_batch(Case(seq_lens=(61,), query_lens=(61,), head_dim=128, sliding_window=40), kind)
    whole, _ = run(batch, cache, isa)
    for begin in range(0, 61, chunk):
        end = min(61, begin + chunk)
        part = torch.empty_like(whole[begin:end])
        AttentionTask(
            cache,
            query=batch.query[begin:end],
            output=part,
            block_table=batch.block_table,
            query_start=torch.tensor([0, end - begin], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            isa=isa,
            **batch.options,
        ).run()
        assert torch.equal(part, whole[begin:end])


@all_isas
@all_kinds
@pytest.mark.parametrize("which", ["key", "value", "query"])
def test_a_nan_that_a_row_sees_is_not_hidden(isa: str, kind: str, which: str) -> None:
    batch, cache = quantised_batch(Case(seq_lens=(40, 40), query_lens=(1, 1), head_dim=64), kind)
    getattr(batch, which)[0, :, 3] = float("nan")
    output, _ = run(batch, cache, isa)
    assert output[0].isnan().all()
    assert not output[1].isnan().any()


@all_isas
def test_every_fp8_value_comes_through_a_context_of_one_unchanged(isa: str) -> None:
    elements = torch.arange(256, dtype=torch.uint8)
    elements[[0x7F, 0xFF]] = 0  # NaN
    cache = QuantisedCache(torch.zeros(1, 1, 2 * (256 + 4), dtype=torch.uint8), "fp8", 1, 256)
    cache.blocks[0, 0, 256:512] = elements
    cache.blocks[0, 0, 512:].view(torch.float32).fill_(1.0)
    query = torch.ones(1, 1, 256, dtype=torch.bfloat16)
    output = torch.empty_like(query)
    lengths = torch.tensor([0, 1], dtype=torch.int32)
    block_table = torch.zeros(1, 1, dtype=torch.int32)
    AttentionTask(
        cache,
        query=query,
        output=output,
        block_table=block_table,
        query_start=lengths,
        seq_lens=lengths[1:],
        isa=isa,
    ).run()
    assert torch.equal(output[0, 0].float(), elements.view(torch.float8_e4m3fn).float())


def test_auto_takes_products_of_integers_for_int8_caches_alone() -> None:
    if "avx512vnni" not in ISAS:
        pytest.skip("this CPU has no avx512vnni")
    assert attention.resolve_isa("auto", "int8") == "avx512vnni"
    assert attention.resolve_isa("auto", "fp8") != "avx512vnni"
    assert attention.resolve_isa("auto", torch.bfloat16) != "avx512vnni"


@all_kinds
def test_append_stores_the_nearest_element_of_each_token_and_head(kind: str) -> None:
    torch.manual_seed(0)
    num_tokens, heads, head_dim, block_size = 48, 3, 64, 16
    scales = torch.logspace(-30, 30, num_tokens * heads).view(num_tokens, heads, 1)
    key, value = (torch.randn(num_tokens, heads, head_dim) * scales for _ in range(2))
    cache = stale(3, heads, block_size, head_dim, kind)
    AttentionTask(cache, key=key, value=value, slot_mapping=torch.arange(num_tokens)).run()
    got = cache.dequantised().permute(0, 3, 1, 2, 4).reshape(num_tokens, heads, 2, head_dim)
    given = torch.stack([key, value], dim=2)
    greatest = given.abs().amax(dim=-1, keepdim=True)
    if kind == "int8":
        assert ((got - given).abs() <= greatest / 127 * 0.5001).all()
    else:
        scale = greatest / 448
        nearest = (given / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        torch.testing.assert_close(got, nearest, rtol=2**-3, atol=0.0)  # a tie may fall to the other neighbour
        assert (got != nearest).float().mean() < 1e-3


@all_kinds
def test_a_row_of_zeros_stays_zero_and_one_with_nan_or_infinity_is_not_hidden(kind: str) -> None:
    for bad in (0.0, float("nan"), float("inf")):
        key = torch.ones(2, 1, 32)
        key[1, 0, 3] = bad
        if bad == 0.0:
            key[1] = 0.0
        cache = stale(1, 1, 16, 32, kind)
        AttentionTask(cache, key=key, value=key, slot_mapping=torch.arange(2)).run()
        rows = cache.dequantised()[0, 0, :, :2]
        assert torch.equal(rows[:, 0], torch.ones(2, 32))
        assert rows[:, 1].eq(0).all() if bad == 0.0 else rows[:, 1].isnan().all()


@all_isas
@all_kinds
def test_threads_change_no_bit(isa: str, kind: str) -> None:
    case = Case(seq_lens=(3000, 70, 20), query_lens=(1, 1, 20), head_dim=32, block_size=32, num_heads=4)
    alone, log_sum_exp = run(*quantised_batch(case, kind), isa)
    with AttentionPool(5) as pool:
        together, log_sum_exp_together = run(*quantised_batch(case, kind), isa, pool)
    assert torch.equal(alone, together)
    assert torch.equal(log_sum_exp, log_sum_exp_together)


@all_isas
@pytest.mark.parametrize(("kind", "bound"), [(None, 0.0025), ("int8", 0.008), ("fp8", 0.008)])
def test_relative_error_against_float64_stays_within_the_stated_bound(isa: str, kind: str | None, bound: float) -> None:
    """Of the kernel, on the elements that the cache holds."""
    case = Case(
        seq_lens=(900, 64, 333), query_lens=(1, 1, 1), num_heads=32, num_kv_heads=8, head_dim=128, block_size=32
    )
    batch = Batch(case)
    if kind is None:
        output, held = batch.run(isa), batch.kv_cache
    else:
        batch, cache = quantised_batch(case, kind)
        output, _ = run(batch, cache, isa)
        held = cache.dequantised()
    for seq, seq_len in enumerate(case.seq_lens):
        key, value = (x.double() for x in reference.gather(held, batch.block_table[seq], 0, seq_len))
        query = batch.query[seq].double().view(8, 4, 128)
        weights = torch.softmax(torch.einsum("hgd,khd->hgk", query, key) * 128**-0.5, dim=-1)
        exact = torch.einsum("hgk,khd->hgd", weights, value).view(32, 128)
        error = (output[seq].double() - exact).norm() / exact.norm()
        assert error <= bound


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.012), ("fp8", 0.045)])
def test_quantisation_costs_no_more_accuracy_than_stated(kind: str, bound: float) -> None:
    case = Case(seq_lens=(900,), query_lens=(1,), num_heads=32, num_kv_heads=8, head_dim=128, block_size=32)
    batch, cache = quantised_batch(case, kind)
    output, _ = run(batch, cache, "auto")
    exact = batch.expected()
    assert (output.float() - exact).norm() / exact.norm() <= bound


def test_a_cache_of_the_wrong_size_or_kind_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="kind of a quantised cache must be 'int8' or 'fp8', got 'int4'"):
        QuantisedCache(torch.empty(1, 1, 2176, dtype=torch.uint8), "int4", 16, 64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must be \[num_blocks, num_kv_heads, 2176\] of uint8, got \[1, 1, 2048\]"):
        QuantisedCache(torch.empty(1, 1, 2048, dtype=torch.uint8), "int8", 16, 64)


@all_isas
@all_kinds
@pytest.mark.parametrize("gap", [0.0, 4.0, 7.0, 9.0])
def test_keys_beside_one_that_has_nearly_all_the_weight_still_count(isa: str, kind: str, gap: float) -> None:
    """As beside a sink token: each of the others is far below the greatest weight, all of them together are not."""
    torch.manual_seed(0)
    num_keys, head_dim = 96, 64
    query, key, value = torch.randn(1, 2, head_dim), torch.zeros(num_keys, 1, head_dim), torch.empty(num_keys, 1, 64)
    key[3, 0] = query[0, 0] * gap * head_dim**0.5 / query[0, 0].square().sum()
    value.normal_(mean=1.0)
    cache, output = stale(6, 1, 16, head_dim, kind), torch.empty(1, 2, head_dim)
    AttentionTask(cache, key=key, value=value, slot_mapping=torch.arange(num_keys)).run()
    table, starts = torch.arange(6, dtype=torch.int32)[None], torch.tensor([0, 1], dtype=torch.int32)
    lengths = torch.tensor([num_keys], dtype=torch.int32)
    rows = {"block_table": table, "query_start": starts, "seq_lens": lengths}
    AttentionTask(cache, query=query, output=output, isa=isa, **rows).run()
    exact = reference.paged_attention(query, cache.dequantised(), table, starts, lengths, scale=head_dim**-0.5)
    assert (output - exact).norm() / exact.norm() <= 2e-3
