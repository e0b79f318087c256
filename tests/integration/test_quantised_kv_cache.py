# SPDX-License-Identifier: Apache-2.0
"""`--kv-cache-dtype int8_per_token_head` and `fp8_per_token_head`: near the full cache, and alike however they run."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.engine import EngineFailedError, Job
from tests.helpers.engine_call import call, calls, result_of
from tests.helpers.paging import assert_micro_batches, assert_pages_are_exact, reconfigured, run_paged
from tests.helpers.prompts import standard_prompts

pytestmark = pytest.mark.integration

NUM_LAYERS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 2, 2, 64, 32
# All experts are chosen for every token. With fewer, a small error now and then flips a router's choice, and what is
# measured then is how far apart two random experts are.
SHAPE = {"num_local_experts": 4, "num_experts_per_tok": 4, "head_dim": HEAD_DIM}
PROMPTS = standard_prompts(12)
NUM_TOKENS = 6
# Long prompts come in chunks, so that prefill reads what an earlier step has quantised.
CHUNKED = {"max_num_batched_tokens": 128, "max_num_seqs": 16}
TYPES = ("int8_per_token_head", "fp8_per_token_head")
# Mean |difference| of the prompt tokens' log-probabilities from those with the full float32 cache; measured 0.071 and
# 0.314. Random weights drawn wide make a model that answers a perturbation much more strongly than a trained one.
LOGPROB_BOUNDS = {"int8_per_token_head": 0.1, "fp8_per_token_head": 0.4}
COLD, WARM, ONE, THREE, S4 = range(1, 6)  # the jobs below


def jobs():
    forget = call("forget_prefixes")
    # vLLM computes prompts anew for their log-probabilities, so what is to hit the prefix cache asks for none.
    short = call("answers_in_detail", prompts=PROMPTS, sampling={"max_tokens": NUM_TOKENS})
    full = call("answers_in_detail", prompts=PROMPTS, sampling={"max_tokens": NUM_TOKENS, "prompt_logprobs": 0})
    return [
        calls(call("kv_bytes_per_token")),
        calls(*reconfigured(num_micro_batches=3), forget, short),
        calls(*reconfigured(num_micro_batches=3), call("occupancy"), short),
        calls(*reconfigured(num_micro_batches=1), forget, full),
        calls(*reconfigured(num_micro_batches=3), forget, full),
        calls(*reconfigured(num_micro_batches=3, schedule="s4"), forget, full),
    ]


@pytest.fixture(scope="module")
def ours(checkpoint):
    """`ours(kv_cache_dtype)`: one engine for each, all jobs in it."""
    results = {}

    def get(dtype):
        if dtype not in results:
            engine_args = {**CHUNKED, "enable_prefix_caching": True, "kv_cache_dtype": dtype}
            debug = {"poison": True, "check_hazards": True}
            results[dtype] = run_paged(checkpoint("mixtral", **SHAPE), jobs(), debug=debug, engine_args=engine_args)
        return results[dtype]

    return get


def answers(result, job):
    return result_of(result.jobs[job], 3)


def distances(got, expected):
    """|difference| of the log-probabilities of all prompt tokens, and of the generated ones as long as they agree."""
    of_prompts, of_answers = [], []
    for prompt, mine, full in zip(PROMPTS, got, expected, strict=True):
        steps = zip(prompt[1:], mine["prompt_logprobs"][1:], full["prompt_logprobs"][1:], strict=True)
        of_prompts += [abs(dict(map(tuple, a))[token] - dict(map(tuple, b))[token]) for token, a, b in steps]
        for token, other, a, b in zip(
            mine["token_ids"], full["token_ids"], mine["logprobs"], full["logprobs"], strict=True
        ):
            if token != other:
                break
            of_answers.append(abs(dict(map(tuple, a))[token] - dict(map(tuple, b))[token]))
    return torch.tensor(of_prompts), torch.tensor(of_answers)


@pytest.mark.parametrize("dtype", TYPES)
def test_log_probabilities_are_as_near_to_those_of_the_full_cache_as_stated(dtype, ours):
    of_prompts, of_answers = distances(answers(ours(dtype), THREE), answers(ours("auto"), THREE))
    bound = LOGPROB_BOUNDS[dtype]
    assert len(of_answers) >= 30
    assert of_prompts.mean() < bound
    assert of_prompts.mean() > bound / 4, "nothing was quantised"
    assert of_answers.mean() < bound


@pytest.mark.parametrize("dtype", TYPES)
def test_number_of_micro_batches_place_of_attention_and_prefix_hits_change_no_bit(dtype, ours, checkpoint):
    result = ours(dtype)
    assert answers(result, THREE) == answers(result, ONE)
    assert answers(result, S4) == answers(result, THREE)
    cold, warm = answers(result, COLD), answers(result, WARM)
    for prompt, computed, found in zip(PROMPTS, cold, warm, strict=True):
        assert computed["num_cached_tokens"] == 0
        assert found["num_cached_tokens"] == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert {**computed, "num_cached_tokens": None} == {**found, "num_cached_tokens": None}
    for job, count in ((COLD, 3), (WARM, 3), (ONE, 1), (THREE, 3), (S4, 3)):
        assert_pages_are_exact(result.jobs[job], checkpoint("mixtral", **SHAPE))
        assert_micro_batches(result.jobs[job], count, len(PROMPTS))
    steps = result.jobs[THREE].stats[0]["steps"]
    assert steps["mixed x3"] > 1, "no prompt was cut into chunks"


@pytest.mark.parametrize("dtype", ["auto", *TYPES])
def test_a_token_takes_the_bytes_that_vllm_plans_and_the_log_says(dtype, ours):
    row = HEAD_DIM * 4 if dtype == "auto" else HEAD_DIM + 4
    expected = 2 * NUM_LAYERS * KV_HEADS * row
    assert result_of(ours(dtype).jobs[0]) == {"planned": expected, "held": expected}
    assert f"keys and values take {expected} bytes per token of host memory" in ours(dtype).log


@pytest.mark.parametrize(
    ("engine_args", "words"),
    [
        ({"kv_cache_dtype": "fp8"}, "int8_per_token_head or fp8_per_token_head"),
        ({"kv_cache_dtype": "int4_per_token_head"}, "int8_per_token_head or fp8_per_token_head"),
        (
            {"kv_cache_dtype": TYPES[0], "kv_cache_dtype_skip_layers": ["0"]},
            "drop --kv-cache-dtype-skip-layers",
        ),
    ],
    ids=str,
)
def test_other_types_are_refused_with_the_names_that_work(engine_args, words, checkpoint):
    with pytest.raises(EngineFailedError, match=words):
        run_paged(checkpoint("mixtral", **SHAPE), [Job(PROMPTS[:1])], engine_args=engine_args)
