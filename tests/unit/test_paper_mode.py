"""Paper mode against what the artifact prints and the policies of its runs."""

from __future__ import annotations

import pytest

from benchmarks.paper_policies import EXPLAINED, FLAT_OPTIMUM, REPRODUCED, UNEXPLAINED, PolicyCheck
from vllm_moe_lightning.hardware import GIB
from vllm_moe_lightning.paper_model import (
    CPU_MEMORY_SHARE,
    MIXTRAL_8X7B,
    PRINTED_GPU_MEMORY_SHARE,
    artifact_l4,
    best_paper_plan,
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
