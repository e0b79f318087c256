"""Paper mode against what the artifact prints and the policies of its runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.paper_policies import EXPLAINED, FLAT_OPTIMUM, REPRODUCED, UNEXPLAINED, PolicyCheck
from vllm_moe_lightning.hardware import GIB
from vllm_moe_lightning.paper_model import (
    CPU_MEMORY_SHARE,
    MIXTRAL_8X7B,
    MIXTRAL_8X22B,
    PRINTED_GPU_MEMORY_SHARE,
    PaperHardware,
    PaperModel,
    artifact_l4,
    artifact_t4,
    best_paper_plan,
    best_paper_plan_with,
    paper_plan,
)


def name(check: PolicyCheck) -> str:
    return f"{check.setting}-{check.gen_len}"


def test_the_readme_s_example_comes_out_to_the_last_printed_digit() -> None:
    hardware = artifact_l4()
    plan = best_paper_plan(MIXTRAL_8X7B, hardware, 77, 32)
    assert plan is not None
    assert (plan.micro_batch_size, plan.num_micro_batches) == (324, 14)
    assert f"{plan.weights_gpu_ratio:.9f}" == "0.055884688"
    assert f"{plan.link_s:.4f}" == "0.1549"
    assert f"{plan.gpu_s:.4f}" == "0.1295"
    assert f"{plan.cpu_s:.4f}" == "0.0257"
    assert f"{plan.decode_tokens_per_s:.2f}" == "944.66"
    assert f"{plan.gpu_memory_bytes / GIB:.2f}" == "20.64"
    assert f"{plan.cpu_memory_bytes / GIB:.2f}" == "147.28"
    assert f"{PRINTED_GPU_MEMORY_SHARE * hardware.gpu_memory_bytes / GIB:.1f}" == "21.6"
    assert f"{CPU_MEMORY_SHARE * hardware.cpu_memory_bytes / GIB:.2f}" == "147.43"


@pytest.mark.parametrize("check", REPRODUCED, ids=name)
def test_the_paper_s_policy_is_found(check: PolicyCheck) -> None:
    assert check.planned() == check.expected


@pytest.mark.parametrize("check", EXPLAINED, ids=name)
def test_the_paper_s_policy_is_found_with_the_host_memory_we_name(check: PolicyCheck) -> None:
    assert check.planned() == check.expected


@pytest.mark.parametrize("check", FLAT_OPTIMUM, ids=name)
def test_the_paper_s_policy_is_as_fast_as_the_one_we_find(check: PolicyCheck) -> None:
    inputs = (check.model, check.hardware, check.prompt_len, check.gen_len)
    best, theirs = best_paper_plan(*inputs), paper_plan(*inputs, *check.expected)
    assert best is not None
    assert theirs is not None
    assert theirs.decode_tokens_per_s == pytest.approx(best.decode_tokens_per_s, rel=1e-9)


@pytest.mark.parametrize("check", UNEXPLAINED, ids=name)
def test_what_we_call_unexplained_really_is(check: PolicyCheck) -> None:
    assert check.planned() != check.expected


def test_no_plan_where_the_weights_fit_nowhere() -> None:
    assert best_paper_plan(MIXTRAL_8X7B, artifact_l4(cpu_memory_gib=64), 77, 32) is None


# Attention on the GPU, by hand. Expert layer: 6 * 10 * 20 * 2 = 2400 bytes; projections: 6 * (400 + 200) = 3600;
# h_kv: 10 * 1 / 2 = 5.
SMALL_MODEL = PaperModel(6, 10, 20, 2, 1, 2, 1)
# 0.86 of it are 54872 bytes.
SMALL_HARDWARE = PaperHardware(54872 / 0.86, 100, 200, 1200, 1e6, 1, 1)


def test_attention_on_the_gpu_by_hand() -> None:
    # Two micro-batches of 3, prompts of 8 and 4 tokens: N = 6, all of the KV 4 * 12 * 5 * 6 * 6 = 8640 bytes.
    plan = paper_plan(SMALL_MODEL, SMALL_HARDWARE, 8, 4, 3, 2, attention_on_gpu=True)
    assert plan is not None
    assert plan.attention_on_gpu
    # Prefill: 3600 + (4*10*3*8 = 960) + (2*10*6*8 = 960) + (8*8*5*3 = 960) + KV of one layer (4*8*5*6 = 960) = 7440.
    # Decode: 3600 + (4*10*6 = 240) + 8640 = 12480, which is more. Workspace: 2 * 2400 + 1.2 * (2*3*1*10*8 = 480
    # and 6*3*1*20*8 = 2880) = 8832. Left for weights: 54872 - 21312 = 33560, more than 2400 * (6 - 2): all of them.
    assert plan.kv_gpu_ratio == 1
    assert plan.weights_gpu_ratio == 1
    assert plan.gpu_memory_bytes == pytest.approx(12480 + 8832 + 9600)
    # No weights, no KV, only hidden states: 2*10*6*8.
    assert plan.cpu_memory_bytes == 960
    assert plan.link_s == 0
    assert plan.cpu_s == 0
    # FFN: max(6*3*10*20/200 = 18, (2*3*30 + 2400)/100 = 25.8). Attention, over 12 tokens: 2*3*12*2*5 + 2*3*12*2 = 864
    # FLOPs, 4.32 s, and 2 * (2*3*2*5 + 2*3*12*5) = 840 bytes, 8.4 s. Two micro-batches of 34.2 s.
    assert plan.gpu_s == pytest.approx(68.4)
    assert plan.decode_tokens_per_s == pytest.approx(6 * 4 / (68.4 * 3 * 6))


def test_attention_on_the_gpu_pays_there_for_all_of_the_kv() -> None:
    # What the prefill has without weights, 7440 + 8832 = 16272, fits; the decode's 21312 don't.
    inputs = (SMALL_MODEL, replace(SMALL_HARDWARE, gpu_memory_bytes=21311 / 0.86), 8, 4, 3, 2)
    assert paper_plan(*inputs, attention_on_gpu=True) is None
    assert paper_plan(*inputs) is not None
    enough = replace(SMALL_HARDWARE, gpu_memory_bytes=(21312 + 2400) / 0.86)
    plan = paper_plan(SMALL_MODEL, enough, 8, 4, 3, 2, attention_on_gpu=True)
    assert plan is not None
    assert plan.weights_gpu_ratio == pytest.approx(2400 / 9600)
    assert plan.kv_gpu_ratio == 1
    # Streams three quarters of a layer, and no KV.
    assert plan.link_s == pytest.approx(1800 / 1200)


def test_kv_that_the_prefill_has_no_room_for_crosses_the_link_at_its_mean_length() -> None:
    # One KV head of 20, so h_kv is 1 and KV is small beside hidden states: the prefill's memory binds. Expert layer:
    # 6 * 20 * 2 * 2 = 480; projections: 6 * (1600 + 80) = 10080. One micro-batch of 3, prompts of 8 and 4 tokens.
    model = PaperModel(6, 20, 2, 20, 1, 2, 1)
    # Prefill without KV: 10080 + (4*20*3*8 = 1920) + (2*20*3*8 = 960) + (8*8*1*3 = 192) = 13152. Workspace: 2 * 480
    # + 1.2 * (2*3*20*8 = 960 and 6*3*2*8 = 288) = 2457.6. One layer's KV is 4*8*1*3 = 96: room for a quarter of it.
    # Decode: 10080 + (4*20*3 = 240) + (4*12*1*3*6 = 864) = 11184, less than the prefill.
    hardware = replace(SMALL_HARDWARE, gpu_memory_bytes=(13152 + 2457.6 + 24) / 0.86)
    plan = paper_plan(model, hardware, 8, 4, 3, 1, attention_on_gpu=True)
    assert plan is not None
    assert plan.kv_gpu_ratio == pytest.approx(0.25)
    assert plan.weights_gpu_ratio == 0
    # All of the layer, and three quarters of the KV of 8 + 4 / 2 tokens: 4*10*1*3 = 120.
    assert plan.link_s == pytest.approx((480 + 90) / 1200)
    # Eight layers of weights with the pinned ones, three quarters of 864, and hidden states 2*20*3*8.
    assert plan.cpu_memory_bytes == pytest.approx(480 * 8 + 648 + 960)
    # With attention on the CPU all KV stays there, and only weights cross.
    on_cpu = paper_plan(model, hardware, 8, 4, 3, 1)
    assert on_cpu is not None
    assert on_cpu.kv_gpu_ratio == 0
    assert on_cpu.weights_gpu_ratio == pytest.approx(24 / (480 * 4))
    assert on_cpu.link_s == pytest.approx(480 * (1 - 24 / (480 * 4)) / 1200)


@pytest.mark.parametrize("check", [*REPRODUCED, *EXPLAINED, *FLAT_OPTIMUM, *UNEXPLAINED], ids=name)
def test_attention_is_on_the_cpu_in_the_paper_s_settings(check: PolicyCheck) -> None:
    inputs = (check.model, check.hardware, check.prompt_len, check.gen_len)
    best = best_paper_plan(*inputs)
    assert best is not None
    assert not best.attention_on_gpu
    on_gpu = best_paper_plan_with(*inputs, attention_on_gpu=True)
    assert on_gpu is None or on_gpu.decode_tokens_per_s < best.decode_tokens_per_s


def test_attention_is_on_the_gpu_where_the_cpu_is_slow_and_the_gpu_is_large() -> None:
    hardware = replace(artifact_t4(), gpu_memory_bytes=80 * GIB, cpu_bytes_per_s=GIB)
    best = best_paper_plan(MIXTRAL_8X7B, hardware, 77, 32)
    assert best is not None
    assert best.attention_on_gpu
    assert best_paper_plan_with(MIXTRAL_8X22B, artifact_t4(), 417, 32, attention_on_gpu=True) is None
