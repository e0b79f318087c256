# SPDX-License-Identifier: Apache-2.0
"""Attention on the device, of all tokens or of prompts alone: the same tokens, and less on the link."""

from __future__ import annotations

import random

import pytest

from tests.helpers.checkpoints import ARCHITECTURES
from tests.helpers.engine import EngineFailedError, Job
from tests.helpers.oracle import assert_same_tokens
from tests.helpers.paging import (
    assert_micro_batches,
    assert_pages_are_exact,
    expert_bytes_per_layer,
    reconfigured,
    run_paged,
)
from tests.helpers.prompts import standard_prompts

pytestmark = pytest.mark.integration

ALL_RACE_SWITCHES = {"poison": True, "check_hazards": True, "copy_timing": "lazy"}
NUM_PROMPTS = 16
CONTEXT_ORDERS = ((1, "cgopipe"), (3, "cgopipe"), (2, "s3"), (2, "serial"))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_with_attention_on_the_device_only_weights_move_and_the_tokens_are_the_same(arch, checkpoint, hf_result):
    model, prompts = checkpoint(arch), standard_prompts(NUM_PROMPTS)
    options = {"attention": "device", "num_resident_layers": 1}
    arguments = {"max_num_batched_tokens": 64, "max_num_seqs": 9, "enable_prefix_caching": True}
    jobs = [Job(prompts, before=reconfigured()) for _ in range(2)]
    result = run_paged(model, jobs, options=options, debug=ALL_RACE_SWITCHES, engine_args=arguments)
    for job in result.jobs:
        assert_same_tokens(job.token_ids, hf_result(arch, num_prompts=NUM_PROMPTS), f"{arch}, attention on the device")
        (stats,) = job.stats
        assert_pages_are_exact(job, model, resident=stats["policy"]["resident_layers"])
        assert_micro_batches(job, 1, NUM_PROMPTS)
        assert stats["cpu_attention_tasks"] == stats["d2h_bytes"] == 0
        # Nothing else is on the link; what was sent ahead for the next sweep may still be under way.
        assert abs(stats["link_bytes"] - stats["bytes_paged"]) <= max(expert_bytes_per_layer(model))


def test_attention_on_the_device_runs_on_model_runner_v2(checkpoint, hf_result):
    model, prompts = checkpoint("mixtral"), standard_prompts(6, max_tokens=70)
    job = Job(prompts, {"max_tokens": 6, "logprobs": None}, before=reconfigured())
    result = run_paged(model, [job], runner="v2", options={"attention": "device"}, debug=ALL_RACE_SWITCHES)
    assert_same_tokens(result.token_ids, hf_result("mixtral", prompts=prompts, max_tokens=6), "device, V2")
    assert_pages_are_exact(result.jobs[0], model)


def test_the_cache_counts_against_the_device_s_memory_where_attention_is_there(checkpoint):
    with pytest.raises(EngineFailedError, match="KV cache"):
        run_paged(
            checkpoint("mixtral"), [], options={"attention": "device", "device_memory_mib": 8.0},
            engine_args={"kv_cache_memory_bytes": 16 << 20},
        )  # fmt: skip


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe"])
def test_prompts_on_the_device_give_the_same_tokens_and_bring_no_queries_down(arch, checkpoint, hf_result):
    model, prompts = checkpoint(arch), standard_prompts(NUM_PROMPTS)
    jobs = [Job(prompts, before=reconfigured(num_micro_batches=n)) for n in (1, 3)]
    on_device, on_cpu = (
        run_paged(model, jobs, options={"prefill_attention": place}, debug=ALL_RACE_SWITCHES)
        for place in ("device", "cpu")
    )
    for job, other in zip(on_device.jobs, on_cpu.jobs, strict=True):
        assert_same_tokens(job.token_ids, hf_result(arch, num_prompts=NUM_PROMPTS), f"{arch}, prompts on the device")
        assert_pages_are_exact(job, model)
        assert 0 < job.stats[0]["d2h_bytes"] < other.stats[0]["d2h_bytes"]
        assert job.stats[0]["bytes_paged"] == other.stats[0]["bytes_paged"]


def test_prompts_on_the_device_go_together_with_chunks_and_prefix_hits(checkpoint, hf_result):
    """Later chunks and hits have context, so their rows are the CPU's, beside whole prompts on the device."""
    generator = random.Random(5)
    unrelated, prefix = ([generator.randrange(256) for _ in range(length)] for length in (200, 150))
    prompts = [unrelated, *(prefix + prompt for prompt in standard_prompts(10, seed=6, max_tokens=40))]
    model, oracle = checkpoint("mixtral"), hf_result("mixtral", prompts=prompts)
    jobs = [Job(prompts, before=reconfigured(num_micro_batches=n, schedule=s)) for n, s in ((2, "cgopipe"), (3, "s4"))]
    arguments = {"enable_prefix_caching": True, "max_num_batched_tokens": 256, "max_num_seqs": 9}
    result = run_paged(
        model, jobs, options={"prefill_attention": "device"}, debug=ALL_RACE_SWITCHES, engine_args=arguments
    )
    for job in result.jobs:
        assert_same_tokens(job.token_ids, oracle, "prompts on the device, with context")
        assert_pages_are_exact(job, model)
    assert result.jobs[0].stats[0]["steps"].get("mixed x2", 0) > 0


def test_context_that_comes_up_for_prompts_gives_the_same_tokens(checkpoint, hf_result):
    """Later chunks of prompts and prefix hits, attended to on the device over frames, beside decoding on the CPU."""
    generator = random.Random(5)
    unrelated, prefix = ([generator.randrange(256) for _ in range(length)] for length in (200, 150))
    prompts = [unrelated, *(prefix + prompt for prompt in standard_prompts(10, seed=6, max_tokens=40))]
    model, oracle = checkpoint("mixtral"), hf_result("mixtral", prompts=prompts)
    jobs = [Job(prompts, before=reconfigured(num_micro_batches=n, schedule=s)) for n, s in CONTEXT_ORDERS]
    arguments = {"enable_prefix_caching": True, "max_num_batched_tokens": 64, "max_num_seqs": 9}
    for prefill in ("cpu", "device"):
        options = {"prefill_context": "link", "prefill_attention": prefill}
        result = run_paged(model, jobs, options=options, debug=ALL_RACE_SWITCHES, engine_args=arguments)
        for job, order in zip(result.jobs, CONTEXT_ORDERS, strict=True):
            assert_same_tokens(job.token_ids, oracle, f"context over the link, {order}, prompts on the {prefill}")
            assert_pages_are_exact(job, model)
            (stats,) = job.stats
            # Beside the pages and the results of the CPU's attention, context was on the link.
            assert stats["link_bytes"] > stats["bytes_paged"]
            assert "kv_load" in " ".join(stats["wait_s_by_kind"])


@pytest.mark.parametrize("wait", ["pre_attention<-kv_load", "kv_load<-pre_attention"])
def test_a_removed_wait_of_the_context_is_noticed(wait, checkpoint):
    """The second time all prompts begin with a hit, so that each micro-batch has context to bring up; three ahead, so
    that the third does so before any result came up on the same stream."""
    generator = random.Random(5)
    prefix = [generator.randrange(256) for _ in range(128)]
    job = Job([prefix + prompt for prompt in standard_prompts(6, seed=6, max_tokens=40)], {"max_tokens": 2})
    with pytest.raises(EngineFailedError, match="HazardError"):
        run_paged(
            checkpoint("mixtral"), [job, job], engine_args={"enable_prefix_caching": True},
            options={"prefill_context": "link", "num_micro_batches": 3, "lookahead": 3},
            debug={"remove_wait": wait, "check_hazards": True},
        )  # fmt: skip
