# SPDX-License-Identifier: Apache-2.0
"""The scheduler classes themselves, driven step by step without a model: who starts when, who waits how long."""

from __future__ import annotations

import math
import random

import pytest

from tests.helpers.engine_call import call, calls, result_of
from tests.helpers.paging import run_paged

pytestmark = pytest.mark.integration

OURS = ("MoELightningScheduler", "AsyncMoELightningScheduler")
PLAN = {
    "expected_prompt_tokens": 40.0,
    "expected_generation_tokens": 20.0,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 256,
    "prefill_tokens_per_sweep": 64,
    "num_micro_batches": 4,
    "micro_batch_size": 8,
    "kv_bytes": 1 << 20,
    "num_resident_layers": 0,
    "predicted": {
        "generated_tokens_per_s": 1.0,
        "total_tokens_per_s": 1.0,
        "sweep_s": 1.0,
        "bottleneck": "gpu",
        "busy": {"gpu": 1.0},
    },
}


def drive(**kwargs):
    return call("tests.helpers.scheduler_call:drive", **kwargs)


def random_requests(seed, count=60):
    generator = random.Random(seed)
    requests, at_step = [], 0
    for _ in range(count):
        at_step += generator.choice((0, 0, 0, 1, 3))
        is_long = generator.random() < 0.15
        max_tokens = generator.randint(1, 60)
        requests.append(
            {
                "prompt": generator.randint(200, 3000) if is_long else generator.randint(1, 40),
                "max_tokens": max_tokens,
                "length": generator.randint(1, max_tokens),
                "at_step": at_step,
                "priority": generator.randint(0, 3),
            }
        )
    return requests


HUGE_THEN_TINY = [
    {"prompt": 3500, "max_tokens": 4},
    *({"prompt": 8, "max_tokens": 8, "at_step": 1 + index} for index in range(30)),
]
TIGHT = [{"prompt": 20, "max_tokens": 400, "length": 300} for _ in range(24)]
"""Ends at 10 blocks each: 24 of them in 60 blocks cannot all run to their end at once."""
SHORT_ANSWERS = [{"prompt": 20, "max_tokens": 400, "length": 20 + index % 12} for index in range(240)]
SHARED_HEAD = [{"prompt": [*range(10, 138), 150 + index], "max_tokens": 30, "at_step": index} for index in range(24)]


@pytest.fixture(scope="module")
def traces(checkpoint):
    """name -> what the scheduler did; one engine for all of them."""
    wanted = {
        "huge alone": drive(requests=HUGE_THEN_TINY[:1]),
        "huge, stock": drive(requests=HUGE_THEN_TINY, scheduler="stock"),
    }
    for name in OURS:
        wanted[f"huge, {name}"] = drive(requests=HUGE_THEN_TINY, scheduler=name)
        for seed in range(6):
            wanted[f"random {seed}, {name}"] = drive(
                requests=random_requests(seed),
                scheduler=name,
                num_blocks=10_000 if seed % 2 else 140,
                max_num_seqs=32,
                max_num_batched_tokens=(64, 96, 256)[seed % 3],
                options={"num_micro_batches": (1, 4, 8)[seed % 3]},
                config={"policy": "priority"} if seed == 2 else {},
                enable_prefix_caching=seed in (3, 4),
            )
        for admission in ("auto", "worst_case", "vllm"):
            wanted[f"tight, {admission}, {name}"] = drive(
                requests=TIGHT, scheduler=name, num_blocks=61, options={"admission": admission}
            )
        for admission in ("worst_case", "expected"):
            wanted[f"short answers, {admission}, {name}"] = drive(
                requests=SHORT_ANSWERS,
                scheduler=name,
                num_blocks=61,
                max_num_batched_tokens=256,
                options={"admission": admission},
            )
        # max_tokens left open: all that max_model_len leaves.
        wanted[f"open answers, auto, {name}"] = drive(
            requests=[{**request, "max_tokens": 419 - 20} for request in SHORT_ANSWERS],
            scheduler=name,
            num_blocks=61,
            max_num_batched_tokens=256,
            max_model_len=419,
        )
    wanted["answers grow"] = drive(
        requests=[*SHORT_ANSWERS[:120], *({**request, "length": 390} for request in SHORT_ANSWERS[:80])],
        num_blocks=61,
        max_num_batched_tokens=256,
        options={"admission": "expected"},
    )
    wanted["shared head"] = drive(requests=SHARED_HEAD, num_blocks=80, enable_prefix_caching=True)
    wanted["whole prompts"] = drive(
        requests=[{"prompt": 200, "max_tokens": 3}, *HUGE_THEN_TINY[1:10]],
        max_num_batched_tokens=256,
        config={"enable_chunked_prefill": False},
        plan=PLAN,
    )
    as_planned = [{"prompt": 40, "max_tokens": 20 + index % 5} for index in range(150)]
    other = [{"prompt": 160, "max_tokens": 20 + index % 5} for index in range(300)]
    wanted["planned"] = drive(requests=as_planned, plan=PLAN, max_num_seqs=32, max_num_batched_tokens=512)
    wanted["re-planned"] = drive(requests=as_planned + other, plan=PLAN, max_num_seqs=32, max_num_batched_tokens=512)
    result = run_paged(checkpoint("mixtral"), [calls(*wanted.values())])
    return {name: result_of(result.jobs[0], index) for index, name in enumerate(wanted)}, result.log


@pytest.fixture(scope="module")
def trace(traces):
    return traces[0].__getitem__


@pytest.mark.parametrize("name", OURS)
def test_a_short_prompt_behind_a_huge_one_waits_no_longer_than_stated(name, trace):
    """B19. 3500 tokens, then 30 prompts of 8 at a budget of 64; stock keeps them waiting for the whole prefill."""
    steps = trace(f"huge, {name}")
    waits = [steps["first_token"][str(i)] - HUGE_THEN_TINY[i]["at_step"] for i in range(1, 31)]
    budget = 64 - 30
    assert max(waits) <= math.ceil(8 / (budget // 2)) + 2
    stock = trace("huge, stock")
    assert max(stock["first_token"][str(i)] - HUGE_THEN_TINY[i]["at_step"] for i in range(1, 31)) > 50
    # And the huge one: 1.5 times its solo time, plus the work of the tiny ones.
    assert steps["ended"]["0"] <= 1.5 * trace("huge alone")["ended"]["0"] + 30 * (8 + 8) / 64


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("seed", [1, 3, 5])
def test_no_short_prompt_of_a_random_stream_waits_longer_than_stated(seed, name, trace):
    """With slots and blocks for all. The asynchronous scheduler sees a token one step later."""
    requests, steps = random_requests(seed), trace(f"random {seed}, {name}")
    most_tokens, micro_batches = (64, 96, 256)[seed % 3], (1, 4, 8)[seed % 3]
    budget = most_tokens - 32
    share = budget // max(2, micro_batches)
    late = name.startswith("Async")
    checked = 0
    for index, request in enumerate(requests):
        first = steps["first_token"][str(index)]
        slots_were_free = all(step["running"] < 32 for step in steps["steps"][request["at_step"] : first + 1])
        if request["prompt"] > share or not slots_were_free:
            continue
        checked += 1
        ahead = sum(
            other["prompt"]
            for number, other in enumerate(requests[: index + 1])
            if other["prompt"] <= most_tokens // 2 and steps["first_token"][str(number)] >= request["at_step"]
        )
        assert first - request["at_step"] <= math.ceil(ahead / (budget // 2)) + 2 + late, index
    assert checked > 5


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("seed", range(6))
def test_every_request_ends_and_no_decoding_one_ever_pauses(seed, name, trace):
    steps = trace(f"random {seed}, {name}")
    assert len(steps["ended"]) == 60
    assert not any(step["starved"] for step in steps["steps"])
    assert steps["preemptions"] == 0
    assert steps["free_after"] == steps["free_before"]


@pytest.mark.parametrize("name", OURS)
def test_the_class_is_built_on_the_scheduler_that_vllm_would_have_used(name, trace):
    """B27."""
    assert ("AsyncScheduler" in trace(f"huge, {name}")["bases"]) == name.startswith("Async")


@pytest.mark.parametrize("name", OURS)
def test_admission_by_the_worst_case_never_preempts(name, trace):
    """Where vLLM's own rule, which looks at the prompt only, does."""
    worst_case, vllm = trace(f"tight, worst_case, {name}"), trace(f"tight, vllm, {name}")
    assert vllm["preemptions"] > 0
    assert worst_case["preemptions"] == 0
    assert max(step["running"] for step in worst_case["steps"]) == 60 // 14  # 419 slots are 14 blocks
    for steps in (worst_case, vllm):
        assert len(steps["ended"]) == len(TIGHT)
        assert steps["free_after"] == steps["free_before"]


@pytest.mark.parametrize("name", OURS)
def test_admission_by_expectation_runs_more_at_once_and_seldom_preempts(name, trace):
    """Answers of 20 to 31 tokens where 400 were allowed."""
    worst_case, expected = trace(f"short answers, worst_case, {name}"), trace(f"short answers, expected, {name}")
    assert max(step["running"] for step in worst_case["steps"]) == 60 // 14
    assert max(step["running"] for step in expected["steps"]) > 20
    assert len(expected["steps"]) < 0.6 * len(worst_case["steps"])
    assert expected["preemptions"] <= 0.01 * len(SHORT_ANSWERS)
    assert expected["free_after"] == expected["free_before"]


@pytest.mark.parametrize("name", OURS)
def test_answers_whose_length_is_left_open_are_admitted_by_expectation_and_others_by_the_worst_case(name, trace):
    """What happens unless an option says otherwise."""
    worst_case, open_ones = trace(f"short answers, worst_case, {name}"), trace(f"open answers, auto, {name}")
    stated = trace(f"tight, auto, {name}")
    assert max(step["running"] for step in open_ones["steps"]) > 20
    assert len(open_ones["steps"]) < 0.6 * len(worst_case["steps"])
    assert open_ones["preemptions"] <= 0.01 * len(SHORT_ANSWERS)
    assert stated["preemptions"] == 0
    assert max(step["running"] for step in stated["steps"]) == 60 // 14


def test_a_worst_case_far_from_what_happens_is_told_once(traces):
    """Both classes ran into it: 4 requests at once, with two blocks each in use out of 60."""
    assert traces[1].count("set moe_lightning.admission to 'expected'") == len(OURS)


def test_a_preemption_makes_admission_careful_again(trace, traces):
    """Answers become ten times as long: one burst of preemptions, then by the worst case."""
    steps = trace("answers grow")
    assert len(steps["ended"]) == 200
    bursts = [index for index, step in enumerate(steps["steps"]) if step["preempted"]]
    assert bursts
    assert all(step["running"] <= 60 // 13 for step in steps["steps"][bursts[-1] + 400 :])
    assert steps["preemptions"] < 40
    assert traces[1].count("were preempted for want of KV blocks") >= 1


def test_blocks_shared_with_running_requests_are_counted_once(trace):
    """A head of four blocks; each request adds two of its own to the pool's 79."""
    steps = trace("shared head")
    assert steps["preemptions"] == 0
    assert max(step["running"] for step in steps["steps"]) == 24
    assert steps["free_after"] == steps["free_before"]


def test_without_chunked_prefill_a_prompt_is_taken_whole(trace):
    steps = trace("whole prompts")
    assert len(steps["ended"]) == 10
    assert {step["tokens"]["0"] for step in steps["steps"] if "0" in step["tokens"]} == {200, 1}


def test_a_sweep_takes_what_the_plan_says(trace):
    totals = [sum(step["tokens"].values()) for step in trace("planned")["steps"]]
    assert max(totals) == 32 + 64


def test_the_prefill_share_follows_the_requests_that_come_and_says_so_once(trace, traces):
    """Prompts four times as long as planned."""
    totals = [sum(step["tokens"].values()) for step in trace("re-planned")["steps"]]
    assert max(totals[:20]) == 32 + 64
    assert max(totals) > 32 + 128
    lines = [line for line in traces[1].splitlines() if "prompt tokens beside the decoding ones" in line]
    (line,) = lines
    assert "160 prompt and 22 generated" in line


@pytest.mark.parametrize("name", OURS)
def test_published_counts_are_those_of_the_steps(name, trace):
    for seed in range(6):
        steps, requests = trace(f"random {seed}, {name}"), random_requests(seed)
        metrics = steps["idle_metrics"]
        tokens = sum(sum(step["tokens"].values()) for step in steps["steps"])
        assert metrics["requests_admitted"] == len(requests)
        assert metrics["preemptions"] == 0
        assert metrics["scheduled_tokens prefill"] + metrics["scheduled_tokens decode"] == tokens
        if seed not in (3, 4):  # no prefix hits
            assert metrics["scheduled_tokens prefill"] == sum(request["prompt"] for request in requests)
    assert trace(f"huge, {name}")["metrics"]["long_prompts_passed_over"] == 0
    passed_over = [trace(f"random {seed}, {name}")["metrics"]["long_prompts_passed_over"] for seed in range(6)]
    assert max(passed_over) > 0


@pytest.mark.parametrize("name", OURS)
def test_waits_for_blocks_and_preemptions_are_published(name, trace):
    worst_case, vllm = trace(f"tight, worst_case, {name}"), trace(f"tight, vllm, {name}")
    # Four start, and whenever some end, as many do and the one behind them waits.
    assert len(TIGHT) / 4 - 1 <= worst_case["idle_metrics"]["requests_kept_waiting_for_kv"] <= len(TIGHT) - 4
    for steps in (worst_case, vllm):
        metrics = steps["idle_metrics"]
        assert metrics["kv_wait_seconds"] > 0
        assert metrics["preemptions"] == steps["preemptions"]
        assert metrics["requests_admitted"] == len(TIGHT) + steps["preemptions"]


def test_gauges_of_the_scheduler_go_back_to_zero(trace):
    steps = trace("tight, worst_case, MoELightningScheduler")
    assert steps["metrics"]["kv_reserved_ratio"] > 0
    assert steps["metrics"]["step_tokens"] > 0
    for gauge in ("kv_reserved_ratio", "step_tokens", "requests_waiting_for_kv"):
        assert steps["idle_metrics"][gauge] == 0


def test_a_new_prefill_share_is_counted(trace):
    assert trace("re-planned")["metrics"]["prefill_share_replans"] == 1
    assert trace("planned")["metrics"]["prefill_share_replans"] == 0
