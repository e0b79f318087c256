# SPDX-License-Identifier: Apache-2.0
"""Experts computed on the CPU, where they lie: the same tokens, and what is not streamed is not on the link."""

from __future__ import annotations

import pytest

from tests.helpers.checkpoints import ARCHITECTURES
from tests.helpers.engine import EngineFailedError, Job
from tests.helpers.oracle import assert_same_tokens
from tests.helpers.paging import expert_bytes_per_layer, reconfigured, run_paged
from tests.helpers.prompts import standard_prompts

pytestmark = pytest.mark.integration

NUM_PROMPTS = 12
ALL_RACE_SWITCHES = {"poison": True, "check_hazards": True, "copy_timing": "lazy"}
PER_MICRO_BATCH = ("experts", "attention")


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
