# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels against float32: in Triton's interpreter, or on a GPU where there is one.

tests/unit/kernels/test_paged_moe.py runs them in a process of its own, as TRITON_INTERPRET changes what triton.jit
gives, for all that is imported after it. On a GPU: `python -m pytest tests/interpreted/paged_moe_checks.py`.
"""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from benchmarks.torch_decoder import DecoderConfig
from tests.helpers.decoder import make_engine, run
from tests.helpers.expert_host import HostedExperts
from tests.helpers.paged_layer import PagedCase, PagedLayer, relative_rms
from vllm_moe_lightning.device import EmulatedDevice
from vllm_moe_lightning.device.base import Device
from vllm_moe_lightning.device.cuda import CudaDevice
from vllm_moe_lightning.kernels.paged_moe import _as_operand
from vllm_moe_lightning.kernels.paged_moe_launch import PagedMoeStep, paged_fused_moe
from vllm_moe_lightning.kernels.tile_configs import TileConfig
from vllm_moe_lightning.kernels.token_tiles import tiles_of
from vllm_moe_lightning.pipeline.paged_experts import PagedKernel

INTERPRETED = triton.knobs.runtime.interpret
DEVICE = "cpu" if INTERPRETED else "cuda"
# Relative root mean square. float16: two roundings of 0.0002 each (silu(gate) * up, output). bfloat16: eight times that
# on a GPU; the interpreter cuts digits off instead of rounding, which costs twice as much and all in one direction.
STATED = {torch.float16: 0.0005, torch.bfloat16: 0.008 if INTERPRETED else 0.004}
TILES = TileConfig(block_m=16, block_n=32, block_k=32, group_m=1, num_warps=4, num_stages=1)
GROUPED = replace(TILES, group_m=2, block_n=16)


def check(case: PagedCase, config: TileConfig | None = TILES) -> None:
    layer = PagedLayer(case, DEVICE)
    expected = layer.expected()
    assert expected.isfinite().all(), "the reference itself met a trap"
    output, memory = layer.guarded_output()
    returned = paged_fused_moe(
        layer.hidden, layer.topk_weights, layer.topk_ids, layer.table, output=output, config=config
    )
    assert returned is output
    assert layer.is_guarded(memory)
    assert output.isfinite().all()
    luck = 1 + 3 * (case.num_tokens * min(case.hidden_size, case.intermediate_size)) ** -0.5
    assert relative_rms(output, expected) <= STATED[case.dtype] * luck


def make_device() -> Device:
    if INTERPRETED:
        return EmulatedDevice(timing="lazy", poison=True, check_hazards=True)
    return CudaDevice(poison=True, check_hazards=True)


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 33])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_any_number_of_tokens_matches_the_reference(num_tokens: int, dtype: torch.dtype) -> None:
    check(PagedCase(num_tokens=num_tokens, dtype=dtype))


@pytest.mark.parametrize("num_experts", [1, 3, 8, 60, 128, 160])
def test_any_number_of_experts_matches_the_reference(num_experts: int) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 16}
    check(PagedCase(num_tokens=9, top_k=min(num_experts, 3), num_experts=num_experts, **sizes))


@pytest.mark.parametrize("top_k", range(1, 9))
def test_any_number_of_choices_matches_the_reference(top_k: int) -> None:
    check(PagedCase(num_tokens=4, top_k=top_k, num_experts=8, hidden_size=32, intermediate_size=16))


@pytest.mark.parametrize("top_k", [1, 8])
@pytest.mark.parametrize("num_experts", [60, 160])
def test_one_token_of_many_experts_matches_the_reference(top_k: int, num_experts: int) -> None:
    check(PagedCase(num_tokens=1, top_k=top_k, num_experts=num_experts, hidden_size=32, intermediate_size=16))


@pytest.mark.parametrize(("w13_rows", "w2_rows"), [(1, 1), (5, 3), (16, 16), (31, 33), (96, 64), (1000, 1000)])
@pytest.mark.parametrize("experts_share_pages", [False, True], ids=["own-pages", "shared-pages"])
def test_pages_may_begin_and_end_anywhere_in_an_expert(w13_rows: int, w2_rows: int, experts_share_pages: bool) -> None:
    check(PagedCase(w13_rows_per_page=w13_rows, w2_rows_per_page=w2_rows, experts_share_pages=experts_share_pages))


@pytest.mark.parametrize(("hidden_size", "intermediate_size"), [(8, 8), (40, 24), (72, 104), (136, 40)])
def test_sizes_that_no_tile_divides_match_the_reference(hidden_size: int, intermediate_size: int) -> None:
    check(PagedCase(hidden_size=hidden_size, intermediate_size=intermediate_size))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale_group", [(0, 0), (1, 0), (32, 32), (32, 64), (24, 64)], ids=str)
def test_float8_weights_with_scales_match_the_reference(scale_group: tuple[int, int], dtype: torch.dtype) -> None:
    check(PagedCase(hidden_size=128, intermediate_size=64, scale_group=scale_group, dtype=dtype))


def test_float8_sizes_that_no_scale_block_divides_match_the_reference() -> None:
    check(PagedCase(hidden_size=144, intermediate_size=80, scale_group=(64, 64)))


def test_w1_and_w3_may_have_scales_of_their_own() -> None:
    # A group of intermediate_size rows is just that.
    check(PagedCase(hidden_size=32, intermediate_size=32, scale_group=(32, 0)))


def test_every_float8_value_arrives_as_it_is() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = values[values.float().isfinite()]
    assert len(finite) == 254
    assert torch.equal(converted(finite, "bits"), finite.half())
    if INTERPRETED or torch.cuda.get_device_capability() >= (8, 9):
        assert torch.equal(converted(finite, "native"), finite.half())


def test_float8_nan_stays_nan_where_the_chip_can_not_convert() -> None:
    values = torch.tensor([0x7F, 0xFF], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert converted(values, "bits").isnan().all()


@triton.jit
def convert(source, target, COUNT: tl.constexpr, FP8: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(target + index, _as_operand(tl.load(source + index), tl.float16, FP8))


def converted(values: torch.Tensor, conversion: str) -> torch.Tensor:
    padded = torch.zeros(256, dtype=torch.uint8)
    padded[: len(values)] = values.view(torch.uint8)
    target = torch.empty(256, dtype=torch.float16, device=DEVICE)
    convert[(1,)](padded.to(DEVICE), target, COUNT=256, FP8=conversion)
    return target[: len(values)].cpu()


def test_choices_that_are_left_out_add_nothing() -> None:
    check(PagedCase(num_tokens=20, top_k=4, num_experts=6, num_left_out=30))
    check(PagedCase(num_tokens=1, top_k=4, num_experts=6, num_left_out=2))


def test_a_token_whose_choices_are_all_left_out_gets_zeros() -> None:
    layer = PagedLayer(PagedCase(num_tokens=3, num_left_out=6), DEVICE)
    output = paged_fused_moe(layer.hidden, layer.topk_weights, layer.topk_ids, layer.table)
    assert torch.equal(output, torch.zeros_like(output))


def test_no_tokens_give_no_output() -> None:
    layer = PagedLayer(PagedCase(num_tokens=3), DEVICE)
    output = paged_fused_moe(layer.hidden[:0], layer.topk_weights[:0], layer.topk_ids[:0], layer.table)
    assert output.shape == (0, 64)


def test_experts_without_tokens_have_no_tiles() -> None:
    layer = PagedLayer(PagedCase(num_tokens=40, num_experts=60, num_used_experts=2), DEVICE)
    tiles = tiles_of(layer.topk_ids, 60, block_m=16)
    assert int(tiles.num_tiles) == 2 * 3  # 40 tokens of each
    check(layer.case)  # whose other experts have addresses of nothing


def test_the_tiles_that_a_chip_would_get_match_the_reference() -> None:
    check(PagedCase(num_tokens=20, hidden_size=264, intermediate_size=136), config=None)
    check(PagedCase(num_tokens=20, hidden_size=256, intermediate_size=256, scale_group=(128, 128)), config=None)


def test_the_order_of_tiles_changes_no_bit() -> None:
    layer = PagedLayer(PagedCase(num_tokens=50, num_experts=3, hidden_size=32, intermediate_size=64), DEVICE)
    arguments = (layer.hidden, layer.topk_weights, layer.topk_ids, layer.table)
    outputs = [paged_fused_moe(*arguments, config=replace(GROUPED, group_m=group_m)) for group_m in (1, 2)]
    assert torch.equal(*outputs)


def test_experts_in_parts_give_the_same_bits_as_all_at_once() -> None:
    layer = PagedLayer(PagedCase(num_tokens=20, top_k=3, num_experts=7), DEVICE)
    whole = paged_fused_moe(layer.hidden, layer.topk_weights, layer.topk_ids, layer.table, config=TILES)
    step = PagedMoeStep(layer.hidden, layer.topk_weights, layer.topk_ids, layer.table.shape, config=TILES)
    for experts in ([0, 5], [1, 2, 3], [4, 6]):
        step.add(layer.table, experts)
    assert torch.equal(step.finish(), whole)


@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_residency_and_kernel_together_match_the_reference_for_every_number_of_slots(num_slots: int) -> None:
    device = make_device()
    experts = HostedExperts(device, num_layers=2, num_experts=8, num_slots=num_slots)
    for step, num_tokens in enumerate((1, 3, 20, 1)):
        for layer in range(2):
            batch = experts.batch(num_tokens, top_k=2, seed=10 * step + layer)
            output = experts.run(layer, batch, "triton")
            expected = experts.expected(layer, batch)
            assert relative_rms(output, expected) <= STATED[torch.float16] * 1.5
    device.synchronize()
    assert experts.residency.counters.bytes_moved == device.totals()["h2d"].num_bytes
    device.close()


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU benchmarks/gpu_check.py runs the engine")
@pytest.mark.parametrize("num_slots", [2, 8])
def test_the_engine_with_fetched_experts_gives_what_the_reference_in_its_place_gives(num_slots: int) -> None:
    config, results = DecoderConfig(num_layers=2, dtype=torch.float16), {}
    kernels: tuple[PagedKernel, ...] = ("triton", "reference")
    for kernel in kernels:
        options = {"experts": "fetched", "expert_slots": num_slots, "num_micro_batches": 2}
        with make_engine(config, device={"timing": "lazy", "poison": True, "check_hazards": True}, **options) as engine:
            assert engine.executor.fetched_experts is not None
            engine.executor.fetched_experts._kernel = kernel
            results[kernel] = run(engine, ((3, 9, 2), (1, 1, 1)))
            assert engine.executor.residency_counters.num_misses > 0
    for ours, reference in zip(*results.values(), strict=True):
        assert relative_rms(ours, reference.float()) <= 4 * STATED[torch.float16]
