# SPDX-License-Identifier: Apache-2.0
"""From request to plan: what the user gave stands or is refused with numbers, and the rest fits."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as replace_struct

from vllm_moe_lightning.config import parse_options
from vllm_moe_lightning.engine_plan import EnginePlan
from vllm_moe_lightning.engine_planning import EnginePlanning, PlannedEngine
from vllm_moe_lightning.engine_request import EngineRequest, GivenLimits
from vllm_moe_lightning.errors import PolicyInfeasibleError
from vllm_moe_lightning.hardware import EMULATED_GPU_NAME, GIB
from vllm_moe_lightning.hardware_presets import preset_profile
from vllm_moe_lightning.model_config import read_model_spec
from vllm_moe_lightning.planned_job import policy_of
from vllm_moe_lightning.policy.limits import Batching
from vllm_moe_lightning.policy.search import explain
from vllm_moe_lightning.resources import HrmResource
from vllm_moe_lightning.tensor_parallel import model_of_rank
from vllm_moe_lightning.workload import steady_load

MIXTRAL = read_model_spec(Path(__file__).parent / "model_configs/mixtral-8x7b.json")
BLOCK_BYTES = 128 * MIXTRAL.kv_bytes_per_token
T4 = preset_profile("t4")


def request(given: GivenLimits | None = None, **options: Any) -> EngineRequest:
    return EngineRequest(MIXTRAL, T4, parse_options(options), 4096, 128, given or GivenLimits())


def planned(request: EngineRequest) -> PlannedEngine:
    return EnginePlanning(request).plan()


def plan(request: EngineRequest) -> EnginePlan:
    return planned(request).plan


def test_a_plan_without_given_values_fits_the_machine() -> None:
    engine = planned(request())
    made = engine.plan
    assert engine.policy.fits
    assert made.max_num_seqs == made.num_micro_batches * made.micro_batch_size
    assert made.max_num_batched_tokens == made.max_num_seqs + made.prefill_tokens_per_sweep
    assert made.prefill_tokens_per_sweep == math.ceil(made.max_num_seqs * 512 / 128)
    assert made.num_kv_blocks == 5 * made.max_num_seqs + 1  # 640 tokens each, and the block that vLLM holds back
    assert made.kv_bytes == made.num_kv_blocks * BLOCK_BYTES
    assert made.reasons["max_num_seqs"] == "planned"
    assert made.predicted.generated_tokens_per_s == engine.policy.tokens_per_s
    assert max(made.predicted.busy.values()) <= 1.0


def test_the_batch_is_about_the_smallest_that_is_about_as_fast() -> None:
    """A T4 is bound by host memory, an H200 by computation: there, ten times the slots would gain next to nothing."""
    made = plan(replace(request(), profile=preset_profile("h200")))
    twice = plan(replace(request(GivenLimits(max_num_seqs=2 * made.max_num_seqs)), profile=preset_profile("h200")))
    assert twice.predicted.generated_tokens_per_s < 1.05 * made.predicted.generated_tokens_per_s


@pytest.mark.parametrize("num_seqs", [1, 2, 7, 97, 128, 500])
def test_a_given_batch_is_the_batch(num_seqs: int) -> None:
    made = plan(request(GivenLimits(max_num_seqs=num_seqs)))
    assert made.max_num_seqs == num_seqs
    assert made.reasons["max_num_seqs"] == "given"
    assert (
        (made.num_micro_batches - 1) * made.micro_batch_size
        < num_seqs
        <= (made.num_micro_batches * made.micro_batch_size)
    )
    assert made.num_kv_blocks == max(5 * num_seqs, 4096 // 128) + 1
    assert made.max_num_batched_tokens == num_seqs + max(made.prefill_tokens_per_sweep, 512)


def test_a_batch_whose_cache_the_host_cannot_hold_is_refused_with_need_and_have() -> None:
    with pytest.raises(PolicyInfeasibleError, match=r"need +have") as refusal:
        plan(request(GivenLimits(max_num_seqs=4096)))
    message = str(refusal.value)
    assert "host: KV cache" in message
    assert "fixed by you: --max-num-seqs 4096; drop one" in message


def test_a_given_cache_bounds_the_sequences_in_flight_and_stays_as_given() -> None:
    made = plan(request(GivenLimits(kv_bytes=101 * int(BLOCK_BYTES) + 5, kv_flag="--kv-cache-memory-bytes")))
    assert made.max_num_seqs <= 20  # 100 usable blocks, 5 for each
    assert (made.kv_bytes, made.num_kv_blocks) == (101 * BLOCK_BYTES + 5, 101)
    assert made.reasons["kv_bytes"] == "--kv-cache-memory-bytes"
    assert made.reasons["in_flight"] == "at most 20, by --kv-cache-memory-bytes"


def test_a_given_batch_larger_than_the_given_cache_holds_is_kept_and_planned_for_what_it_holds() -> None:
    given = GivenLimits(max_num_seqs=256, kv_bytes=101 * int(BLOCK_BYTES), kv_flag="--kv-cache-memory-bytes")
    engine = planned(request(given))
    assert engine.plan.max_num_seqs == 256
    assert engine.policy.policy.batch_size <= 20


@pytest.mark.parametrize(("num_blocks", "fits"), [(32, False), (33, True)])
def test_one_sequence_of_a_given_max_model_len_must_fit_beside_the_block_held_back(num_blocks: int, fits: bool) -> None:
    """B18: 4096 tokens are 32 blocks."""
    given = GivenLimits(kv_bytes=num_blocks * int(BLOCK_BYTES), kv_flag="--kv-cache-memory-bytes", max_model_len=4096)
    if fits:
        assert plan(request(given)).max_model_len == 4096
        return
    with pytest.raises(ValueError, match="of max_model_len 4096 needs 33 KV blocks of 128 tokens") as refusal:
        plan(request(given))
    message = str(refusal.value)
    assert "gives 32 (512.0 MiB)" in message
    assert "lower --max-model-len to 3968" in message


def test_a_max_model_len_that_nobody_gave_is_lowered_to_what_the_given_cache_holds() -> None:
    made = plan(request(GivenLimits(kv_bytes=32 * int(BLOCK_BYTES), kv_flag="--kv-cache-memory-bytes")))
    assert made.max_model_len == 31 * 128
    assert made.reasons["max_model_len"].startswith("lowered from 4096")


def test_a_cache_too_small_for_the_expected_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="of the expected 640 tokens needs 6 KV blocks"):
        plan(request(GivenLimits(kv_bytes=5 * int(BLOCK_BYTES), kv_flag="kv_cache_gib")))


def test_the_model_s_own_max_model_len_is_lowered_where_host_memory_does_not_hold_one_such_sequence() -> None:
    long = replace(request(), max_model_len=2_000_000)
    made = plan(long)
    assert 640 <= made.max_model_len < 2_000_000
    assert made.max_model_len == (made.num_kv_blocks - 1) * 128
    assert "host memory" in made.reasons["max_model_len"]
    with pytest.raises(PolicyInfeasibleError, match="max-model-len"):
        plan(replace(long, given=GivenLimits(max_model_len=2_000_000)))


@pytest.mark.parametrize("options", [{"num_micro_batches": 5}, {"num_resident_layers": 0}, {"num_resident_layers": 1}])
def test_given_parts_of_the_policy_are_kept(options: dict[str, int]) -> None:
    made = plan(request(**options))
    for name, value in options.items():
        assert getattr(made, name) == value
        assert made.reasons[name] == "given"


def test_resident_layers_that_the_device_cannot_hold_are_refused_with_need_and_have() -> None:
    with pytest.raises(PolicyInfeasibleError, match=r"need +have") as refusal:
        plan(request(num_resident_layers=20))
    assert "GPU: resident experts" in str(refusal.value)
    assert "fixed by you: num_resident_layers 20" in str(refusal.value)


def test_more_resident_layers_than_there_are_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_resident_layers: 33 of the 32 MoE layers .* give 0\.\.32"):
        plan(request(num_resident_layers=33))


def test_a_given_prefill_budget_bounds_the_batch_that_it_can_feed() -> None:
    made = plan(request(prefill_tokens_per_sweep=400))
    assert made.prefill_tokens_per_sweep == 400
    assert made.max_num_seqs <= 100  # each finishes after 128 sweeps and needs 512 tokens of prefill: 4 a sweep
    assert made.max_num_batched_tokens >= made.max_num_seqs + 400


def test_a_given_token_budget_is_kept_and_bounds_the_batch() -> None:
    made = plan(request(GivenLimits(max_num_batched_tokens=1000)))
    assert made.max_num_batched_tokens == 1000
    assert made.max_num_seqs <= 200  # a decode token and four of prefill each
    assert made.reasons["in_flight"] == "at most 200, by --max-num-batched-tokens"


def test_a_prefill_budget_that_leaves_no_decode_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"500 leaves no room .* --max-num-batched-tokens 500; give less than 500"):
        plan(request(GivenLimits(max_num_batched_tokens=500), prefill_tokens_per_sweep=500))


def test_buffers_for_a_large_token_budget_take_the_place_of_resident_layers() -> None:
    small = plan(request(GivenLimits(max_num_seqs=64)))
    large = plan(request(GivenLimits(max_num_seqs=64, max_num_batched_tokens=100_000)))
    assert large.num_resident_layers < small.num_resident_layers
    with pytest.raises(PolicyInfeasibleError, match=r"need +have"):
        plan(request(GivenLimits(max_num_seqs=64, max_num_batched_tokens=10_000_000)))


def test_without_chunked_prefill_a_sweep_holds_the_longest_prompt() -> None:
    made = plan(replace(request(GivenLimits(max_num_seqs=8)), enable_chunked_prefill=False))
    assert made.max_num_batched_tokens == 8 + 4096


def test_a_small_batch_has_room_for_a_whole_prompt_in_a_sweep() -> None:
    made = plan(request(GivenLimits(max_num_seqs=8)))
    assert (made.prefill_tokens_per_sweep, made.max_num_batched_tokens) == (32, 8 + 512)


def test_a_share_of_host_memory_holds_experts_and_cache() -> None:
    made = plan(request(GivenLimits(host_memory_share=0.6)))
    on_host = (32 - made.num_resident_layers) * made.expert_layer_bytes + made.kv_bytes
    assert on_host <= 0.6 * T4.cpu.memory_bytes
    assert made.max_num_seqs < plan(request()).max_num_seqs
    assert made.reasons["host_memory_share"] == "0.6, by --gpu-memory-utilization"


def test_a_share_of_device_memory_leaves_fewer_resident_layers() -> None:
    made, whole = (planned(request(GivenLimits(gpu_memory_share=share))) for share in (0.6, None))
    assert made.policy.gpu_memory.total_bytes <= 0.6 * T4.gpu.memory_bytes
    assert made.plan.num_resident_layers < whole.plan.num_resident_layers
    assert made.plan.reasons["gpu_memory_share"] == "0.6, by --gpu-memory-utilization"


def test_attention_on_the_device_is_planned_with_the_cache_there_and_one_micro_batch() -> None:
    made = EnginePlanning(request(), attention_on_device=True).plan()
    policy = made.policy.policy
    assert (policy.attention_on_gpu, policy.kv_gpu_ratio, policy.num_micro_batches) == (True, 1.0, 1)
    assert made.policy.gpu_memory.items["KV cache on the GPU"] >= 0.99 * made.plan.kv_bytes
    assert made.policy.gpu_memory.fits
    assert made.plan.attention_on_device


def test_the_schedule_that_attends_on_the_device_is_planned_with_its_frames_and_the_cache_on_the_host() -> None:
    engine = planned(request(schedule="s4"))
    policy = engine.policy.policy
    assert (policy.attention_on_gpu, policy.kv_gpu_ratio) == (True, 0.0)
    assert engine.policy.gpu_memory.items["KV frames"] > 0
    assert "schedule" not in engine.plan.reasons


def emulated_request(**options: Any) -> EngineRequest:
    emulated = replace_struct(T4, gpu=replace_struct(T4.gpu, name=EMULATED_GPU_NAME))
    return replace(request(expected_prompt_tokens=1700.0, expected_generation_tokens=64, **options), profile=emulated)


def test_prompts_are_planned_with_attention_where_the_engine_will_have_it() -> None:
    by_default, on_device = (planned(emulated_request(**options)) for options in ({}, {"prefill_attention": "device"}))
    assert not by_default.plan.prompts_on_device
    assert by_default.plan.reasons["prefill_attention"].startswith("auto: ")
    assert on_device.plan.prompts_on_device
    assert on_device.plan.reasons["prefill_attention"] == "given"
    assert plan(request()).prompts_on_device
    assert not plan(request(prefill_attention="cpu")).prompts_on_device
    # The same policy, explained with prompts in the other place, keeps the CPU busy for less.
    policy, machine, work = by_default.policy.policy, by_default.machine, by_default.workload
    other = explain(MIXTRAL, machine, work, Batching.CONTINUOUS, replace(policy, prompts_on_gpu=True))
    busy, other_busy = (engine.cost.decode.busy_s for engine in (by_default.policy, other))
    assert busy[HrmResource.CPU] > other_busy[HrmResource.CPU]
    assert busy[HrmResource.GPU] < other_busy[HrmResource.GPU]


def test_a_job_is_predicted_with_prompts_in_the_place_of_the_plan() -> None:
    for options in ({}, {"prefill_attention": "device"}, {"prefill_context": "link"}):
        made = plan(emulated_request(**options))
        policy = policy_of(made)
        places = (policy.prompts_on_gpu, policy.context_query_tokens)
        assert places == (made.prompts_on_device, made.context_query_tokens)
    on_device = plan(emulated_request(schedule="s4"))
    assert on_device.prompts_on_device
    assert "prefill_attention" not in on_device.reasons


def test_frames_for_prompts_contexts_are_planned_with_where_the_engine_makes_them() -> None:
    def frame_bytes(**options: Any) -> float:
        return planned(request(**options)).policy.gpu_memory.items["frames for prompts' contexts"]

    assert frame_bytes() == 2 * 4096 * MIXTRAL.kv_bytes_per_token_layer
    assert frame_bytes(prefill_context="cpu") == 0


@pytest.mark.parametrize("context", ["auto", "cpu"])
def test_prompts_longer_than_a_sweep_s_room_are_planned_in_chunks(context: str) -> None:
    """The search's whole table is checked by the formula of single policies: a plan that is off would warn."""
    given = GivenLimits(max_num_seqs=8)
    long = request(given, expected_prompt_tokens=3500.0, expected_generation_tokens=500, prefill_context=context)
    engine = planned(long)
    assert engine.policy.warnings == ()
    load = steady_load(engine.workload, engine.policy.policy)
    assert load.prefill_cuts.first_tokens == pytest.approx(2048 / 3500)
    assert (engine.plan.context_query_tokens > 0) == (context == "auto")


def test_a_schedule_that_the_prediction_is_not_about_is_named() -> None:
    made = plan(request(schedule="s3"))
    assert made.reasons["schedule"].startswith("s3, given; the prediction is cgopipe's")


def test_ranks_plan_with_their_slice_and_their_share_of_the_host() -> None:
    one = plan(request())
    two = plan(replace(request(), profile=preset_profile("t4", num_gpus=2), num_ranks=2))
    assert two.expert_layer_bytes * 2 == one.expert_layer_bytes
    slice_bytes = 128 * model_of_rank(MIXTRAL, 2).kv_bytes_per_token
    assert two.kv_bytes == two.num_kv_blocks * slice_bytes
    # Weights and cache of both ranks: the one host holds them.
    on_host = (32 - two.num_resident_layers) * two.expert_layer_bytes + two.kv_bytes
    assert 2 * on_host <= T4.host_memory_budget_bytes


def test_the_disk_of_a_profile_is_not_planned_with_since_the_engine_reads_none() -> None:
    small_host = replace_struct(T4, cpu=replace_struct(T4.cpu, memory_bytes=64 * GIB))
    with pytest.raises(PolicyInfeasibleError, match="host: streamed experts"):
        plan(replace(request(), profile=small_host))


@pytest.mark.parametrize("device_gib", [15, 24, 48])
def test_fetched_experts_have_a_layer_s_worth_of_slots_and_large_sweeps_lose_little(device_gib: int) -> None:
    larger = {"device_memory_mib": device_gib << 10}
    whole, made = plan(request(**larger)), plan(request(experts="fetched", **larger))
    assert made.expert_slots == 8
    assert made.num_resident_layers in (whole.num_resident_layers, whole.num_resident_layers - 1)
    assert made.reasons["expert_slots"] == "planned: as many as a layer has experts"
    assert made.reasons["num_resident_layers"] == "planned"
    assert made.fetched_up_to_tokens >= 4
    assert made.predicted.generated_tokens_per_s > 0.85 * whole.predicted.generated_tokens_per_s


def test_where_the_device_has_no_room_for_slots_the_plan_goes_without_and_says_so() -> None:
    all_resident = {"device_memory_mib": 91 << 10, "num_resident_layers": 32}
    made = plan(request(experts="fetched", **all_resident))
    assert (made.expert_slots, made.fetched_up_to_tokens, made.num_resident_layers) == (0, 0, 32)
    assert made.reasons["expert_slots"].startswith("none: ")


def test_given_slots_take_their_room_and_what_is_left_is_resident() -> None:
    whole, made = plan(request()), plan(request(experts="fetched", expert_slots=8, fetched_up_to_tokens=3))
    assert made.expert_slots == 8
    assert made.num_resident_layers == whole.num_resident_layers - 1
    assert (made.fetched_up_to_tokens, made.reasons["fetched_up_to_tokens"]) == (3, "given")
    assert planned(request(experts="fetched", expert_slots=8)).policy.fits


def test_more_slots_than_the_device_holds_are_refused_with_need_and_have() -> None:
    with pytest.raises(
        PolicyInfeasibleError, match=r"GPU: slots of fetched experts[\s\S]*fixed by you: expert_slots 256"
    ):
        plan(request(experts="fetched", expert_slots=256))


def test_without_fetched_experts_there_are_no_slots() -> None:
    made = plan(request())
    assert (made.expert_slots, made.fetched_up_to_tokens) == (0, 0)
    assert "expert_slots" not in made.reasons


def test_where_fetching_is_never_predicted_to_be_faster_there_are_no_slots_and_the_plan_says_so() -> None:
    fast = replace_struct(T4, link=replace_struct(T4.link, h2d_bytes_per_s=1e13))
    whole, made = (plan(replace(request(**options), profile=fast)) for options in ({}, {"experts": "fetched"}))
    assert (made.expert_slots, made.fetched_up_to_tokens) == (0, 0)
    assert made.num_resident_layers == whole.num_resident_layers
    assert made.reasons["expert_slots"] == "none: fetching is not predicted to be faster"
