# SPDX-License-Identifier: Apache-2.0
"""Experts that are not streamed, computed on the CPU where they lie or fetched one by one: the same tokens, and what is
on the link is what had to be."""

from __future__ import annotations

import re

import pytest

from tests.helpers.checkpoints import ARCHITECTURES
from tests.helpers.engine import EngineFailedError, Job
from tests.helpers.gpt_oss_checkpoint import write_gpt_oss
from tests.helpers.oracle import assert_same_tokens
from tests.helpers.paging import (
    assert_pages_are_exact,
    expert_bytes_per_layer,
    experts_per_layer,
    reconfigured,
    run_paged,
)
from tests.helpers.prompts import standard_prompts
from vllm_moe_lightning.policy.policy import evenly_spread

pytestmark = pytest.mark.integration

NUM_PROMPTS = 12
ALL_RACE_SWITCHES = {"poison": True, "check_hazards": True, "copy_timing": "lazy"}
FETCHABLE = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "dbrx")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_experts_on_the_cpu_give_the_same_tokens_and_move_no_pages(arch, checkpoint, hf_result):
    model, prompts = checkpoint(arch), standard_prompts(NUM_PROMPTS)
    jobs = [Job(prompts, before=reconfigured(num_micro_batches=n)) for n in (1, 3)]
    result = run_paged(model, jobs, options={"experts": "cpu"}, debug=ALL_RACE_SWITCHES)
    layers = expert_bytes_per_layer(model)
    for job in result.jobs:
        assert_same_tokens(job.token_ids, hf_result(arch, num_prompts=NUM_PROMPTS), f"{arch}, experts on the CPU")
        (stats,) = job.stats
        assert stats["pages_moved"] == stats["bytes_paged"] == 0
        micro_batches = sum(int(step.rpartition("x")[2]) * n for step, n in stats["steps"].items())
        # An attention in each layer, and experts in each that has some.
        assert stats["cpu_attention_tasks"] == micro_batches * (len(layers) + sum(map(bool, layers)))


@pytest.mark.parametrize("arch", ["mixtral", "qwen2_moe"])
def test_the_layers_on_the_cpu_may_change_with_each_sweep(arch, checkpoint, hf_result):
    model, prompts = checkpoint(arch, num_layers=5), standard_prompts(NUM_PROMPTS)
    jobs = [Job(prompts, before=reconfigured(num_micro_batches=n, schedule=s)) for n, s in ((2, "cgopipe"), (3, "s3"))]
    result = run_paged(
        model,
        jobs,
        options={"experts": "cpu", "num_resident_layers": 1},
        debug=ALL_RACE_SWITCHES,
        preload=["tests.helpers.changing_experts:change_with_each_sweep"],
    )
    expected = hf_result(arch, num_prompts=NUM_PROMPTS, num_layers=5)
    for job in result.jobs:
        assert_same_tokens(job.token_ids, expected, f"{arch}, changing layers")
        (stats,) = job.stats
        assert 0 < stats["pages_moved"] < stats["pages_per_sweep"] * stats["sweeps"]


@pytest.mark.parametrize("wait", ["experts<-experts_offload", "experts_load<-experts", "post_experts<-experts_load"])
def test_a_removed_wait_of_the_experts_is_noticed(wait, checkpoint):
    job = Job(standard_prompts(4), {"max_tokens": 4})
    options = {"experts": "cpu", "num_micro_batches": 2}
    with pytest.raises(EngineFailedError, match="HazardError"):
        run_paged(checkpoint("mixtral"), [job], options=options, debug={"remove_wait": wait, "check_hazards": True})


def fetched(model, **options):
    """One layer more than it has experts would hold them all; every sweep fetches."""
    return {"experts": "fetched", "fetched_up_to_tokens": 10_000, **options}


@pytest.mark.parametrize("arch", FETCHABLE)
def test_fetched_experts_give_the_same_tokens_and_come_up_only_when_they_are_missing(arch, checkpoint, hf_result):
    model, prompts = checkpoint(arch), standard_prompts(NUM_PROMPTS)
    jobs = [Job(prompts, before=reconfigured(num_micro_batches=n)) for n in (1, 3)]
    layers = [num_bytes for num_bytes in expert_bytes_per_layer(model, packed=False) if num_bytes]
    num_experts = experts_per_layer(model)
    all_of_them = len(layers) * num_experts
    few, all_slots = (
        run_paged(model, jobs, options=fetched(model, expert_slots=slots), debug=ALL_RACE_SWITCHES)
        for slots in (3, all_of_them)
    )
    for result in (few, all_slots):
        for job in result.jobs:
            assert_same_tokens(job.token_ids, hf_result(arch, num_prompts=NUM_PROMPTS), f"{arch}, fetched experts")
            (stats,) = job.stats
            assert stats["bytes_paged"] == stats["bytes_fetched"] == stats["experts_fetched"] * layers[0] // num_experts
    first, second = (job.stats[0] for job in few.jobs)
    assert first["experts_fetched"] > all_of_them
    assert second["experts_evicted"] == second["experts_fetched"]  # as many come as go, once all slots are taken
    first, second = (job.stats[0] for job in all_slots.jobs)
    assert 0 < first["experts_fetched"] <= all_of_them
    assert first["experts_evicted"] == second["experts_evicted"] == second["experts_fetched"] == 0
    assert second["experts_found"] > all_of_them


def test_large_sweeps_stream_and_small_ones_fetch(checkpoint, hf_result):
    model, prompts = checkpoint("qwen2_moe", num_layers=5), standard_prompts(NUM_PROMPTS)
    jobs = [Job(prompts, before=reconfigured(num_micro_batches=n, schedule=s)) for n, s in ((2, "cgopipe"), (3, "s3"))]
    options = fetched(model, fetched_up_to_tokens=NUM_PROMPTS, num_resident_layers=1, expert_slots=4)
    result = run_paged(model, jobs, options=options, debug=ALL_RACE_SWITCHES)
    expected = hf_result("qwen2_moe", num_prompts=NUM_PROMPTS, num_layers=5)
    for job in result.jobs:
        assert_same_tokens(job.token_ids, expected, "streamed and fetched")
        (stats,) = job.stats
        assert 0 < stats["bytes_fetched"] < stats["bytes_paged"]
        assert stats["pages_moved"] > 0


@pytest.mark.parametrize("wait", ["routing_offload<-post_attention", "experts_fetch<-routing_offload"])
def test_a_removed_wait_of_fetched_experts_is_noticed(wait, checkpoint):
    model, job = checkpoint("mixtral"), Job(standard_prompts(4), {"max_tokens": 4})
    options = fetched(model, num_micro_batches=2, expert_slots=4)
    with pytest.raises(EngineFailedError, match="HazardError"):
        run_paged(model, [job], options=options, debug={"remove_wait": wait, "check_hazards": True})


@pytest.mark.parametrize("arch", ["mixtral", "qwen2_moe"])
def test_experts_by_torch_s_products_give_the_same_tokens_from_the_same_pages(arch, checkpoint, hf_result):
    """What a GPU without tensor cores in Triton runs, on the CPU build."""
    model, prompts = checkpoint(arch), standard_prompts(NUM_PROMPTS)
    jobs = [Job(prompts, before=reconfigured(num_micro_batches=n)) for n in (1, 3)]
    options = {"expert_kernel": "torch", "num_resident_layers": 1}
    result = run_paged(model, jobs, options=options, debug=ALL_RACE_SWITCHES)
    layers = expert_bytes_per_layer(model, packed=False)
    with_experts = [layer for layer, num_bytes in enumerate(layers) if num_bytes]
    resident = [with_experts[index] for index in evenly_spread(1, len(with_experts))]
    for job in result.jobs:
        assert_same_tokens(job.token_ids, hf_result(arch, num_prompts=NUM_PROMPTS), f"{arch}, torch's products")
        assert_pages_are_exact(job, model, resident=resident, layer_bytes=layers)
    assert f"experts on the device by torch's matrix products, in {len(with_experts)} layers" in result.log


@pytest.mark.parametrize("options", [{"experts": "fetched"}, {"experts": "cpu"}, {"expert_kernel": "torch"}], ids=str)
def test_quantised_experts_that_our_kernels_do_not_know_are_refused_before_they_load(options, tmp_path):
    model = write_gpt_oss(tmp_path)
    with pytest.raises(EngineFailedError, match=r"does not support quantised experts with moe_lightning.*drop those"):
        run_paged(model, [Job(standard_prompts(1))], options=options, engine_args={"dtype": "bfloat16"})


def test_a_plan_gives_fetched_experts_the_room_of_a_layer(checkpoint, hf_result):
    planner = {"planner": "auto", "hardware": "t4", "attention": "cpu"}
    result = run_paged(
        checkpoint("mixtral"),
        [Job(standard_prompts(NUM_PROMPTS))],
        options={**planner, "experts": "fetched", "fetched_up_to_tokens": 40},
        engine_args={"kv_cache_memory_bytes": None},
    )
    (job,) = result.jobs
    assert_same_tokens(job.token_ids, hf_result("mixtral", num_prompts=NUM_PROMPTS), "planned and fetched")
    assert 0 < job.stats[0]["bytes_fetched"] < job.stats[0]["bytes_paged"]
    slots = experts_per_layer(checkpoint("mixtral"))
    assert re.search(rf"expert_slots +{slots} +planned: as many as a layer has experts", result.log)
    assert re.search(r"fetched_up_to_tokens +40 +given", result.log)
