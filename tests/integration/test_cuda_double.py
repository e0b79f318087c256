# SPDX-License-Identifier: Apache-2.0
"""The whole engine on the CUDA device, a double in CUDA's place: the same tokens, and a proof from the log of its calls
that streams and events alone order every conflict. What only a GPU can show is left to benchmarks/gpu_check.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.engine import Job
from tests.helpers.engine_call import call, result_of
from tests.helpers.oracle import assert_same_tokens
from tests.helpers.paging import reconfigured, run_paged
from tests.helpers.prompts import standard_prompts

pytestmark = pytest.mark.integration

PRELOAD = ["tests.helpers.cuda_double_in_vllm:device_is_cuda"]
NUM_PROMPTS = 10

VARIANTS = {
    "attention on the CPU": {},
    "prompts on the device": {"prefill_attention": "device", "prefill_context": "link", "num_resident_layers": 1},
    "attention on the device": {"attention": "device"},
    "experts on the CPU": {"experts": "cpu"},
    "experts fetched": {"experts": "fetched", "expert_slots": 6, "fetched_up_to_tokens": 40},
}


FLASH_ATTENTION = "tests.helpers.cuda_double_in_vllm:prompts_by_flash_attention"


@pytest.mark.parametrize(
    ("variant", "runner", "more"),
    [
        *((variant, "v1", ()) for variant in VARIANTS),
        ("prompts on the device", "v2", ()),
        ("prompts on the device", "v1", (FLASH_ATTENTION,)),
    ],
)
def test_the_engine_on_cuda_streams_gives_the_same_tokens_and_every_conflict_is_ordered(
    variant, runner, more, checkpoint, hf_result
):
    prompts, options = standard_prompts(NUM_PROMPTS), VARIANTS[variant]
    counts = (1,) if variant == "attention on the device" else (1, 3)
    profile = call("tests.helpers.cuda_double_in_vllm:profile_run")
    jobs = [Job(prompts, {"max_tokens": 8}, before=[*reconfigured(num_micro_batches=n), profile]) for n in counts]
    chunked = {"max_num_batched_tokens": 64, "max_num_seqs": 9}
    result = run_paged(
        checkpoint("qwen2_moe"),
        jobs,
        runner=runner,
        options=options,
        debug={"poison": True},
        preload=[*PRELOAD, *more],
        engine_args=chunked,
    )
    oracle = hf_result("qwen2_moe", num_prompts=NUM_PROMPTS)
    for job, count in zip(result.jobs, counts, strict=True):
        assert result_of(job, -1) == {1: [64], 3: [22, 22, 20]}[count]
        assert_same_tokens(job.token_ids, _first(oracle, 8), variant)
        (stats,) = job.stats
        assert stats["device"] == "cuda"
        assert stats["proof"] == ""
        assert stats["num_calls"] > 100
        assert stats["pinned"] > 0
        assert stats["allocated_in_sweeps"] == []
        assert (stats["steps_brought_down"] > 0) == (variant != "attention on the device")
        assert (stats["bytes_paged"] == 0) == (variant == "experts on the CPU")
        assert (stats["bytes_fetched"] > 0) == (variant == "experts fetched")


def test_the_proof_fails_where_a_wait_is_removed(checkpoint):
    job = Job(standard_prompts(4), {"max_tokens": 4}, before=reconfigured(num_micro_batches=2))
    debug = {"remove_wait": "weight_page<-post_attention"}
    result = run_paged(checkpoint("qwen2_moe"), [job], debug=debug, preload=PRELOAD)
    assert "slot" in result.jobs[0].stats[0]["proof"]


def _first(oracle, num_tokens):
    return replace(oracle, token_ids=[ids[:num_tokens] for ids in oracle.token_ids])
