# SPDX-License-Identifier: Apache-2.0
"""Field reports about requests: bad ones, aborted ones, stop strings, and prefix-cache hits."""

from __future__ import annotations

import random

import pytest

from tests.helpers.engine import Job
from tests.helpers.engine_call import call, calls, result_of
from tests.helpers.oracle import greedy
from tests.helpers.paging import reconfigured, run_paged, run_stock
from tests.helpers.prompts import standard_prompts

pytestmark = pytest.mark.integration


def random_tokens(num_tokens, seed):
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(num_tokens)]


# ---------------------------------------------------------------- B17

GOOD = {"prompt": random_tokens(20, 1), "sampling": {"max_tokens": 4}}
BAD = {
    "no tokens": ({"prompt": []}, "cannot be empty"),
    "empty text": ({"prompt": ""}, "cannot be empty"),
    "token beyond the vocabulary": ({"prompt": [1, 258]}, "out of vocabulary"),
    "negative token": ({"prompt": [-1]}, "out of vocabulary"),
    "nothing to generate": ({"prompt": [1], "sampling": {"max_tokens": 0}}, "max_tokens must be at least 1"),
    "longer than the model": ({"prompt": [1] * 257}, "maximum context length is 256"),
}


def test_a_bad_request_is_refused_and_the_good_ones_around_it_are_answered(checkpoint):
    """B17. Every kind of bad request between good ones, and a good one afterwards."""
    model = checkpoint("mixtral")
    (expected,) = greedy(model, [GOOD["prompt"]], max_tokens=4).token_ids
    requests = [GOOD]
    for bad, _ in BAD.values():
        requests += [bad, GOOD]
    jobs = [
        calls(call("try_each", requests=requests), call("occupancy")),
        Job([GOOD["prompt"], [7]], [{"max_tokens": 4}, {"max_tokens": 1}]),
    ]
    together, later = run_paged(model, jobs).jobs
    results = result_of(together)
    for result in results[::2]:
        assert result["token_ids"] == expected
    for result, (_, message) in zip(results[1::2], BAD.values(), strict=True):
        assert message in result["error"]
    assert result_of(together, 1)["requests"] == 0
    assert later.token_ids[0] == expected
    assert len(later.token_ids[1]) == 1


# ---------------------------------------------------------------- B20

ONE_AT_A_TIME = {"max_num_seqs": 1, "max_num_batched_tokens": 32}


def test_aborted_requests_leave_nothing_behind_and_harm_nobody(checkpoint):
    """B20. One running at a time, so that others wait: abort while waiting, in the second prefill chunk, at the first
    decode, right after the last token, and twice. The request that stays is answered as if it were alone."""
    model = checkpoint("mixtral")
    long, short = random_tokens(100, 1), random_tokens(20, 2)
    stays = {"prompt": short, "sampling": {"max_tokens": 8}}
    (expected,) = greedy(model, [short], max_tokens=8).token_ids
    leaves = {"prompt": long, "sampling": {"max_tokens": 40}}
    scenes = {
        "waiting": call("run_steps", requests=[stays, leaves], aborts=[[1, 1]]),
        "second chunk": call("run_steps", requests=[leaves, stays], aborts=[[1, 0]]),
        "first decode": call("run_steps", requests=[leaves, stays], aborts=[[4, 0]]),
        "before it ever ran": call("run_steps", requests=[stays, leaves, leaves], aborts=[[0, 1], [0, 2]]),
        "twice": call("run_steps", requests=[leaves, stays], aborts=[[2, 0], [2, 0], [3, 0]]),
    }
    rpcs = [call("occupancy")]
    for scene in scenes.values():
        rpcs += [scene, call("occupancy")]
    rpcs += [call("abort_after_last_token", request=stays), call("occupancy")]
    job, after = run_paged(
        model, [calls(*rpcs), Job([short], {"max_tokens": 8})], engine_args=ONE_AT_A_TIME, debug={"poison": True}
    ).jobs
    start = result_of(job)
    assert start["requests"] == 0
    for index, name in enumerate(scenes):
        outcome = result_of(job, 1 + 2 * index)
        (answer,) = outcome["answers"].values()
        assert answer["token_ids"] == expected, name
        assert outcome["steps"] < 20, f"{name}: the aborted request went on"
        assert result_of(job, 2 + 2 * index) == start, name
    assert result_of(job, 1 + 2 * len(scenes))["token_ids"] == expected
    assert result_of(job, 2 + 2 * len(scenes)) == start
    assert after.token_ids == [expected]


def test_a_hundred_random_aborts_leave_every_other_answer_right(checkpoint):
    """B20."""
    model = checkpoint("mixtral")
    prompts = [random_tokens(length, length) for length in (5, 33, 64, 90, 120)]
    expected = greedy(model, prompts, max_tokens=10).token_ids
    rpcs = [
        call("occupancy"),
        call("random_aborts", prompts=prompts, count=100, seed=7, max_tokens=10),
        call("occupancy"),
    ]
    (job,) = run_paged(
        model,
        [calls(*reconfigured(num_micro_batches=3), *rpcs)],
        engine_args={"max_num_seqs": 8, "max_num_batched_tokens": 64},
        debug={"copy_timing": "lazy", "poison": True},
    ).jobs
    answers = result_of(job, 3)
    assert len(answers) > 20
    for name, answer in answers.items():
        assert answer["token_ids"] == expected[int(name.partition("/")[2])], name
    assert result_of(job, 4) == result_of(job, 2)


# ---------------------------------------------------------------- B24

SHAKESPEARE = "examples/tiny-shakespeare-moe"


@pytest.fixture(scope="module")
def stop_answers(request):
    """The same questions to stock and to ours: {name of the case: (stock's answer, ours)}, and the plain answer."""
    model = request.config.rootpath / SHAKESPEARE  # its tokens are pieces of words, so text can be cut inside of one
    prompts = ["First Citizen:\nBefore we proceed", "ROMEO:\nWhat light"]
    plain = {"max_tokens": 32}
    (answer,) = run_stock(model, [calls(call("answers_in_detail", prompts=prompts[:1], sampling=plain))]).jobs
    answer = result_of(answer)[0]
    stop = stop_inside_tokens(model, answer)
    cases = {
        "plain": plain,
        "stop": {**plain, "stop": [stop]},
        "stop kept": {**plain, "stop": [stop], "include_stop_str_in_output": True},
        "never met": {**plain, "stop": ["\x00"]},
        "stop token": {**plain, "stop_token_ids": [answer["token_ids"][12]]},
        "stop token and min_tokens": {**plain, "stop_token_ids": [answer["token_ids"][5]], "min_tokens": 20},
        "stop and min_tokens": {**plain, "stop": [stop], "min_tokens": 24},
    }
    jobs = [calls(call("answers_in_detail", prompts=prompts, sampling=sampling)) for sampling in cases.values()]
    stock = run_stock(model, jobs).jobs
    ours = run_paged(model, [calls(*reconfigured(num_micro_batches=2), call("occupancy")), *jobs]).jobs[1:]
    pairs = [(result_of(theirs), result_of(mine)) for theirs, mine in zip(stock, ours, strict=True)]
    return stop, dict(zip(cases, pairs, strict=True))


def stop_inside_tokens(model, answer):
    """A piece of the answer's text that begins and ends inside of a token and has a whole one between them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    tokens = answer["token_ids"]
    for first in range(6, len(tokens) - 3):
        pieces = [tokenizer.decode([token]) for token in tokens[first : first + 3]]
        stop = pieces[0][1:] + pieces[1] + pieces[2][:-1]
        if len(pieces[0]) > 1 and len(pieces[2]) > 1 and answer["text"].find(stop) > 8:
            return stop
    raise AssertionError(f"no three long tokens in a row in {answer['text']!r}")


@pytest.mark.parametrize(
    "case",
    ["plain", "stop", "stop kept", "never met", "stop token", "stop token and min_tokens", "stop and min_tokens"],
)
def test_answers_stop_where_those_of_stock_vllm_do(case, stop_answers):
    """B24. Text, tokens counted, and the reason given."""
    _, answers = stop_answers
    for theirs, mine in zip(*answers[case], strict=True):
        for key in ("text", "token_ids", "finish_reason", "stop_reason"):
            assert mine[key] == theirs[key], key


def test_a_stop_string_across_tokens_is_cut_out_unless_asked_for(stop_answers):
    """B24."""
    stop, answers = stop_answers
    plain, cut, kept = (answers[case][1][0] for case in ("plain", "stop", "stop kept"))
    end = plain["text"].index(stop)
    assert cut["text"] == plain["text"][:end]
    assert kept["text"] == plain["text"][: end + len(stop)]
    assert cut["finish_reason"] == "stop"
    assert cut["stop_reason"] == stop
    # No token beyond the one that completes the stop string.
    assert cut["token_ids"] == kept["token_ids"] == plain["token_ids"][: len(cut["token_ids"])]
    assert len(cut["token_ids"]) < len(plain["token_ids"])
    assert len(answers["stop token and min_tokens"][1][0]["token_ids"]) >= 20


# ---------------------------------------------------------------- B25

HEAD = random_tokens(64, 11)
CACHED_PROMPTS = {
    "hundred": random_tokens(100, 12),
    "head and tail": HEAD + random_tokens(30, 13),
    "head and other tail": HEAD + random_tokens(7, 14),
    "exactly the head": HEAD,
}


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no-caching"])
def test_a_prefix_cache_hit_gives_what_a_miss_gives(caching, checkpoint):
    """B25. Each prompt alone, again, and while three others decode; the oracle is transformers."""
    model, prompts = checkpoint("qwen2_moe"), list(CACHED_PROMPTS.values())
    expected = greedy(model, prompts, max_tokens=12).token_ids
    busy = standard_prompts(3, seed=9, max_tokens=50)
    busy_expected = greedy(model, busy, max_tokens=24).token_ids
    sampling = {"max_tokens": 12}
    others = [{"prompt": prompt, "sampling": {"max_tokens": 24}} for prompt in busy]
    while_busy = [*others, *({"prompt": prompt, "sampling": sampling, "at_step": 3} for prompt in prompts)]
    one_by_one = [call("answers_in_detail", prompts=[prompt], sampling=sampling) for prompt in prompts]
    jobs = [calls(*reconfigured(num_micro_batches=3), *one_by_one, *one_by_one, call("run_steps", requests=while_busy))]
    engine_args = {"enable_prefix_caching": caching, "max_num_batched_tokens": 96, "max_num_seqs": 8}
    (job,) = run_paged(model, jobs, engine_args=engine_args, debug={"copy_timing": "lazy", "poison": True}).jobs
    answers = [result_of(job, index)[0] for index in range(2, 2 + 2 * len(prompts))]
    first, second = answers[: len(prompts)], answers[len(prompts) :]
    busy_answers = result_of(job, 2 + 2 * len(prompts))["answers"]
    beside = [busy_answers[str(3 + index)] for index in range(len(prompts))]
    for round_of_answers in (first, second, beside):
        assert [answer["token_ids"] for answer in round_of_answers] == expected
    assert [busy_answers[str(index)]["token_ids"] for index in range(3)] == busy_expected
    hits = [[answer["num_cached_tokens"] for answer in part] for part in (first, second, beside)]
    # Blocks of 32; the last token is always computed, so of exactly 64 tokens only one block counts as a hit.
    again = [96, 64, 64, 32]
    assert hits == ([[0, 0, 64, 32], again, again] if caching else [[0] * 4] * 3)
    if caching:
        for before, after in zip(first, second, strict=True):
            assert logprobs_of(after) == pytest.approx(logprobs_of(before), abs=1e-4)


def logprobs_of(answer):
    return [value for step in answer["logprobs"] for _, value in step]
