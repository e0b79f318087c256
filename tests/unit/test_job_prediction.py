"""Whole jobs: every request gets its tokens, ramp-up and tail cost what they cost, limits are kept."""

from dataclasses import replace

import pytest

from vllm_moe_lightning.cost_model import steady_state_cost
from vllm_moe_lightning.hardware_presets import preset_profile
from vllm_moe_lightning.job_prediction import Job, SweepLimits, job_loads, predict_job, prompt_cuts
from vllm_moe_lightning.model_config import spec_from_config
from vllm_moe_lightning.prompt_cuts import PromptCuts
from vllm_moe_lightning.workload import HrmPolicy, Workload

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 1024,
    "torch_dtype": "bfloat16",
}
SPEC, MACHINE = spec_from_config(MIXTRAL, "small"), preset_profile("t4")
POLICY = HrmPolicy(micro_batch_size=16, num_micro_batches=4, prefill_tokens_per_sweep=1)


@pytest.mark.parametrize("job", [Job(300, 32, 16), Job(7, 128, 1), Job(1, 1, 1), Job(65, 100, 3)])
@pytest.mark.parametrize("limits", [SweepLimits(64, 192), SweepLimits(3, 50), SweepLimits(1000, 100_000)])
def test_each_prompt_is_read_once_and_each_token_decoded_once_within_the_limits(job: Job, limits: SweepLimits) -> None:
    loads = job_loads(job, limits)
    assert sum(load.prefill_tokens for load in loads) == pytest.approx(job.num_requests * job.prompt_len)
    assert sum(load.decode_seqs for load in loads) == job.num_requests * (job.gen_len - 1)
    assert max(load.tokens for load in loads) <= limits.tokens_per_sweep + 1e-6
    assert max(load.decode_seqs for load in loads) <= limits.max_num_seqs


@pytest.mark.parametrize(
    ("job", "slots", "chunks"),
    [
        (Job(8, 100, 1), 8, 1.0),
        (Job(8, 400, 1), 8, 4.0),
        (Job(8, 400, 1), 3, 3.0),
        (Job(1, 400, 1), 8, 1.0),
        (Job(1, 800, 1), 8, 2.0),
    ],
    ids=["short ones whole", "four share a sweep", "three slots", "one alone", "one longer than a sweep"],
)
def test_long_prompts_share_a_sweep(job: Job, slots: int, chunks: float) -> None:
    cuts = prompt_cuts(job, SweepLimits(slots, 400), num_micro_batches=4)
    assert cuts == PromptCuts.equal(job.prompt_len, chunks)


def test_long_prompts_take_longer_where_their_attention_has_fewer_flops() -> None:
    """A T4's cores have a hundredth of its FLOP/s."""
    on_cpu = replace(POLICY, prompts_on_gpu=False)
    job, limits = Job(8, 4000, 2), SweepLimits(64, 8000)
    there, here = (predict_job(SPEC, MACHINE, policy, job, limits) for policy in (POLICY, on_cpu))
    assert here.time_s > there.time_s
    assert here.busy_s["cpu"] > 10 * there.busy_s["cpu"]


def test_one_batch_with_room_for_all_prompts_is_one_prefill_and_then_decodes() -> None:
    loads = job_loads(Job(8, 10, 4), SweepLimits(8, 80))
    assert [(load.prefill_tokens, load.decode_seqs) for load in loads] == [(80, 0), (0, 8), (0, 8), (0, 8)]
    assert [load.decode_context for load in loads] == [0, 11, 12, 13]


def test_a_long_job_tends_to_the_steady_state_and_a_short_one_is_slower() -> None:
    steady = steady_state_cost(SPEC, MACHINE, Workload(prompt_len=32, gen_len=16), POLICY).tokens_per_s
    limits = SweepLimits(64, 64 + 128)
    rates = [
        job.num_generated / predict_job(SPEC, MACHINE, POLICY, job, limits).time_s
        for job in (Job(100, 32, 16), Job(20_000, 32, 16))
    ]
    assert rates[0] < rates[1]
    assert rates[1] == pytest.approx(steady, rel=0.05)


def test_bottlenecks_share_out_the_time_of_the_job() -> None:
    prediction = predict_job(SPEC, MACHINE, POLICY, Job(100, 32, 16), SweepLimits(64, 192))
    assert sum(prediction.bottleneck_s.values()) == pytest.approx(prediction.time_s)
    assert 0 < prediction.num_full_sweeps < prediction.num_sweeps


def test_static_batches_hold_all_requests() -> None:
    assert [job.num_requests for job in Job(130, 8, 8).batches(64)] == [64, 64, 2]


def test_empty_jobs_and_sweeps_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one request"):
        Job(0, 1, 1)
    with pytest.raises(ValueError, match="a slot and a token"):
        SweepLimits(0, 1)
