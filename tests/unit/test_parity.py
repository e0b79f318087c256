# SPDX-License-Identifier: Apache-2.0
"""Verdicts of `check`: each thing that can be wrong is named, and a tie of stock vLLM's own is no fault."""

from dataclasses import replace
from typing import Any

import pytest

from vllm_moe_lightning.parity import (
    TIE,
    Distances,
    EngineAnswers,
    Streaming,
    distances_from,
    first_difference,
    judge,
)

STATS: dict[str, Any] = {
    "sweeps": 4, "dummy_sweeps": 1, "refills": 1, "bytes_per_sweep": 1000, "bytes_of_first_layer": 500,
    "bytes_paged": 5500, "pages_moved": 55,
}  # fmt: skip
STOCK = EngineAnswers(
    token_ids=[[1, 2, 3], [4, 5, 6]],
    logprobs=[[-1.0, -1.0, -1.0], [-2.0, -2.0, -2.0]],
    runner_up=[[(9, -3.0)] * 3, [(8, -2.0 - TIE / 2)] * 3],
    prompt_logprobs=[[-1.5] * 200, [-0.5] * 100],
    checksums={"layers.0.experts.w13": [11, 12], "layers.1.experts.w13": [21, 22]},
    expert_bytes=1000,
)
OURS = replace(STOCK, stats=STATS)


def wrong(ours: EngineAnswers, stock: EngineAnswers = STOCK) -> list[str]:
    parity = judge(stock, ours)
    assert parity.is_right == (not [finding for finding in parity.findings if not finding.is_right])
    assert parity.verdict().startswith("PASS: " if parity.is_right else "FAIL: ")
    return [finding.what for finding in parity.findings if not finding.is_right]


def test_equal_answers_pass_and_the_verdict_says_what_was_shown() -> None:
    assert wrong(OURS) == []
    verdict = judge(STOCK, OURS).verdict()
    assert "4 expert matrices are stock's, byte for byte" in verdict
    assert "5500 in 55 pages, exactly those of 5 sweeps x 1000 bytes" in verdict
    assert "tokens: all 6 the same" in verdict


def test_a_changed_expert_is_named() -> None:
    ours = replace(OURS, checksums={**STOCK.checksums, "layers.1.experts.w13": [21, 99]})
    assert wrong(ours) == ["experts held"]
    assert "in layers.1.experts.w13 of expert 1" in judge(STOCK, ours).verdict()


def test_tensors_that_only_one_engine_holds_are_named() -> None:
    ours = replace(OURS, checksums={"layers.0.experts.w13": [11, 12]})
    assert wrong(ours) == ["experts held"]
    assert "layers.1.experts.w13" in judge(STOCK, ours).verdict()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bytes_paged": 4500}, "4500 bytes in 5 sweeps, 5500 were due"),
        ({"sweeps": 0, "bytes_paged": 1500}, "1500 bytes in 1 sweeps"),
        ({"bytes_per_sweep": 500, "bytes_paged": 3000}, "a sweep moves 500 bytes, and all layers' experts are 1000"),
    ],
)
def test_pages_that_did_not_move_show(change: dict[str, int], said: str) -> None:
    ours = replace(OURS, stats={**STATS, **change})
    assert wrong(ours) == ["bytes paged"]
    assert said in judge(STOCK, ours).verdict()


def test_where_not_all_is_streamed_something_must_move_unless_all_is_on_the_cpu() -> None:
    fetching, idle = Streaming(is_whole=False), Streaming(is_whole=False, is_idle=True)
    some = replace(OURS, stats={**STATS, "bytes_paged": 700, "bytes_fetched": 300})
    assert judge(STOCK, some, streaming=fetching).is_right
    assert "700 in 5 sweeps, 300 of them fetched" in judge(STOCK, some, streaming=fetching).verdict()
    none = replace(OURS, stats={**STATS, "bytes_paged": 0, "bytes_fetched": 0})
    assert not judge(STOCK, none, streaming=fetching).is_right
    assert judge(STOCK, none, streaming=idle).is_right
    assert not judge(STOCK, replace(OURS, stats=None), streaming=idle).is_right


def test_experts_that_stock_vllm_packs_are_not_compared_with_those_that_lie_as_loaded() -> None:
    parity = judge(STOCK, replace(OURS, checksums={}), streaming=Streaming(is_packed=False))
    assert parity.is_right
    assert "not compared" in parity.verdict()


def test_stock_vllm_in_our_place_is_not_taken_for_us() -> None:
    """B36: the same answers, and nothing paged."""
    assert wrong(replace(OURS, stats=None)) == ["bytes paged"]


def test_another_token_is_named_by_prompt_and_place_unless_it_was_a_tie() -> None:
    assert wrong(replace(OURS, token_ids=[[1, 9, 3], [4, 5, 6]])) == ["tokens"]
    verdict = judge(STOCK, replace(OURS, token_ids=[[1, 9, 3], [4, 5, 6]])).verdict()
    assert "1 of 2 answers differ (prompt 0 at token 1)" in verdict
    tied = judge(STOCK, replace(OURS, token_ids=[[1, 2, 3], [4, 8, 7]]))
    assert tied.is_right
    assert "1 answers part where stock's two best tokens are within 0.001" in tied.verdict()
    assert wrong(replace(OURS, token_ids=[[1, 2, 3], [4, 7, 7]])) == ["tokens"]  # not the runner-up


@pytest.mark.parametrize("value", [-9.0, float("nan")])
def test_log_probabilities_may_be_off_in_one_token_of_a_hundred(value: float) -> None:
    for count, expected in ((3, []), (4, ["log-probabilities"])):
        prompt_logprobs = [[value] * count + [-1.5] * (200 - count), STOCK.prompt_logprobs[1]]
        assert wrong(replace(OURS, prompt_logprobs=prompt_logprobs)) == expected


def test_log_probabilities_after_a_parting_are_not_compared() -> None:
    ours = replace(OURS, token_ids=[[1, 2, 3], [4, 8, 7]], logprobs=[STOCK.logprobs[0], [-2.0, -2.0, -9.0]])
    assert wrong(ours) == []


@pytest.mark.parametrize("side", ["stock", "ours"])
def test_an_engine_that_failed_is_the_verdict(side: str) -> None:
    failed = EngineAnswers(error="HazardError: buffer 'kv'")
    stock, ours = (failed, OURS) if side == "stock" else (STOCK, failed)
    name = "stock vLLM" if side == "stock" else "our engine"
    assert judge(stock, ours).verdict() == f"FAIL: {name}: HazardError: buffer 'kv'"


@pytest.mark.parametrize(("factor", "is_right"), [(1.0, True), (1.05, True), (1.5, False)])
def test_other_types_are_measured_against_stocks_own_distance_from_float32(factor: float, is_right: bool) -> None:
    stock = Distances([0.1, 0.3], [0.2])
    ours = Distances([0.1 * factor, 0.3 * factor], [0.2])
    # Their tokens may differ.
    parity = judge(STOCK, replace(OURS, token_ids=[[7, 7, 7], [7, 7, 7]]), (stock, ours))
    assert parity.is_right == is_right
    assert "stock 2.00e-01 (bound 1.1x)" in parity.verdict()


def test_distances_are_of_prompt_tokens_and_of_answered_ones() -> None:
    answers = EngineAnswers(prompt_logprobs=[[-1.0, -2.0]], logprobs=[[-3.0, -4.0]])
    float32 = EngineAnswers(prompt_logprobs=[[-1.5, -2.0, -3.0, -4.25]])
    assert distances_from(float32, answers, [3]) == Distances([0.5, 0.0], [0.0, 0.25])


def test_the_first_difference_of_answers() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
