"""Equations 3 to 11, on the paper's own case study and as properties."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_moe_lightning.hardware_presets import preset_profile
from vllm_moe_lightning.model_config import read_model_spec
from vllm_moe_lightning.roofline import (
    Operation,
    Peaks,
    Roof,
    attainable_on_cpu,
    attainable_on_gpu,
    attainable_on_gpu_resident,
    balance_gpu_intensity,
    decode_attention,
    moe_ffn,
    place,
    ridge_intensity,
    tokens_to_saturate,
    turning_point_p1,
    turning_point_p2,
)
from vllm_moe_lightning.workload import HrmPolicy, Workload

NO_DEADLINE = settings(deadline=None)  # of a busy machine
MIXTRAL = read_model_spec(Path(__file__).parent / "model_configs" / "mixtral-8x7b.json")
# Section 3 of the paper, L4 and its host.
CASE_STUDY = Peaks(242e12, 300e9, 1.3e12, 100e9, 16e9)
CONTEXT_512 = Workload(512, 1)

rates = st.floats(1e9, 1e15)
intensities = st.floats(1e-2, 1e5)
peaks_ = st.builds(Peaks, rates, rates, rates, rates, rates)
operations = st.builds(Operation, st.just("x"), intensities, intensities)


def test_the_paper_s_turning_point_p1() -> None:
    assert turning_point_p1(CASE_STUDY) == 81.25


def test_the_paper_s_turning_point_p2_at_a_micro_batch_of_128() -> None:
    ffn = moe_ffn(MIXTRAL, CONTEXT_512, HrmPolicy(128, 8))
    roof, _ = attainable_on_gpu_resident(CASE_STUDY, ffn)
    assert roof == pytest.approx(9.58e12, rel=0.01)
    assert turning_point_p2(CASE_STUDY, ffn.gpu_intensity) == pytest.approx(599, rel=0.01)


@pytest.mark.parametrize(("batch", "intensity"), [(32, 8.0), (128, 31.9), (1024, 252.6)])
def test_the_paper_s_ffn_intensities(batch: int, intensity: float) -> None:
    ffn = moe_ffn(MIXTRAL, CONTEXT_512, HrmPolicy(32, batch // 32))
    assert ffn.cpu_intensity == pytest.approx(intensity, rel=0.02)


def test_decode_attention_has_the_group_size_as_intensity_and_belongs_on_the_cpu() -> None:
    attention = decode_attention(MIXTRAL, CONTEXT_512)
    # The paper plots half of it, since it counts one of the two products.
    assert attention.cpu_intensity == pytest.approx(32 / 8, rel=0.01)
    quantised = decode_attention(MIXTRAL.with_kv_bytes_per_element(0.5), CONTEXT_512)
    assert quantised.cpu_intensity == pytest.approx(4 * 32 / 8, rel=0.05)
    assert (place(CASE_STUDY, attention).on_gpu, place(CASE_STUDY, quantised).on_gpu) == (False, False)
    assert place(CASE_STUDY, attention).roof is Roof.CPU_MEMORY
    assert place(CASE_STUDY, quantised).roof is Roof.CPU_COMPUTE


def test_a_large_batch_brings_the_ffn_to_the_gpu() -> None:
    small = place(CASE_STUDY, moe_ffn(MIXTRAL, CONTEXT_512, HrmPolicy(32, 1)))
    middle = place(CASE_STUDY, moe_ffn(MIXTRAL, CONTEXT_512, HrmPolicy(128, 8)))
    large = place(CASE_STUDY, moe_ffn(MIXTRAL, CONTEXT_512, HrmPolicy(128, 128)))
    assert (small.on_gpu, middle.on_gpu, large.on_gpu) == (False, True, True)
    assert (middle.roof, large.roof) == (Roof.LINK, Roof.GPU_MEMORY)


def test_tokens_to_saturate_is_the_closed_form_of_moe_lens() -> None:
    peaks = Peaks(150e12, 696e9, 1e12, 150e9, 32e9)
    assert tokens_to_saturate(MIXTRAL, peaks) == pytest.approx(150e12 / 32e9 * 8 / 2, rel=1e-3)


@NO_DEADLINE
@given(peaks_, operations)
def test_below_p1_moving_never_wins_and_above_p2_a_larger_batch_gains_nothing(
    peaks: Peaks, operation: Operation
) -> None:
    gpu, _ = attainable_on_gpu(peaks, operation)
    cpu, _ = attainable_on_cpu(peaks, operation)
    if operation.cpu_intensity < turning_point_p1(peaks):
        assert gpu <= cpu * (1 + 1e-9)
    resident, _ = attainable_on_gpu_resident(peaks, operation)
    if operation.cpu_intensity >= turning_point_p2(peaks, operation.gpu_intensity) * (1 + 1e-9):
        assert gpu == pytest.approx(resident)


@NO_DEADLINE
@given(peaks_, intensities)
def test_at_the_balance_point_gpu_memory_and_link_are_equally_high(peaks: Peaks, cpu_intensity: float) -> None:
    gpu_intensity = balance_gpu_intensity(peaks, cpu_intensity)
    assert peaks.gpu_bytes_per_s * gpu_intensity == pytest.approx(peaks.link_bytes_per_s * cpu_intensity)


@NO_DEADLINE
@given(rates, rates)
def test_the_ridge_is_where_both_roofs_meet(flops_per_s: float, bytes_per_s: float) -> None:
    assert bytes_per_s * ridge_intensity(flops_per_s, bytes_per_s) == pytest.approx(flops_per_s)


@NO_DEADLINE
@given(peaks_, operations)
def test_the_chosen_place_is_the_faster_one(peaks: Peaks, operation: Operation) -> None:
    placement = place(peaks, operation)
    assert placement.flops_per_s == max(attainable_on_gpu(peaks, operation)[0], attainable_on_cpu(peaks, operation)[0])


def test_the_picture_is_drawn_and_says_what_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from vllm_moe_lightning.roofline_plot import plot_roofline

    file = tmp_path / "hrm.svg"
    attention, ffn = plot_roofline(MIXTRAL, preset_profile("l4"), Workload(77, 128), HrmPolicy(164, 16), file)
    assert file.stat().st_size > 10_000
    assert not attention.on_gpu
    assert ffn.on_gpu
