# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of `trace`: shares, bubbles and what would help, on spans made by hand and by the simulator."""

import math
from collections.abc import Callable

import pytest

from vllm_moe_lightning.pipeline.bubbles import BETWEEN_SWEEPS, NOT_LAUNCHED, NOTHING_TO_DO, difference, intersection
from vllm_moe_lightning.pipeline.expert_places import ExpertPlaces
from vllm_moe_lightning.pipeline.gantt import simulated_trace
from vllm_moe_lightning.pipeline.schedule import SweepShape, make_schedule
from vllm_moe_lightning.pipeline.simulator import SimulatedSweep, simulate
from vllm_moe_lightning.pipeline.tasks import Task, TaskName
from vllm_moe_lightning.pipeline.trace import SweepSpan, Trace, TraceSource, TraceSpan
from vllm_moe_lightning.pipeline.trace_summary import TraceSummary, summarise
from vllm_moe_lightning.pipeline.trace_window import layer_in_the_middle, typical_sweep
from vllm_moe_lightning.resources import Resource

GPU, CPU, H2D, D2H = Resource.GPU, Resource.CPU, Resource.H2D, Resource.D2H
# Two layers, a page each, one micro-batch.
SOURCE = TraceSource("emulated", "cgopipe", 2, (1, 1))
TIMES = {
    TaskName.PRE_ATTENTION: 1.0,
    TaskName.POST_ATTENTION: 2.0,
    TaskName.QKV_OFFLOAD: 0.5,
    TaskName.ATTENTION: 3.0,
    TaskName.HIDDEN_LOAD: 0.5,
    TaskName.WEIGHT_PAGE: 1.5,
}


def duration(**changed: float) -> Callable[[Task], float]:
    times = {**TIMES, **{TaskName(name): time_s for name, time_s in changed.items()}}
    return lambda task: times.get(task.key.name, 0.0)


def simulated(schedule: str = "cgopipe", num_micro_batches: int = 3, **changed: float) -> SimulatedSweep:
    shape = SweepShape(num_layers=4, num_micro_batches=num_micro_batches, pages_per_layer=(3,) * 4)
    return simulate(make_schedule(schedule, shape), duration(**changed), num_sweeps=2)


def trace(spans: list[TraceSpan], *sweeps: tuple[float, float]) -> Trace:
    return Trace(SOURCE, tuple(SweepSpan(*times, 1) for times in sweeps), tuple(spans))


def bubbles(summary: TraceSummary) -> dict[str, float]:
    return {bubble.reason: pytest.approx(bubble.time_s) for bubble in summary.bubbles}


def test_shares_of_a_simulated_sweep_are_its_busy_times_over_its_duration() -> None:
    sweep = simulated(attention=4.0)
    summary = summarise(simulated_trace(sweep))
    assert summary.time_s == pytest.approx(sweep.duration_s)
    for resource in Resource:  # what this sweep sends ahead for the next, the one before has sent for this one
        assert summary.share(resource) == pytest.approx(sweep.busy_s[resource] / sweep.duration_s)
    assert summary.busiest is CPU
    assert (summary.num_sweeps, summary.micro_batches, summary.device) == (1, {3: 1}, "simulated")


@pytest.mark.parametrize("schedule", ["cgopipe", "serial", "s2", "s3"])
@pytest.mark.parametrize("changed", [{}, {"weight_page": 9.0}, {"post_attention": 7.0}], ids=str)
def test_bubbles_add_up_to_the_idle_time_of_the_busiest_resource(schedule: str, changed: dict[str, float]) -> None:
    summary = summarise(simulated_trace(simulated(schedule, **changed)))
    idle_s = summary.time_s - summary.busy_s[summary.busiest]
    assert math.fsum(bubble.time_s for bubble in summary.bubbles) == pytest.approx(idle_s, abs=1e-9)
    # A simulation launches at once: nothing waits for the launching thread.
    assert NOT_LAUNCHED not in bubbles(summary)


def test_a_link_that_is_always_busy_binds_and_the_next_limit_is_named() -> None:
    summary = summarise(simulated_trace(simulated(weight_page=9.0)))
    assert summary.busiest is H2D
    assert summary.is_bound
    others_s = max(summary.busy_s[CPU], summary.busy_s[GPU])
    assert summary.next_limit[1] == pytest.approx(summary.time_s / others_s)
    sentence = summary.sentence()
    assert sentence.startswith("bound by H2D link 100%; ")
    assert "CPU attention " in sentence
    assert "next best: a faster link" in sentence
    assert "from the measured times" in sentence


def test_without_overlap_no_resource_binds_and_what_is_waited_for_is_named() -> None:
    summary = summarise(simulated_trace(simulated("s3", num_micro_batches=2, attention=6.0)))
    assert summary.busiest is CPU
    assert not summary.is_bound
    assert summary.bubbles[0].reason == "attention<-qkv_offload"
    assert summary.bubbles[0].resource is D2H
    assert summary.sentence().startswith("bound by no resource: CPU attention, the busiest,")
    assert "quicker D2H link, or more micro-batches to hide it (attention<-qkv_offload)" in summary.sentence()


def test_experts_on_the_cpu_and_context_over_the_link_are_waited_for_by_name() -> None:
    shape = SweepShape(4, 2, (3, 0, 3, 0), experts=ExpertPlaces(on_cpu=frozenset((1, 3))), context=frozenset((1,)))
    copies = {"experts_offload": 0.5, "experts_load": 0.5, "post_experts": 0.5}

    def summary_of(**changed: float) -> TraceSummary:
        sweep = simulate(make_schedule("cgopipe", shape), duration(**copies, **changed), num_sweeps=2)
        return summarise(simulated_trace(sweep))

    summary = summary_of(experts=20.0, kv_load=1.0)
    assert NOT_LAUNCHED not in bubbles(summary)
    assert summary.busiest is CPU
    assert "CPU attention and experts" in summary.sentence()
    by_link = summary_of(experts=1.0, kv_load=30.0)
    assert by_link.busiest is H2D
    assert NOT_LAUNCHED not in bubbles(by_link)


def test_idle_time_goes_to_the_awaited_task_up_to_its_end_and_then_to_the_launching_thread() -> None:
    spans = [
        TraceSpan(H2D, "weight_page(1,0)", 0.0, 4.0, 400),
        TraceSpan(CPU, "attention(0,0)", 1.0, 6.0),
        TraceSpan(H2D, "hidden_load(0,0)", 7.0, 9.0, 100),  # a second after the attention that it waits for
        TraceSpan(GPU, "post_attention(0,0)", 9.0, 10.0),
    ]
    summary = summarise(trace(spans, (0.0, 10.0)))
    assert summary.busiest is H2D
    assert bubbles(summary) == {"hidden_load<-attention": 2.0, NOT_LAUNCHED: 1.0, NOTHING_TO_DO: 1.0}
    assert summary.bubbles[0].resource is CPU
    assert summary.num_bytes[H2D] == 500
    assert summary.to_dict()["bytes_per_busy_s"] == {"h2d": pytest.approx(500 / 6)}


def test_time_between_sweeps_counts_but_an_idle_engine_does_not() -> None:
    spans = [
        TraceSpan(GPU, "post_attention(0,0)", 0.0, 1.0),
        TraceSpan(GPU, "post_attention(0,0)", 1.5, 2.5),
        TraceSpan(GPU, "post_attention(0,0)", 60.0, 61.0),
        TraceSpan(H2D, "weight_page(0,0)", 30.0, 31.0, 7),  # while idle
    ]
    summary = summarise(trace(spans, (0.0, 1.0), (1.5, 2.5), (60.0, 61.0)))
    assert summary.time_s == pytest.approx(3.5)
    assert summary.between_s == pytest.approx(0.5)
    assert summary.share(GPU) == pytest.approx(3.0 / 3.5)
    assert summary.busy_s[H2D] == 0
    assert bubbles(summary) == {BETWEEN_SWEEPS: 0.5}
    assert summary.next_limit == ("time between sweeps", pytest.approx(7.0))


def test_a_page_waits_for_the_sweep_that_last_used_its_slot() -> None:
    """weight_page(0,0) at the end of a sweep waits for that sweep's post_attention(0,0), not for an earlier one's."""
    spans = [
        TraceSpan(GPU, "post_attention(0,0)", 0.0, 0.5),
        TraceSpan(H2D, "weight_page(1,0)", 0.0, 3.0),
        TraceSpan(GPU, "post_attention(0,0)", 3.0, 4.5),
        TraceSpan(H2D, "weight_page(0,0)", 4.5, 8.0),
    ]
    summary = summarise(trace(spans, (0.0, 8.0)))
    assert bubbles(summary) == {"weight_page<-post_attention": 1.5}
    assert summary.bubbles[0].resource is GPU


def test_dummy_sweeps_do_not_count_and_without_others_there_is_nothing_to_say() -> None:
    dummy = SweepSpan(0.0, 1.0, 1, is_dummy=True)
    spans = (TraceSpan(GPU, "post_attention(0,0)", 0.0, 1.0), TraceSpan(GPU, "post_attention(0,0)", 2.0, 3.0))
    summary = summarise(Trace(SOURCE, (dummy, SweepSpan(2.0, 3.0, 1)), spans))
    assert (summary.num_sweeps, summary.num_dummy_sweeps, summary.time_s) == (1, 1, 1.0)
    with pytest.raises(ValueError, match="no whole sweep that served requests"):
        summarise(Trace(SOURCE, (dummy,), spans))


def test_the_typical_sweep_is_the_median_one_of_the_most_frequent_kind() -> None:
    sweeps = [
        SweepSpan(float(10 * i), 10.0 * i + time_s, count)
        for i, (time_s, count) in enumerate([(9.0, 1), (1.0, 4), (5.0, 4), (3.0, 4)])
    ]
    assert typical_sweep(Trace(SOURCE, tuple(sweeps), ())) == sweeps[3]


def test_the_layer_in_the_middle_spans_its_tasks_on_the_device() -> None:
    recorded = simulated_trace(simulated())
    layer, begin_s, end_s = layer_in_the_middle(recorded, recorded.sweeps[0])
    mine = [
        s for s in recorded.spans if s.resource is GPU and s.label.startswith(("pre_", "post_")) and "(2," in s.label
    ]
    assert layer == 2
    assert (begin_s, end_s) == (min(s.start_s for s in mine), max(s.end_s for s in mine))


def test_interval_arithmetic() -> None:
    some, others = [(0.0, 4.0), (6.0, 9.0)], [(1.0, 2.0), (3.0, 7.0), (8.0, 8.5), (20.0, 21.0)]
    assert intersection(some, others) == [(1.0, 2.0), (3.0, 4.0), (6.0, 7.0), (8.0, 8.5)]
    assert difference(some, others) == [(0.0, 1.0), (2.0, 3.0), (7.0, 8.0), (8.5, 9.0)]
    assert difference(some, []) == some
    assert intersection(some, []) == []
