"""The C++ expert FFN and the torch.mm beside it against float64: every instruction set that runs here, awkward sizes.

Layers come from tests/helpers/expert_layer.py, with NaN in all memory that must not be read.
"""

from dataclasses import replace

import pytest
import torch

from tests.helpers.attention_batch import bits
from tests.helpers.expert_layer import Case, Layer, relative_rms
from vllm_moe_lightning.device.emulated import EmulatedDevice
from vllm_moe_lightning.kernels import attention
from vllm_moe_lightning.kernels.attention import AttentionPool
from vllm_moe_lightning.kernels.expert_ffn import (
    TOKENS_PER_PASS,
    ExpertFfnCounters,
    ExpertFfnTask,
    default_max_streamed_tokens,
)

AVAILABLE = attention.available_isas()
ISAS = tuple(isa for isa in AVAILABLE if isa != "avx512vnni")  # which has nothing of its own for experts
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Relative root mean square. A rounding to bfloat16 costs 0.0017, to float16 an eighth of that; streamed experts have
# two (the product of the gates, the result), those by torch.mm five. Few results scatter around it.
STATED = {torch.float32: 2e-6, torch.bfloat16: 0.0025, torch.float16: 0.00035}
STATED_GEMM = {torch.float32: 2e-6, torch.bfloat16: 0.0042, torch.float16: 0.0006}
MANY = 1 << 30

all_isas = pytest.mark.parametrize("isa", ISAS)
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def check(case: Case, isa: str, pool: AttentionPool | None = None) -> None:
    layer = Layer(case)
    expected = layer.expected()
    assert expected.isfinite().all(), "the reference itself met poison"
    actual = layer.run(layer.experts(isa, max_streamed_tokens=MANY), pool)
    assert actual.isfinite().all()
    luck = 1 + 3 * (case.num_tokens * min(case.hidden_size, case.intermediate_size)) ** -0.5
    assert relative_rms(actual, expected) <= STATED[case.dtype] * luck
    # No single result is far off either.
    scale = expected.abs() + expected.square().mean(dim=1, keepdim=True).sqrt()
    assert ((actual.double() - expected).abs() <= 8 * STATED[case.dtype] * scale).all()


@all_isas
@all_dtypes
@pytest.mark.parametrize("num_tokens", [*range(1, 18), 31, 50])
def test_any_number_of_tokens_of_an_expert_matches_the_reference(isa: str, dtype: torch.dtype, num_tokens: int) -> None:
    check(Case(num_tokens=num_tokens, top_k=1, num_experts=3, num_used_experts=1, dtype=dtype), isa)


@all_isas
@all_dtypes
@pytest.mark.parametrize(
    ("hidden_size", "intermediate_size"),
    [(8, 8), (8, 24), (16, 40), (24, 56), (40, 72), (72, 8), (104, 264), (1032, 40), (40, 2104)],
)
@pytest.mark.parametrize("num_tokens", [2, 13])
def test_any_sizes_match_the_reference(
    isa: str, dtype: torch.dtype, hidden_size: int, intermediate_size: int, num_tokens: int
) -> None:
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
    check(Case(num_tokens=num_tokens, num_experts=2, dtype=dtype, **sizes), isa)


@all_isas
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (3, 2), (8, 8), (60, 4), (60, 8), (128, 6)])
def test_any_number_of_experts_and_choices_matches_the_reference(isa: str, num_experts: int, top_k: int) -> None:
    check(Case(num_tokens=21, num_experts=num_experts, top_k=top_k, intermediate_size=24), isa)


@all_isas
@all_dtypes
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("num_tokens", [3, 20])
def test_biases_and_activations_match_the_reference(
    isa: str, dtype: torch.dtype, activation: str, interleaved: bool, num_tokens: int
) -> None:
    options = {"activation": activation, "interleaved": interleaved, "has_bias": True}
    check(Case(num_tokens=num_tokens, hidden_size=1064, dtype=dtype, **options), isa)


@all_isas
def test_columns_that_do_not_fit_the_cache_with_the_tokens_match_the_reference(isa: str) -> None:
    for num_tokens in (1, 3, 6, 11, 16):
        check(Case(num_tokens, top_k=1, num_experts=1, hidden_size=5128, intermediate_size=32), isa)


@pytest.mark.skipif("avx512vnni" not in AVAILABLE, reason="this CPU has no AVX-512 VNNI")
def test_avx512vnni_runs_as_avx512() -> None:
    layer = Layer(Case())
    assert torch.equal(bits(layer.run(layer.experts("avx512vnni"))), bits(layer.run(layer.experts("avx512"))))


@all_isas
def test_the_stated_accuracy_holds_with_little_luck(isa: str) -> None:
    layer = Layer(Case(num_tokens=32, hidden_size=512, intermediate_size=768))
    actual = layer.run(layer.experts(isa, max_streamed_tokens=MANY))
    assert relative_rms(actual, layer.expected()) <= STATED[torch.bfloat16]


@all_isas
def test_large_gates_neither_overflow_nor_lose_their_sign(isa: str) -> None:
    layer = Layer(Case(num_tokens=8, top_k=1, num_experts=1, dtype=torch.float32))
    layer.w13[:, : layer.case.intermediate_size] *= 100  # gates of some hundreds
    actual = layer.run(layer.experts(isa))
    assert relative_rms(actual, layer.expected()) <= STATED[torch.float32]


@all_isas
def test_one_changed_weight_is_noticed(isa: str) -> None:
    for tensor in ("w13", "w2"):
        layer = Layer(Case(num_tokens=5, top_k=1, num_experts=1, dtype=torch.float32))
        expected = layer.expected()
        getattr(layer, tensor)[0, 17, 33] += 0.5
        assert relative_rms(layer.run(layer.experts(isa)), expected) > 1e-3


@all_isas
def test_nan_in_one_token_stays_in_it(isa: str) -> None:
    layer = Layer(Case(num_tokens=9, num_experts=2))
    clean = layer.run(layer.experts(isa))
    layer.hidden[4, 3] = torch.nan
    actual = layer.run(layer.experts(isa))
    assert actual[4].isnan().all()
    others = torch.arange(9) != 4
    assert torch.equal(bits(actual[others]), bits(clean[others]))


@all_isas
def test_choices_that_are_computed_elsewhere_add_nothing(isa: str) -> None:
    layer = Layer(Case(num_tokens=6))
    layer.topk_ids[2] = -1
    layer.topk_ids[4, 0] = -7
    expected = layer.expected()
    actual = layer.run(layer.experts(isa))
    assert (actual[2] == 0).all()
    assert relative_rms(actual, expected) <= 1.2 * STATED[torch.bfloat16]


@all_isas
def test_no_tokens_or_no_choices_are_nothing_to_do(isa: str) -> None:
    layer = Layer(Case(num_tokens=0))
    assert layer.run(layer.experts(isa)).shape == (0, layer.case.hidden_size)
    layer = Layer(Case(num_tokens=3))
    layer.topk_ids.fill_(-1)
    assert (layer.run(layer.experts(isa)) == 0).all()


# ---------------------------------------------------------------- the same bits, however it runs
@all_isas
@all_dtypes
def test_the_number_of_threads_changes_no_bit(isa: str, dtype: torch.dtype) -> None:
    case = Case(num_tokens=37, num_experts=5, hidden_size=200, intermediate_size=328, dtype=dtype)
    layer = Layer(case)
    alone = layer.run(layer.experts(isa, max_streamed_tokens=MANY))
    for num_threads in (1, 2, 3):
        with AttentionPool(num_threads) as pool:
            for _ in range(3):
                actual = layer.run(layer.experts(isa, max_streamed_tokens=MANY), pool)
                assert torch.equal(bits(actual), bits(alone))


def test_a_stream_computes_the_same_bits() -> None:
    layer = Layer(Case(num_tokens=20))
    expected = layer.run(layer.experts(max_streamed_tokens=MANY))
    output = torch.empty_like(expected)
    task = ExpertFfnTask(layer.experts(), layer.hidden, layer.topk_ids, layer.topk_weights, output)
    device = EmulatedDevice()
    try:
        device.cpu.call(task.function, task.argument, "experts", keep_alive=task, reads=["hidden"], writes=["output"])
        device.cpu.synchronize()
    finally:
        device.close()
    assert torch.equal(bits(output), bits(expected))


# ---------------------------------------------------------------- streamed or by torch.mm
@all_dtypes
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_experts_by_gemm_match_the_reference(dtype: torch.dtype, activation: str, interleaved: bool) -> None:
    options = {"activation": activation, "interleaved": interleaved, "has_bias": True}
    layer = Layer(Case(num_tokens=70, num_experts=3, hidden_size=136, dtype=dtype, **options))
    actual = layer.run(layer.experts(max_streamed_tokens=1))
    assert relative_rms(actual, layer.expected()) <= STATED_GEMM[dtype]


def test_each_expert_goes_its_own_way_and_is_counted() -> None:
    layer = Layer(Case(num_tokens=40, num_experts=6, top_k=1))
    layer.topk_ids[:, 0] = torch.tensor([0] * 25 + [2] * 12 + [3] * 3)
    layer = with_weights_for(layer)
    experts = layer.experts(max_streamed_tokens=12)
    assert relative_rms(layer.run(experts), layer.expected()) <= STATED_GEMM[torch.bfloat16]
    assert experts.counters == ExpertFfnCounters(num_streamed=2, num_gemm=1, num_streamed_tokens=15, num_gemm_tokens=25)
    layer.run(experts)
    assert experts.counters.num_gemm == 2


def with_weights_for(layer: Layer) -> Layer:
    for expert in layer.topk_ids.unique().tolist():
        layer.w13[expert] = torch.randn(layer.w13.shape[1:], generator=layer.rng) / layer.case.hidden_size**0.5
        layer.w2[expert] = torch.randn(layer.w2.shape[1:], generator=layer.rng) / layer.case.intermediate_size**0.5
    return layer


def test_what_is_streamed_beside_a_gemm_has_the_same_bits() -> None:
    layer = Layer(Case(num_tokens=30, num_experts=2, top_k=1))
    layer.topk_ids[:, 0] = torch.tensor([0] * 25 + [1] * 5)
    layer = with_weights_for(layer)
    all_streamed = layer.run(layer.experts(max_streamed_tokens=MANY))
    mixed = layer.run(layer.experts(max_streamed_tokens=16))
    assert torch.equal(bits(mixed[25:]), bits(all_streamed[25:]))


@pytest.mark.parametrize(
    ("dtype", "isa", "has_amx", "most"),
    [
        (torch.bfloat16, "avx512", True, TOKENS_PER_PASS),
        (torch.bfloat16, "avx512bf16", False, 128),
        (torch.bfloat16, "avx512", False, None),
        (torch.bfloat16, "avx2", False, None),
        (torch.float32, "avx512", True, None),
        (torch.float16, "avx512", True, None),
    ],
)
def test_a_gemm_is_used_where_the_cpu_has_a_fast_one(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, isa: str, has_amx: bool, most: int | None
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": has_amx})
    assert default_max_streamed_tokens(dtype, isa) == most


def test_float16_is_streamed_whatever_the_number_of_tokens() -> None:
    layer = Layer(replace(Case(), num_tokens=300, top_k=1, num_experts=1, dtype=torch.float16))
    experts = layer.experts()
    layer.run(experts)
    assert experts.counters == ExpertFfnCounters(num_streamed=1, num_streamed_tokens=300)
