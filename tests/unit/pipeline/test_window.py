# SPDX-License-Identifier: Apache-2.0
"""Rates over a sliding window of totals."""

import pytest

from vllm_moe_lightning.pipeline.window import SAMPLES_PER_WINDOW, SlidingWindow


def test_a_rate_is_the_growth_over_the_window_and_what_came_before_is_forgotten() -> None:
    window = SlidingWindow(10.0)
    for second in range(21):  # 5 per second for ten seconds, then 1 per second
        total = 5.0 * second if second <= 10 else 50.0 + (second - 10)
        rates = window.rates(float(second), {"pages": total})
    assert rates == {"pages": pytest.approx(1.0)}


def test_a_rate_falls_to_zero_when_nothing_grows_any_more() -> None:
    window = SlidingWindow(1.0)
    window.rates(0.0, {"pages": 0.0})
    assert window.rates(0.5, {"pages": 7.0})["pages"] == pytest.approx(14.0)
    window.rates(1.2, {"pages": 7.0})
    assert window.rates(1.8, {"pages": 7.0})["pages"] == 0.0


def test_the_first_sample_has_no_rate_and_a_total_that_appears_later_began_at_zero() -> None:
    window = SlidingWindow(10.0)
    assert window.rates(3.0, {"pages": 100.0}) == {"pages": 0.0}
    assert window.rates(5.0, {"pages": 100.0, "waits": 4.0}) == {"pages": 0.0, "waits": 2.0}


def test_a_longer_window_can_be_asked_for_while_steps_are_long() -> None:
    window = SlidingWindow(1.0)
    for second in range(0, 61, 20):  # 40 tokens every 20 seconds
        rates = window.rates(float(second), {"tokens": 2.0 * second}, at_least_s=60.0)
    assert rates["tokens"] == pytest.approx(2.0)


def test_samples_are_kept_no_denser_than_needed() -> None:
    window = SlidingWindow(1.0)
    for millisecond in range(10_000):
        window.rates(millisecond * 1e-3, {"pages": float(millisecond)})
    assert len(window._samples) <= SAMPLES_PER_WINDOW + 2
    assert window.rates(10.0, {"pages": 10_000.0})["pages"] == pytest.approx(1000.0)
