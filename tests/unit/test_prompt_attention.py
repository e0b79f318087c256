# SPDX-License-Identifier: Apache-2.0
"""Attention of prompts in either place: pairs and bytes by hand, the sweep they make, and the simulator's tasks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from vllm_moe_lightning.cost_model import sweep_cost
from vllm_moe_lightning.hardware import HardwareProfile, KernelEfficiencies, TaskOverheads
from vllm_moe_lightning.hardware_presets import preset_profile
from vllm_moe_lightning.kernel_costs import Machine, head_s
from vllm_moe_lightning.model_config import read_model_spec
from vllm_moe_lightning.planned_sweep import simulate_policy
from vllm_moe_lightning.prompt_attention import prompt_attention
from vllm_moe_lightning.prompt_cuts import PromptCuts
from vllm_moe_lightning.resources import HrmResource
from vllm_moe_lightning.workload import HrmPolicy, SweepBuffers, SweepLoad, Workload, prefill_load, steady_load

MIXTRAL = read_model_spec(Path(__file__).parent / "model_configs" / "mixtral-8x7b.json")
LAYERS, WIDTH, KV_WIDTH = 32, 4096, 1024
ON_GPU = HrmPolicy(1, 4)
ON_CPU = replace(ON_GPU, prompts_on_gpu=False, context_query_tokens=0)
FOUR_PROMPTS = SweepLoad(prefill_seqs=4, prefill_len=1000)
PAIRS = 4 * 1000 * 1001 / 2


def ideal() -> HardwareProfile:
    """An L4 at its peaks, the softmax for nothing."""
    profile = preset_profile("l4")
    peaks = KernelEfficiencies(**dict.fromkeys(KernelEfficiencies.__struct_fields__, 1.0))
    return msgspec.structs.replace(
        profile,
        efficiencies=msgspec.structs.replace(peaks, cpu_logit_flops=0.0),
        overheads=TaskOverheads(gpu_task_s=0.0, cpu_task_s=0.0, sweep_s=0.0),
        link=msgspec.structs.replace(profile.link, bidirectional_share=1.0, latency_s=0.0),
    )


def test_whole_prompts_are_attended_to_where_the_policy_says() -> None:
    there = prompt_attention(MIXTRAL, ON_GPU, FOUR_PROMPTS)
    assert (there.gpu_pairs, there.cpu_pairs, there.cpu_tokens, there.raised_keys) == (PAIRS, 0, 0, 0)
    here = prompt_attention(MIXTRAL, ON_CPU, FOUR_PROMPTS)
    assert (here.gpu_pairs, here.cpu_pairs, here.cpu_tokens, here.cpu_keys) == (0, PAIRS, 4000, 4000)


def test_later_chunks_have_a_place_of_their_own() -> None:
    """Of 1000 tokens in four chunks, 250 attend to what is at hand and 750 to a context of 250, 500 and 750 tokens."""
    chunks = SweepLoad(prefill_seqs=1, prefill_len=1000, prefill_cuts=PromptCuts.equal(1000, 4))
    first, all_pairs, context = 250 * 251 / 2, 1000 * 1001 / 2, 250 + 500 + 750
    on_gpu = prompt_attention(MIXTRAL, ON_GPU, chunks)
    assert (on_gpu.gpu_pairs, on_gpu.cpu_pairs, on_gpu.raised_keys) == (all_pairs, 0, context)
    later_on_cpu = prompt_attention(MIXTRAL, replace(ON_GPU, context_query_tokens=0), chunks)
    assert (later_on_cpu.gpu_pairs, later_on_cpu.cpu_pairs) == (first, all_pairs - first)
    assert (later_on_cpu.cpu_tokens, later_on_cpu.cpu_keys) == (750, context + 750)
    assert later_on_cpu.raised_keys == 0
    first_on_cpu = prompt_attention(MIXTRAL, replace(ON_GPU, prompts_on_gpu=False), chunks)
    assert (first_on_cpu.cpu_pairs, first_on_cpu.cpu_tokens, first_on_cpu.cpu_keys) == (first, 250, 250)
    assert first_on_cpu.raised_keys == context


@pytest.mark.parametrize(("least", "raised_keys"), [(250, 1500), (251, 0)])
def test_a_chunk_shorter_than_its_least_stays_on_the_cpu(least: int, raised_keys: float) -> None:
    policy = replace(ON_GPU, context_query_tokens=least)
    chunks = SweepLoad(prefill_seqs=1, prefill_len=1000, prefill_cuts=PromptCuts.equal(1000, 4))
    assert prompt_attention(MIXTRAL, policy, chunks).raised_keys == raised_keys


def test_a_sweep_of_prompts_on_the_cpu_by_hand() -> None:
    profile = ideal()
    here, there = (sweep_cost(MIXTRAL, profile, policy, FOUR_PROMPTS).busy_s for policy in (ON_CPU, ON_GPU))
    flops = LAYERS * 4 * WIDTH * PAIRS
    assert there[HrmResource.CPU] == 0
    assert here[HrmResource.CPU] == pytest.approx(flops / profile.cpu.flops_per_s)
    assert there[HrmResource.GPU] - here[HrmResource.GPU] == pytest.approx(flops / profile.gpu.flops_per_s)
    # Queries go down beside the keys and values, outputs come up.
    q_bytes = LAYERS * 4000 * WIDTH * 2
    link = profile.link
    assert here[HrmResource.D2H] - there[HrmResource.D2H] == pytest.approx(q_bytes / link.d2h_bytes_per_s)
    assert here[HrmResource.H2D] - there[HrmResource.H2D] == pytest.approx(q_bytes / link.h2d_bytes_per_s)
    memory = here[HrmResource.HOST_MEMORY] - there[HrmResource.HOST_MEMORY]
    read_bytes = LAYERS * 4000 * (2 * KV_WIDTH + 2 * WIDTH) * 2
    assert memory == pytest.approx((2 * q_bytes + read_bytes) / profile.cpu.bandwidth_bytes_per_s)


def test_the_softmax_of_each_logit_is_paid_for_in_flops() -> None:
    profile = ideal()
    paid = msgspec.structs.replace(
        profile, efficiencies=msgspec.structs.replace(profile.efficiencies, cpu_logit_flops=512.0)
    )
    free_s, paid_s = (sweep_cost(MIXTRAL, machine, ON_CPU, FOUR_PROMPTS).busy_s for machine in (profile, paid))
    # 128 elements of a head take 4 * 128 FLOPs: as much again.
    assert paid_s[HrmResource.CPU] == pytest.approx(2 * free_s[HrmResource.CPU])


def test_the_context_of_later_chunks_comes_up_once_for_each() -> None:
    profile = ideal()
    whole, cut = (
        sweep_cost(MIXTRAL, profile, ON_GPU, replace(FOUR_PROMPTS, prefill_cuts=PromptCuts.equal(1000, chunks))).busy_s
        for chunks in (1.0, 4.0)
    )
    context_bytes = LAYERS * 4 * 1500 * 2 * KV_WIDTH * 2
    assert cut[HrmResource.H2D] - whole[HrmResource.H2D] == pytest.approx(context_bytes / profile.link.h2d_bytes_per_s)
    assert cut[HrmResource.GPU] == pytest.approx(whole[HrmResource.GPU])


def test_a_cache_on_the_gpu_brings_nothing_up() -> None:
    policy = HrmPolicy(4, 1, attention_on_gpu=True, kv_gpu_ratio=1.0)
    whole, cut = (
        sweep_cost(MIXTRAL, ideal(), policy, replace(FOUR_PROMPTS, prefill_cuts=PromptCuts.equal(1000, chunks))).busy_s
        for chunks in (1.0, 4.0)
    )
    assert cut == whole


@pytest.mark.parametrize("policy", [ON_CPU, ON_GPU, replace(ON_GPU, context_query_tokens=0)])
@pytest.mark.parametrize("chunks", [1.0, 4.0])
def test_simulated_tasks_add_up_to_the_sweep(policy: HrmPolicy, chunks: float) -> None:
    profile = preset_profile("l4")
    link = msgspec.structs.replace(profile.link, bidirectional_share=1.0)
    profile = msgspec.structs.replace(profile, link=link)
    load = replace(FOUR_PROMPTS, prefill_cuts=PromptCuts.equal(1000, chunks), decode_seqs=64, decode_context=500)
    busy = sweep_cost(MIXTRAL, profile, policy, load).busy_s
    simulated = {resource.value: s for resource, s in simulate_policy(MIXTRAL, profile, policy, load).busy_s.items()}
    simulated["gpu"] += head_s(MIXTRAL, Machine(profile), load)
    for name, seconds in simulated.items():
        assert seconds == pytest.approx(busy[HrmResource(name)]), name


def test_one_chunk_is_a_prompt_read_whole() -> None:
    whole = PromptCuts.equal(1000, 1)
    assert replace(whole, later_chunk=0.0) == PromptCuts()


def test_prompts_take_as_many_sweeps_as_the_room_in_one_of_them_says() -> None:
    policy = HrmPolicy(4, 4)
    static = prefill_load(Workload(1000, 100), replace(policy, prefill_tokens_per_sweep=400))
    assert (static.prefill_seqs, static.prefill_cuts) == (0.4, PromptCuts.equal(1000, 2.5))
    for buffers, chunks in (
        (None, 1.0),
        (SweepBuffers(least_prefill_tokens=1000), 1.0),
        (SweepBuffers(), 1000 / 160),  # the steady state's own share: 16 slots, 1000 prompt tokens for 100 sweeps
        (SweepBuffers(total_tokens=516), 2.0),
        (SweepBuffers(least_prefill_tokens=1000, most_prefill_tokens=200), 5.0),
    ):
        load = steady_load(Workload(1000, 100, buffers=buffers), policy)
        assert load.prefill_cuts == PromptCuts.equal(1000, chunks), buffers
