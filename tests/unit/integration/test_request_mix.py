# SPDX-License-Identifier: Apache-2.0
"""What lengths are learned from finished requests, and when the prefill share is computed anew."""

import pytest
from msgspec.structs import replace

from vllm_moe_lightning.engine_plan import GIVEN, EnginePlan, PredictedFigures
from vllm_moe_lightning.integration.request_mix import LEAST_OBSERVED, PrefillShare, RequestMix

PREDICTED = PredictedFigures(
    generated_tokens_per_s=1.0, total_tokens_per_s=1.0, sweep_s=1.0, bottleneck="gpu", busy={"gpu": 1.0}
)
PLAN = EnginePlan(
    expected_prompt_tokens=80.0,
    expected_generation_tokens=40.0,
    max_num_seqs=100,
    max_num_batched_tokens=1000,
    prefill_tokens_per_sweep=200,
    num_micro_batches=4,
    micro_batch_size=25,
    kv_bytes=1 << 20,
    num_resident_layers=0,
    predicted=PREDICTED,
)


def mix_of(prompt: int, generated: int, count: int = 100) -> RequestMix:
    mix = RequestMix(most_running=100)
    for _ in range(count):
        mix.record(prompt, generated)
    return mix


def test_nothing_is_believed_before_as_many_finished_as_run_at_once() -> None:
    assert not mix_of(10, 10, 99).is_known
    assert mix_of(10, 10, 100).is_known
    few = RequestMix(most_running=1)
    for _ in range(LEAST_OBSERVED - 1):
        few.record(10, 10)
    assert few.expected_generation() is None
    few.record(10, 10)
    assert few.expected_generation() == 10


def test_until_then_the_plan_counts_and_a_margin_until_it_proved_wrong() -> None:
    mix = RequestMix(most_running=100, planned_generation=40.0)
    assert mix.expected_generation() == 50
    mix.forget()
    assert mix.expected_generation() is None
    mix = RequestMix(most_running=100, planned_generation=40.0)
    for _ in range(100):
        mix.record(5, 8)
    assert mix.expected_generation() == 8


def test_nine_of_ten_answers_stay_within_the_expectation() -> None:
    mix = RequestMix(most_running=100)
    for length in range(1, 101):
        mix.record(5, length)
    assert mix.expected_generation() == 90
    assert mix.means() == (5.0, 50.5)


def test_old_requests_are_forgotten_and_all_of_them_on_demand() -> None:
    mix = mix_of(10, 10)
    for _ in range(200):
        mix.record(10, 30)
    assert mix.expected_generation() == 30
    mix.forget()
    assert mix.expected_generation() is None


def adapted(share: PrefillShare, prompt: int, generated: int) -> list[str]:
    """What is said while three windows of such requests finish."""
    mix = mix_of(80, 40)
    said = [share.adapt(mix)]
    for _ in range(300):
        mix.record(prompt, generated)
        said.append(share.adapt(mix))
    return [sentence for sentence in said if sentence]


def test_a_sweep_takes_the_planned_tokens_while_the_requests_are_as_planned() -> None:
    share = PrefillShare(PLAN, 100, 1000)
    assert share.tokens_per_sweep == 300
    assert adapted(share, 119, 27) == []  # just within the factor
    assert share.tokens_per_sweep == 300


def test_a_change_of_the_mix_changes_the_share_and_is_told_once() -> None:
    share = PrefillShare(PLAN, 100, 1000)
    (sentence,) = adapted(share, 160, 40)
    assert "160 prompt and 40 generated" in sentence
    assert "400 prompt tokens" in sentence
    assert share.tokens_per_sweep == 500


def test_a_share_that_the_user_gave_stays() -> None:
    share = PrefillShare(
        replace(PLAN, prefill_tokens_per_sweep=10, reasons={"prefill_tokens_per_sweep": GIVEN}), 100, 1000
    )
    assert share.tokens_per_sweep == 110
    assert adapted(share, 160, 40) == []
    assert share.tokens_per_sweep == 110


def test_a_prompt_of_mean_length_is_taken_whole_however_few_run() -> None:
    few = PrefillShare(replace(PLAN, max_num_seqs=4, prefill_tokens_per_sweep=8), 4, 1000)
    assert few.tokens_per_sweep == 4 + 80
    adapted(few, 200, 400)
    assert few.tokens_per_sweep == 4 + 200


def test_a_few_odd_requests_change_nothing() -> None:
    share, mix = PrefillShare(PLAN, 100, 1000), mix_of(80, 40)
    for _ in range(3):
        mix.record(2000, 40)
        assert share.adapt(mix) is None
    for _ in range(300):
        mix.record(80, 40)
        assert share.adapt(mix) is None


def test_the_share_stays_within_the_buffers_and_says_what_would_be_right() -> None:
    share = PrefillShare(PLAN, 100, 1000)
    (sentence,) = adapted(share, 2000, 10)
    assert "20000 would be right, but max_num_batched_tokens is 1000" in sentence
    assert share.tokens_per_sweep == 1000
    assert PrefillShare(PLAN, 100, 100).tokens_per_sweep == 100


@pytest.mark.parametrize("generated", [1, 1000])
def test_some_prompt_tokens_are_always_taken(generated: int) -> None:
    share = PrefillShare(PLAN, 100, 1000)
    adapted(share, 1, generated)
    assert share.tokens_per_sweep >= 101
