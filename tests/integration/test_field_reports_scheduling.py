# SPDX-License-Identifier: Apache-2.0
"""Field reports about scheduling, on whole engines: limits, groups of answers, beams, preemption, penalties, aborts."""

from __future__ import annotations

import random

import pytest

from tests.helpers.engine import EngineFailedError
from tests.helpers.engine_call import call, calls, result_of
from tests.helpers.oracle import greedy
from tests.helpers.paging import reconfigured, run_paged, run_stock

pytestmark = pytest.mark.integration
BLOCK_BYTES = 2 * 2 * 2 * 32 * 32 * 4  # layers, K and V, heads, tokens, head_dim, float32: the test Mixtral's


def random_tokens(num_tokens, seed):
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(num_tokens)]


def stream(requests, aborts=()):
    return call("tests.helpers.stream_call:run_stream", requests=requests, aborts=list(aborts))


IDLE = call("tests.helpers.stream_call:idle_state")


def answers_of(outcome):
    return [outcome["answers"][str(index)] for index in range(len(outcome["answers"]))]


# ---------------------------------------------------------------- B18


def test_a_cache_too_small_for_one_request_is_refused_at_start(checkpoint):
    """B18. 256 tokens are 8 blocks, and one more is vLLM's own."""
    with pytest.raises(EngineFailedError, match="estimated maximum model length is 224"):
        run_paged(checkpoint("mixtral"), [calls(IDLE)], engine_args={"kv_cache_memory_bytes": 8 * BLOCK_BYTES})


def test_every_permitted_request_is_answered_from_the_smallest_cache(checkpoint):
    """B18. Each by itself would take up to all 8 blocks; each has a small one behind it."""
    lengths = [95, 96, 97, 127, 128, 129, 200, 246]
    requests = [
        request
        for seed, length in enumerate(lengths)
        for request in (
            {"prompt": random_tokens(length, seed), "sampling": {"max_tokens": 10}},
            {"prompt": random_tokens(5, 50 + seed), "sampling": {"max_tokens": 3}},
        )
    ]
    requests.append({"prompt": random_tokens(60, 99), "sampling": {"max_tokens": 190}})
    model = checkpoint("mixtral")
    (job,) = run_paged(
        model,
        [calls(stream(requests[1:2]), IDLE, stream(requests), IDLE)],
        engine_args={"kv_cache_memory_bytes": 9 * BLOCK_BYTES},
    ).jobs
    outcome = result_of(job, 2)
    assert [len(answer[0]) for answer in answers_of(outcome)] == [10, 3] * len(lengths) + [190]
    assert outcome["preemptions"] == 0
    assert result_of(job, 3) == result_of(job, 1)


# ---------------------------------------------------------------- B21, B22


FOUR_AT_ONCE = {"max_num_seqs": 4, "max_num_batched_tokens": 32}


@pytest.fixture(scope="module")
def several(checkpoint):
    """The same streams to stock and to ours, four sequences at once: {name: (stock's, ours)}."""
    prompts = [random_tokens(20 + 5 * seed, seed) for seed in range(4)]
    groups = [
        {"prompt": prompts[0], "sampling": {"n": n, "temperature": 0.8, "seed": 5, "max_tokens": 6}}
        for n in (1, 4, 5, 9)
    ]
    brief = [{"prompt": random_tokens(3 + seed, seed), "sampling": {"max_tokens": 1}} for seed in range(40)]
    wanted = {
        "groups": stream(groups),
        "brief": stream(brief),
        "beams": call("tests.helpers.stream_call:beam_search", prompts=prompts[:2], width=3, max_tokens=6),
    }
    model = checkpoint("mixtral")
    # Not in chunks: a seeded request with a prompt in two chunks ends stock vLLM's engine on the CPU.
    (stock,) = run_stock(model, [calls(*wanted.values())], engine_args={"max_num_seqs": 4}).jobs
    left = [
        {
            "prompt": random_tokens(10 + seed, seed),
            "sampling": {"max_tokens": 200, "n": 1 + seed % 3, "temperature": 1.0},
        }
        for seed in range(6)
    ]
    stays = {"prompt": prompts[1], "sampling": {"max_tokens": 8}}
    aborts = [[12, index] for index in range(6)]
    (ours,) = run_paged(
        model,
        [calls(*reconfigured(num_micro_batches=2), *wanted.values(), IDLE, stream([*left, stays], aborts), IDLE)],
        engine_args=FOUR_AT_ONCE,
    ).jobs
    pairs = {name: (result_of(stock, index), result_of(ours, 2 + index)) for index, name in enumerate(wanted)}
    after = 2 + len(wanted)
    return pairs, [result_of(ours, after + index) for index in range(3)]


@pytest.mark.parametrize("name", ["groups", "brief"])
def test_more_answers_than_sequences_at_once_all_end_as_in_stock(name, several):
    """B22. n = 1, 4, 5 and 9 with a seed, and 40 requests for one token."""
    stock, ours = several[0][name]
    assert answers_of(ours) == answers_of(stock)
    assert ours["most_running"] <= 4
    counts = [len(answer) for answer in answers_of(ours)]
    assert counts == ([1, 4, 5, 9] if name == "groups" else [1] * 40)


def test_beams_are_those_of_stock(several):
    """B22."""
    stock, ours = several[0]["beams"]
    assert ours == stock
    assert [len(beams) for beams in ours] == [3, 3]


def test_when_clients_leave_nothing_is_running_two_steps_later(several):
    """B21. Six requests of up to three long answers each are aborted in one step; a seventh is answered after."""
    before, outcome, after = several[1]
    assert outcome["answers"].keys() == {"6"}
    assert outcome["steps"] <= 12 + 2 + 8 + 2  # the seventh waited for a slot, and has 8 tokens to make
    assert len(outcome["answers"]["6"][0]) == 8
    assert after == before


# ---------------------------------------------------------------- B23


def test_prompt_logprobs_are_whole_with_chunks_and_with_prefix_hits(checkpoint):
    """B23. Chunks of 32, each prompt twice; against stock without either."""
    model, prompts = checkpoint("mixtral"), [random_tokens(length, length) for length in (33, 64, 65)]
    asked = [
        call("answers_in_detail", prompts=prompts, sampling={"max_tokens": 4, "prompt_logprobs": 3, "logprobs": number})
        for number in (0, 5)
    ]
    (stock,) = run_stock(model, [calls(*asked)]).jobs
    engine_args = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "enable_prefix_caching": True}
    warm = call("answers_in_detail", prompts=prompts, sampling={"max_tokens": 4})
    (ours,) = run_paged(
        model, [calls(*reconfigured(num_micro_batches=2), warm, *asked, *asked)], engine_args=engine_args
    ).jobs
    for index in range(4):
        for mine, theirs, prompt in zip(result_of(ours, 3 + index), result_of(stock, index % 2), prompts, strict=True):
            assert mine["token_ids"] == theirs["token_ids"]
            assert len(mine["prompt_logprobs"]) == len(prompt)
            assert mine["prompt_logprobs"][0] is None
            for kind in ("prompt_logprobs", "logprobs"):
                for entry, expected in zip(mine[kind], theirs[kind], strict=True):
                    assert (entry is None) == (expected is None)
                    for (token, value), (other, reference) in zip(entry or [], expected or [], strict=True):
                        assert token == other
                        assert value == pytest.approx(reference, abs=1e-4)


# ---------------------------------------------------------------- B26


@pytest.mark.parametrize("caching", [False, True], ids=["no-caching", "caching"])
def test_whatever_is_preempted_goes_on_as_if_alone(caching, checkpoint):
    """B26. Eight sequences that begin in one block each and end in four, and eight blocks: more preemptions than
    sequences. Groups, seeds and penalties."""
    model, prompts = checkpoint("mixtral"), [random_tokens(20, seed) for seed in range(7)]
    requests = [
        {"prompt": prompts[0], "sampling": {"max_tokens": 100}},
        {"prompt": prompts[1], "sampling": {"max_tokens": 100, "n": 2, "temperature": 0.8, "seed": 11}},
        {"prompt": prompts[2], "sampling": {"max_tokens": 100, "temperature": 0.7, "seed": 12}},
        {"prompt": prompts[3], "sampling": {"max_tokens": 100, "presence_penalty": 1.5, "repetition_penalty": 1.5}},
        *({"prompt": prompt, "sampling": {"max_tokens": 100}} for prompt in prompts[4:]),
    ]
    engine_args = {"kv_cache_memory_bytes": 9 * BLOCK_BYTES, "enable_prefix_caching": caching, "max_num_seqs": 8}
    alone = [stream([request]) for request in requests]
    (job,) = run_paged(
        model,
        [calls(*reconfigured(num_micro_batches=2), *alone, IDLE, stream(requests), IDLE)],
        options={"admission": "vllm"},
        engine_args=engine_args,
        debug={"poison": True},
    ).jobs
    expected = [answers_of(result_of(job, 2 + index))[0] for index in range(7)]
    before, outcome, after = (result_of(job, 9 + index) for index in range(3))
    assert answers_of(outcome) == expected
    assert outcome["preemptions"] > 8
    assert after == before
    assert after["free_blocks"] == 8


# ---------------------------------------------------------------- B27

SPECIAL = {
    "presence": {"presence_penalty": 1.5},
    "repetition": {"repetition_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.2},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": list(range(128)), "ignore_eos": False},
    "bad_words": {"logit_bias": {"7": 5.0, "9": -100.0}},
    "allowed": {"allowed_token_ids": list(range(40, 90))},
    "choice": {
        "structured_outputs": {"choice": ["yes, my lord", "no, my lord"]},
        "max_tokens": 24,
        "ignore_eos": False,
    },
    "json": {"structured_outputs": {"regex": "[0-9]{3}-[a-f]{4}"}, "max_tokens": 24, "ignore_eos": False},
}


def test_penalties_grammars_and_biases_work_as_in_stock(checkpoint):
    """B27. All in one stream, in chunks, among each other, with the huge one in front."""
    model = checkpoint("mixtral")
    requests = [{"prompt": random_tokens(200, 1), "sampling": {"max_tokens": 20}}]
    for index, sampling in enumerate(SPECIAL.values()):
        requests += [
            {"prompt": random_tokens(10 + 9 * index, 30 + index), "sampling": {"max_tokens": 20, **sampling}},
            {"prompt": random_tokens(40 + index, 60 + index), "sampling": {"max_tokens": 16}},
        ]
    (stock,) = run_stock(model, [calls(stream(requests))]).jobs
    engine_args = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "enable_prefix_caching": True}
    (ours,) = run_paged(
        model, [calls(*reconfigured(num_micro_batches=3), stream(requests))], engine_args=engine_args
    ).jobs
    assert answers_of(result_of(ours, 2)) == answers_of(result_of(stock))


def test_the_urgent_go_first(checkpoint):
    """Priorities: two at once, the last to come are the most urgent."""
    requests = [
        {"prompt": random_tokens(20, seed), "sampling": {"max_tokens": 6}, "priority": 10 - seed} for seed in range(8)
    ]
    (job,) = run_paged(
        checkpoint("mixtral"),
        [calls(stream(requests))],
        engine_args={"max_num_seqs": 2, "max_num_batched_tokens": 64, "scheduling_policy": "priority"},
    ).jobs
    outcome = result_of(job)
    ends = [outcome["finished_at"][str(index)] for index in range(8)]
    assert ends == sorted(ends, reverse=True)
    expected = greedy(checkpoint("mixtral"), [request["prompt"] for request in requests], max_tokens=6).token_ids
    assert [answer[0] for answer in answers_of(outcome)] == expected
