"""The C++ attention against the fp32 reference: every instruction set that runs here, awkward sizes, and no luck.

Memory that a kernel must not read holds NaN (0xFF bytes), memory that it must not write holds a sentinel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_moe_lightning.errors import MoeLightningError, UnsupportedError
from vllm_moe_lightning.kernels import attention, native, reference
from vllm_moe_lightning.kernels.attention import AttentionPool, AttentionTask

ISAS = attention.available_isas()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Reference and kernel read the same inputs and both add up in fp32, so what may differ is the order of adding (the
# absolute part: logits and outputs are of order 1, sums have up to a few thousand terms) and the rounding of the result to
# its dtype: half a unit in the last of 8 or 11 significant bits (the relative part).
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-5},
    torch.bfloat16: {"rtol": 2**-8, "atol": 2e-5},
    torch.float16: {"rtol": 2**-11, "atol": 2e-5},
}
SENTINEL = 123.0
GUARD = 64  # elements between tokens, before the first and behind the last


@dataclass(frozen=True)
class Case:
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    sliding_window: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False
    seed: int = 0


class Batch:
    """The tensors of one case: the context is in the cache, the query tokens' keys and values are still to be appended."""

    def __init__(self, case: Case) -> None:
        self.case = case
        rng = torch.Generator().manual_seed(case.seed)
        num_tokens = sum(case.query_lens)
        blocks_per_seq = [-(-n // case.block_size) for n in case.seq_lens]
        num_blocks = sum(blocks_per_seq) + 2
        shape = (num_blocks, case.num_kv_heads, 2, case.block_size, case.head_dim)
        self.kv_cache = nan_bytes(shape, case.dtype)

        # Ids that must not be read are out of range; the real ones are dealt out at random.
        self.block_table = torch.full(
            (len(case.seq_lens), max(blocks_per_seq, default=0) + 3), -7, dtype=torch.int32
        )
        free = torch.randperm(num_blocks, generator=rng).to(torch.int32)
        self.query_start = torch.tensor([0, *case.query_lens]).cumsum(0).to(torch.int32)
        self.seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32)
        self.slot_mapping = torch.empty(num_tokens, dtype=torch.int64)
        for seq, (seq_len, query_len) in enumerate(zip(case.seq_lens, case.query_lens, strict=True)):
            blocks, free = free[: blocks_per_seq[seq]], free[blocks_per_seq[seq] :]
            self.block_table[seq, : len(blocks)] = blocks
            slots = [
                int(blocks[p // case.block_size]) * case.block_size + p % case.block_size
                for p in range(seq_len)
            ]
            first_seen = max(0, seq_len - query_len + 1 - case.sliding_window) if case.sliding_window else 0
            for slot in slots[first_seen : max(0, seq_len - query_len)]:
                context = torch.randn(case.num_kv_heads, 2, case.head_dim, generator=rng)
                self.kv_cache[slot // case.block_size, :, :, slot % case.block_size] = context.to(case.dtype)
            self.block_table[seq, : first_seen // case.block_size] = -1  # freed by a sliding-window cache
            new_slots = slots[seq_len - query_len :] if seq_len else [-1] * query_len
            self.slot_mapping[self.query_start[seq] : self.query_start[seq + 1]] = torch.tensor(
                new_slots, dtype=torch.int64
            )

        # Query, key and value side by side, as a fused projection leaves them.
        num_rows = case.num_heads + 2 * case.num_kv_heads
        fused = torch.randn(num_tokens, num_rows, case.head_dim, generator=rng).to(case.dtype)
        heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads)
        self.query, self.key, self.value = fused.split(heads, dim=1)
        self.sinks = torch.randn(case.num_heads, generator=rng) if case.has_sinks else None
        self.options = {
            "scale": case.head_dim**-0.5,
            "sliding_window": case.sliding_window,
            "soft_cap": case.soft_cap,
            "sinks": self.sinks,
        }

    def expected(self) -> torch.Tensor:
        cache = self.kv_cache.clone()
        reference.append(cache, self.key, self.value, self.slot_mapping)
        return reference.paged_attention(
            self.query, cache, self.block_table, self.query_start, self.seq_lens, **self.options
        )

    def task(self, output: torch.Tensor, isa: str, pool: AttentionPool | None = None) -> AttentionTask:
        return AttentionTask(
            self.kv_cache,
            query=self.query,
            output=output,
            block_table=self.block_table,
            query_start=self.query_start,
            seq_lens=self.seq_lens,
            key=self.key,
            value=self.value,
            slot_mapping=self.slot_mapping,
            isa=isa,
            pool=pool,
            **self.options,
        )

    def run(self, isa: str, pool: AttentionPool | None = None) -> torch.Tensor:
        """The output, once it is sure that nothing else was written."""
        num_tokens, row = self.query.shape[0], self.case.num_heads * self.case.head_dim
        stride = row + GUARD
        buffer = torch.full((GUARD + num_tokens * stride,), SENTINEL, dtype=self.case.dtype)
        tokens = buffer[GUARD:].view(num_tokens, stride)
        output = tokens[:, :row].view(num_tokens, self.case.num_heads, self.case.head_dim)
        cache_after = self.kv_cache.clone()
        reference.append(cache_after, self.key, self.value, self.slot_mapping)
        self.task(output, isa, pool).run()
        assert (buffer[:GUARD] == SENTINEL).all()
        assert (tokens[:, row:] == SENTINEL).all()
        assert torch.equal(bits(self.kv_cache), bits(cache_after))
        return output.clone()


def nan_bytes(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """0xFF everywhere, which is NaN in all our dtypes."""
    tensor = torch.empty(shape, dtype=dtype)
    bits(tensor).fill_(-1)
    return tensor


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def check(case: Case, isa: str) -> None:
    batch = Batch(case)
    expected = batch.expected()
    assert expected.isfinite().all(), "the reference itself met poison"
    torch.testing.assert_close(batch.run(isa).float(), expected, **TOLERANCES[case.dtype])


# Decode rows at 1 and at block and chunk boundaries and next to them, prefills, chunks of a prefill, prefix hits, a
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
    batch.block_table[2, :3] = batch.block_table[
        1, :3
    ]  # a prefix hit on what sequence 1 is only now computing
    batch.block_table[0, 0] = batch.block_table[1, 1]  # and an earlier row reads what a later one writes
    batch.slot_mapping[:3] = -1
    with AttentionPool(3) as pool:
        torch.testing.assert_close(
            batch.run(isa, pool).float(), batch.expected(), **TOLERANCES[torch.bfloat16]
        )


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


# ---------------------------------------------------------------- refusals
def small_arguments() -> dict[str, object]:
    batch = Batch(Case(seq_lens=(20, 5), query_lens=(2, 5), num_heads=4, head_dim=16))
    names = "kv_cache query block_table query_start seq_lens key value slot_mapping".split()
    return {name: getattr(batch, name) for name in names} | {"output": torch.empty_like(batch.query)}


def changed(index: int, value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[index] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("kv_cache", lambda t: t.double(), "kv_cache must be one of"),
        ("kv_cache", lambda t: t[:, :, 0], "kv_cache must be"),
        ("kv_cache", lambda t: t.transpose(1, 3)[:, :, :, :2].transpose(2, 3), "kv_cache must be"),
        ("kv_cache", lambda t: t[..., :12].contiguous(), "head_dim must be a multiple of 8"),
        ("kv_cache", lambda t: t.repeat(1, 1, 1, 1, 17), "up to 256, got 272"),
        ("kv_cache", lambda t: t.to("meta"), "host memory"),
        ("query", lambda t: t.float(), "query must be"),
        ("query", lambda t: t[:, :3], "multiple of the cache's 2"),
        ("query", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "must be packed"),
        ("output", lambda t: t[:1].expand(7, -1, -1), "must not overlap"),
        ("output", lambda t: t[:3], "output must be"),
        ("output", lambda t: None, "to attend, give"),
        ("key", lambda t: None, "to append, give"),
        ("key", lambda t: t[:, :, :8], "key must be"),
        ("value", lambda t: t[:3], "value must be"),
        ("slot_mapping", lambda t: t.int(), "slot_mapping must be"),
        ("slot_mapping", changed(3, 10**6), "names slot 1000000"),
        ("block_table", changed(0, -1), "names blocks outside"),
        ("block_table", changed(1, 10**6), "names blocks outside"),
        ("block_table", lambda t: t[:, :1].contiguous(), "the longest sequence needs 2"),
        ("block_table", lambda t: t.long(), "block_table must be int32"),
        ("block_table", lambda t: t[:1], "with 2 rows"),
        ("query_start", changed(1, 9), "query_start must rise"),
        ("query_start", changed(0, -1), "query_start must rise"),
        ("query_start", changed(2, 8), "query_start must rise"),
        ("query_start", lambda t: t[:2], "query_start must be"),
        ("seq_lens", changed(1, 4), "seq_lens count the query tokens too"),
        ("seq_lens", changed(1, -4), "seq_lens count the query tokens too"),
        ("sliding_window", lambda _: -1, "sliding_window must be"),
        ("soft_cap", lambda _: -1.0, "soft_cap >= 0"),
        ("scale", lambda _: float("nan"), "must be finite"),
        ("sinks", lambda _: torch.zeros(3), "sinks must be"),
        ("isa", lambda _: "sse", "isa must be one of"),
    ],
)
def test_a_bad_argument_is_refused_by_name(name: str, change: Callable[..., object], message: str) -> None:
    arguments = small_arguments()
    arguments[name] = change(arguments.get(name))
    with pytest.raises(ValueError, match=message):
        AttentionTask(**arguments)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_cache", None),
        ("num_blocks", 1),
        ("block_size", 0),
        ("head_dim", 12),
        ("head_dim", 264),
        ("num_heads", 3),
        ("num_kv_heads", 0),
        ("dtype", 3),
        ("isa", 9),
        ("query", None),
        ("output", None),
        ("key", None),
        ("slot_mapping", None),
        ("seq_lens", None),
        ("num_tokens", 3),
        ("num_tokens", -1),
        ("query_token_stride", 1),
        ("output_token_stride", 1),
        ("key_token_stride", 1),
        ("block_table_stride", 1),
        ("sliding_window", -1),
        ("soft_cap", float("inf")),
    ],
)
def test_the_c_side_refuses_what_the_wrapper_would(field: str, value: object) -> None:
    arguments = small_arguments()
    task = AttentionTask(**arguments)
    setattr(task.argument, field, value)
    cache_before = arguments["kv_cache"].clone()
    with pytest.raises(MoeLightningError, match="bad argument"):
        task.run()
    assert torch.equal(bits(arguments["kv_cache"]), bits(cache_before)), "a refused task must write nothing"


def test_a_task_without_tokens_or_sequences_does_nothing() -> None:
    check(Case(seq_lens=(), query_lens=()), ISAS[-1])
    check(Case(seq_lens=(0, 5), query_lens=(0, 0)), ISAS[-1])


def test_a_task_with_nothing_to_do_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to do"):
        AttentionTask(torch.zeros(1, 1, 2, 16, 16))


def test_auto_never_means_scalar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "available_isas", lambda: ("scalar",))
    assert attention.resolve_isa("scalar") == "scalar"
    for isa in ("auto", "avx2"):
        with pytest.raises(UnsupportedError, match="scalar"):
            attention.resolve_isa(isa)


def test_without_the_native_library_auto_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise MoeLightningError("the native library is not there")

    monkeypatch.setattr(native, "library", missing)
    with pytest.raises(MoeLightningError, match="not there"):
        attention.resolve_isa("auto")


def test_a_pool_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        AttentionPool(0)
    with pytest.raises(MoeLightningError, match="cannot start 1 attention threads on CPUs"):
        AttentionPool(2, cpus=[1023])
    pool = AttentionPool(2)
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        AttentionTask(**small_arguments(), pool=pool)


def test_supported_head_dims_are_the_multiples_of_8_up_to_256() -> None:
    assert attention.supported_head_dims() == tuple(range(8, 257, 8))
