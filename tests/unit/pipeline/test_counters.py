# SPDX-License-Identifier: Apache-2.0
"""Counters grow for as long as the engine lives; what happened since a moment is their difference."""

import copy

from vllm_moe_lightning.pipeline.counters import IDLE_GAP_S, PipelineCounters


def test_the_difference_is_what_was_counted_in_between() -> None:
    counters = PipelineCounters(sweeps=2, tokens=10)
    counters.steps["decode x4"] += 2
    counters.wait_s["hidden_load<-attention"] += 0.5
    before = copy.deepcopy(counters)
    counters.sweeps += 1
    counters.steps["mixed x4"] += 1
    counters.wait_s["hidden_load<-attention"] += 0.25
    counters.wait_s["post_attention<-weight_page"] += 1.0
    since = counters.since(before)
    assert (since.sweeps, since.tokens, since.steps) == (1, 0, {"mixed x4": 1})
    assert since.wait_s == {"hidden_load<-attention": 0.25, "post_attention<-weight_page": 1.0}
    assert since.total_wait_s == 1.25
    assert counters.since(counters) == PipelineCounters()


def test_working_time_counts_the_gaps_between_sweeps_but_no_idle_time() -> None:
    counters = PipelineCounters()
    counters.end_sweep(100.0, 101.0, 4, is_dummy=False)
    counters.end_sweep(101.5, 102.0, 4, is_dummy=False)  # half a second for sampling and scheduling
    counters.end_sweep(102.0 + IDLE_GAP_S, 104.0, 2, is_dummy=False)
    assert counters.working_s == 1.0 + 1.0 + (2.0 - IDLE_GAP_S)
    assert counters.sweep_s == 1.0 + 0.5 + (2.0 - IDLE_GAP_S)
    assert counters.active_s == 4.0
    assert (counters.sweeps, counters.micro_batches, counters.last_sweep_s) == (3, 10, 2.0 - IDLE_GAP_S)


def test_a_dummy_sweep_is_no_work() -> None:
    counters = PipelineCounters()
    counters.end_sweep(100.0, 101.0, 1, is_dummy=True)
    assert (counters.sweeps, counters.dummy_sweeps, counters.working_s, counters.sweep_s) == (0, 1, 0.0, 1.0)
