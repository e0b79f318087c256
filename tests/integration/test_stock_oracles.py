# SPDX-License-Identifier: Apache-2.0
"""The oracles themselves: stock vLLM and transformers agree, on models whose agreement means something."""

from __future__ import annotations

import pytest

from tests.helpers.checkpoints import ARCHITECTURES, write_checkpoint
from tests.helpers.engine import EngineFailedError, Job, run_engine
from tests.helpers.oracle import assert_same_tokens
from tests.helpers.prompts import MAX_PROMPT_TOKENS, NUM_NEW_TOKENS, standard_prompts

pytestmark = pytest.mark.integration

# Largest difference of a chosen token's log-probability seen between the two float32 implementations: 6e-5.
LOGPROB_TOLERANCE = 2e-4


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_stock_vllm_equals_transformers_in_float32(arch, hf_result, stock_result):
    oracle, stock = hf_result(arch), stock_result(arch)
    assert_same_tokens(stock.token_ids, oracle, f"stock vLLM, {arch}")
    for ours, theirs in zip(stock.jobs[0].logprobs, oracle.logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_drawn_models_make_equality_a_strong_and_fair_demand(arch, hf_result):
    oracle = hf_result(arch)
    assert oracle.fewest_distinct_tokens >= NUM_NEW_TOKENS // 2, "answers collapse to a few tokens"
    assert len({tuple(tokens) for tokens in oracle.token_ids}) == len(oracle.token_ids), "prompts do not matter"
    assert oracle.smallest_gap > 1e-4, "a near tie: two correct implementations may differ"
    assert oracle.smallest_router_gap > 5e-6, "a near tie of two experts"
    for counts in oracle.expert_counts:
        assert min(counts) > 0.25 * sum(counts) / len(counts), f"an expert is hardly used: {counts}"


def test_early_tokens_of_a_long_prompt_change_the_answer(hf_result):
    prompt = standard_prompts(1, seed=1)[0] * MAX_PROMPT_TOKENS
    prompts = [prompt[:MAX_PROMPT_TOKENS], [prompt[0] ^ 1, *prompt[1:MAX_PROMPT_TOKENS]]]
    oracle = hf_result("mixtral", prompts=prompts)
    assert oracle.token_ids[0] != oracle.token_ids[1]


def test_model_runner_v2_gives_the_same_tokens(hf_result, stock_result):
    stock = stock_result("mixtral", num_prompts=6, runner="v2", sampling={"logprobs": None})
    assert stock.runner == "v2"
    assert_same_tokens(stock.token_ids, hf_result("mixtral", num_prompts=6), "runner V2")


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("qwen3_moe", {"max_shard_size": "200KB"}),
        ("qwen3_moe", {"experts_layout": "fused"}),
        ("qwen3_moe", {"experts_layout": "mixed"}),
        ("qwen3_moe", {"tie_word_embeddings": True}),
        ("mixtral", {"sliding_window": 32}),
    ],
    ids=["sharded", "fused-experts", "mixed-layouts", "tied-embeddings", "sliding-window"],
)
def test_checkpoint_variants_load_alike_in_both(arch, options, hf_result, stock_result):
    stock = stock_result(arch, num_prompts=16, **options)
    assert_same_tokens(stock.token_ids, hf_result(arch, num_prompts=16, **options), str(options))


def test_layouts_and_shards_hold_the_same_model(hf_result):
    reference = hf_result("qwen3_moe", num_prompts=16)
    for options in ({"max_shard_size": "200KB"}, {"experts_layout": "fused"}, {"experts_layout": "mixed"}):
        assert hf_result("qwen3_moe", num_prompts=16, **options).token_ids == reference.token_ids, options
    swapped = hf_result("qwen3_moe", num_prompts=4, experts_layout="fused_swapped")
    assert swapped.token_ids != reference.first(4).token_ids


def test_byte_tokenizer_round_trips(checkpoint):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint("mixtral"), local_files_only=True)
    text = "To be,  or not to be\n\té 日本 \x00!"
    token_ids = tokenizer.encode(text)
    assert token_ids == list(text.encode())
    assert tokenizer.decode(token_ids) == text


def test_a_refused_checkpoint_is_an_error_with_the_engine_s_output(tmp_path):
    model = write_checkpoint(tmp_path, "mixtral")
    (model / "model.safetensors").unlink()
    with pytest.raises(EngineFailedError, match="Cannot find any model weights"):
        run_engine(model, [Job(standard_prompts(1))], plugin=False)
