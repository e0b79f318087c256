# SPDX-License-Identifier: Apache-2.0
"""What is planned for where nobody says, and the machine under the emulated device's options."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_moe_lightning.config import parse_options
from vllm_moe_lightning.engine_request import (
    EngineRequest,
    machine_as_it_is_used,
    machine_under_options,
    machine_within,
    workload_of,
)
from vllm_moe_lightning.hardware import EMULATED_GPU_NAME, GIB, MIB, HardwareProfile
from vllm_moe_lightning.hardware_presets import preset_profile
from vllm_moe_lightning.model_config import read_model_spec

MIXTRAL = read_model_spec(Path(__file__).parent / "model_configs/mixtral-8x7b.json")


def request(max_model_len: int, **options: Any) -> EngineRequest:
    return EngineRequest(MIXTRAL, preset_profile("t4"), parse_options(options), max_model_len, 128)


def emulated(device_gib: int, host_gib: int) -> HardwareProfile:
    profile = preset_profile("t4")
    gpu = replace(profile.gpu, name=EMULATED_GPU_NAME, memory_bytes=device_gib * GIB)
    return replace(profile, gpu=gpu, cpu=replace(profile.cpu, memory_bytes=host_gib * GIB))


@pytest.mark.parametrize(
    ("max_model_len", "options", "prompt", "generation"),
    [
        (32768, {}, 512, 128),
        (256, {}, 205, 51),
        (2, {}, 1, 1),
        (32768, {"expected_prompt_tokens": 77.5}, 77.5, 128),
        (128, {"expected_prompt_tokens": 100}, 100, 28),
        (128, {"expected_generation_tokens": 100}, 28, 100),
    ],
)
def test_lengths_that_nobody_gave_fit_max_model_len(
    max_model_len: int, options: dict[str, Any], prompt: float, generation: int
) -> None:
    workload, reasons = workload_of(request(max_model_len, **options))
    assert (workload.prompt_len, workload.gen_len) == (prompt, generation)
    for name in ("expected_prompt_tokens", "expected_generation_tokens"):
        assert reasons[name].startswith("given" if name in options else "default")


def test_lengths_over_max_model_len_are_refused_with_both() -> None:
    with pytest.raises(ValueError, match=r"600 .* 100 .* 700 tokens, max_model_len is 512") as refusal:
        workload_of(request(512, expected_prompt_tokens=600, expected_generation_tokens=100))
    assert "--max-model-len" in str(refusal.value)


def test_a_given_device_memory_is_taken_from_the_host_and_planned_with_to_the_last_byte() -> None:
    machine = machine_under_options(emulated(4, 12), parse_options({"device_memory_mib": 100}))
    assert machine.gpu_memory_budget_bytes == 100 * MIB
    assert machine.cpu.memory_bytes == 16 * GIB - 100 * MIB


def test_a_given_link_speed_slows_memcpy_and_cannot_hasten_it() -> None:
    profile = emulated(4, 12)
    memcpy = profile.link.h2d_bytes_per_s
    slow = machine_under_options(profile, parse_options({"h2d_gb_per_s": 0.5, "d2h_gb_per_s": 1e3}))
    assert slow.link.h2d_bytes_per_s == 0.5e9
    assert slow.link.d2h_bytes_per_s == memcpy


def test_a_preset_planned_for_takes_the_given_link_speed_as_it_is() -> None:
    machine = machine_under_options(preset_profile("t4"), parse_options({"h2d_gb_per_s": 1e3}))
    assert machine.link.h2d_bytes_per_s == 1e12


def test_a_described_machine_has_no_more_host_memory_than_is_free_here() -> None:
    profile = preset_profile("t4")
    assert machine_within(profile, 400 * GIB) == profile
    within = machine_within(profile, 9 * GIB)
    assert within.host_memory_budget_bytes == pytest.approx(9 * GIB, abs=10)
    assert within.gpu == profile.gpu


def test_memory_that_others_hold_is_left_out_beyond_what_is_theirs_anyway() -> None:
    profile = emulated(4, 12)
    assert machine_as_it_is_used(profile, 15 * GIB) == profile  # 1 of the 1.6 GiB that are never planned with
    used = machine_as_it_is_used(profile, 10 * GIB)
    assert profile.host_memory_budget_bytes - used.host_memory_budget_bytes == pytest.approx(4.4 * GIB, rel=1e-6)
