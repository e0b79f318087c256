# SPDX-License-Identifier: Apache-2.0
"""Conditions around the engine that must not change the answers: preemption, two ranks, a trace, odd requests to it."""

from __future__ import annotations

import re

import pytest

from tests.helpers.engine import EngineFailedError, Job, Rpc
from tests.helpers.oracle import assert_same_tokens
from tests.helpers.paging import assert_pages_are_exact, reconfigured, run_paged
from tests.helpers.prompts import standard_prompts
from vllm_moe_lightning.pipeline.trace import read_chrome_trace

pytestmark = pytest.mark.integration
BLOCK_BYTES = 4 * 2 * 2 * 32 * 32 * 4  # layers, K and V, heads, tokens, head_dim, float32: the test Mixtral's


def test_preempted_requests_give_the_same_tokens(checkpoint, hf_result):
    """B26. Four requests that end at four blocks each, and nine blocks: by vLLM's own rule of admission, some are taken
    back and computed again."""
    prompts = [prompt[:60] for prompt in standard_prompts(64) if len(prompt) >= 60][:4]
    assert len(prompts) == 4
    model = checkpoint("mixtral", num_layers=4)
    (job,) = run_paged(
        model,
        [Job(prompts, {"max_tokens": 60}, before=reconfigured(num_micro_batches=3))],
        options={"admission": "vllm"},
        engine_args={"kv_cache_memory_bytes": 9 * BLOCK_BYTES},
        debug={"poison": True, "check_hazards": True},
    ).jobs
    assert_same_tokens(job.token_ids, hf_result("mixtral", prompts=prompts, max_tokens=60, num_layers=4), "preempted")
    assert_pages_are_exact(job, model)
    computed_once = sum(len(prompt) + 60 - 1 for prompt in prompts)
    assert job.stats[0]["tokens"] > computed_once, "nothing was preempted"


def test_two_ranks_under_one_plan_page_their_slices_and_give_the_same_tokens(checkpoint, hf_result):
    """B31: a cache as planned for one rank, and both have it."""
    prompts = standard_prompts(12)
    result = run_paged(
        checkpoint("mixtral"),
        [Job(prompts, before=reconfigured(num_micro_batches=3))],
        options={"planner": "auto", "hardware": "t4", "num_resident_layers": 0, "attention": "cpu"},
        engine_args={"tensor_parallel_size": 2, "kv_cache_memory_bytes": None},
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )
    (job,) = result.jobs
    assert_same_tokens(job.token_ids, hf_result("mixtral", num_prompts=12), "two ranks")
    first, second = job.stats
    assert first["pages_moved"] == second["pages_moved"] > 0
    assert first["expert_bytes_on_host"] == second["expert_bytes_on_host"]
    assert first["steps"] == second["steps"]
    assert first["policy"] == {**second["policy"], "num_micro_batches": 3}
    planned_blocks = re.findall(r"planned: (\d+) blocks of 32 tokens", result.log)
    assert planned_blocks == [str(64 * 256 // 32 + 1)]  # max_num_seqs and max_model_len of the engine helper
    assert len(re.findall(r"Explicitly set", result.log)) == 2
    assert f"KV cache size: {int(planned_blocks[0]) * 32:,} tokens" in result.log


def test_a_trace_is_written_when_the_engine_stops(checkpoint, tmp_path):
    trace_file = tmp_path / "trace.json"
    run_paged(
        checkpoint("mixtral"),
        [Job(standard_prompts(4), stats=None)],
        options={"trace_file": str(trace_file)},
        clean_exit=True,
    )
    names = {span.label.partition("(")[0] for span in read_chrome_trace(trace_file).spans}
    assert names == {
        "pre_attention",
        "qkv_offload",
        "attention",
        "hidden_load",
        "post_attention",
        "weight_page",
    }


@pytest.mark.parametrize(
    "change", [{"num_micro_batches": 0}, {"schedule": "fifo"}, {"lookahead": 0}, {"page_mib": 1.0}], ids=str
)
def test_a_change_that_makes_no_sense_is_refused_by_name(checkpoint, change):
    job = Job(standard_prompts(2), before=[Rpc("moe_lightning_reconfigure", kwargs=change)])
    with pytest.raises(EngineFailedError, match=next(iter(change))):
        run_paged(checkpoint("mixtral"), [job])


def test_weights_can_be_neither_reloaded_nor_saved(checkpoint):
    with pytest.raises(EngineFailedError, match="keeps the experts in host pages"):
        run_paged(checkpoint("mixtral"), [Job(standard_prompts(2), before=[Rpc("reload_weights")])])
