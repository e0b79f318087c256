# SPDX-License-Identifier: Apache-2.0
"""The simulator runs each resource's tasks in order, each after those it waits for."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.pipeline.test_schedule import NAMES, SHAPES
from vllm_moe_lightning.pipeline.expert_places import ALL_STREAMED, ExpertPlaces
from vllm_moe_lightning.pipeline.schedule import SweepShape, make_schedule
from vllm_moe_lightning.pipeline.simulator import simulate
from vllm_moe_lightning.pipeline.tasks import Task, TaskName
from vllm_moe_lightning.resources import Resource

MARK = TaskName.SWEEP_START


def seconds(**by_name: float) -> "Durations":
    return Durations(by_name)


class Durations:
    """Seconds by name of task; 0 for those not given."""

    def __init__(self, by_name: dict[str, float]) -> None:
        self._by_name = by_name

    def __call__(self, task: Task) -> float:
        return self._by_name.get(task.key.name.value, 0.0)


def test_serial_takes_the_sum_of_everything() -> None:
    plan = make_schedule("serial", SweepShape(num_layers=2, num_micro_batches=3, pages_per_layer=(4, 4)))
    durations = seconds(pre_attention=1, qkv_offload=2, attention=4, hidden_load=8, post_attention=16, weight_page=32)
    assert simulate(plan, durations, num_sweeps=2).duration_s == 6 * (1 + 2 + 4 + 8 + 16) + 8 * 32


def test_cgopipe_is_as_fast_as_the_link_when_pages_take_longest() -> None:
    plan = make_schedule("cgopipe", SweepShape(num_layers=4, num_micro_batches=4, pages_per_layer=(4,) * 4))
    durations = seconds(pre_attention=0.1, attention=0.5, hidden_load=0.01, post_attention=0.4, weight_page=2)
    sweep = simulate(plan, durations, num_sweeps=3)
    assert sweep.duration_s == pytest.approx(sweep.busy_s[Resource.H2D], rel=0.05)
    assert sweep.busy_s[Resource.H2D] == pytest.approx(16 * 2.01)


def test_cgopipe_is_as_fast_as_the_gpu_when_it_takes_longest() -> None:
    plan = make_schedule("cgopipe", SweepShape(num_layers=4, num_micro_batches=4, pages_per_layer=(4,) * 4))
    durations = seconds(pre_attention=1, qkv_offload=0.1, attention=2, hidden_load=0.1, post_attention=3, weight_page=2)
    sweep = simulate(plan, durations, num_sweeps=3)
    # All of it but the first micro-batch's way through the CPU.
    assert sweep.busy_s[Resource.GPU] == 16 * 4
    assert sweep.duration_s <= 16 * 4 + 2.2


def test_in_s2_a_hidden_state_waits_behind_a_layer_and_in_cgopipe_behind_a_page() -> None:
    shape = SweepShape(num_layers=4, num_micro_batches=4, pages_per_layer=(4,) * 4)
    durations = seconds(pre_attention=0.2, attention=0.5, hidden_load=0.01, post_attention=0.8, weight_page=0.9)
    cgopipe = simulate(make_schedule("cgopipe", shape), durations, num_sweeps=3)
    assert simulate(make_schedule("s2", shape), durations, num_sweeps=3).duration_s > 1.2 * cgopipe.duration_s


@pytest.mark.parametrize("lookahead", [2, 3])
def test_the_cpu_goes_from_attention_to_experts_and_back_without_a_pause(lookahead: int) -> None:
    layers = frozenset(range(4))
    shape = SweepShape(4, 4, (0,) * 4, lookahead, experts=ExpertPlaces(on_cpu=layers))
    durations = seconds(
        pre_attention=0.2, attention=1, hidden_load=0.05, post_attention=0.4, experts=2, experts_load=0.05,
        experts_offload=0.05, qkv_offload=0.05, post_experts=0.1,
    )  # fmt: skip
    sweep = simulate(make_schedule("cgopipe", shape), durations, num_sweeps=3)
    assert sweep.busy_s[Resource.CPU] == pytest.approx(16 * 3)
    assert sweep.duration_s <= 16 * 3 + 2


def test_the_link_goes_from_fetch_to_fetch_while_the_device_computes() -> None:
    layers = frozenset(range(4))
    shape = SweepShape(4, 4, (0,) * 4, experts=ExpertPlaces(fetched=layers))
    durations = seconds(
        pre_attention=0.1, attention=0.3, hidden_load=0.01, post_attention=0.2, experts_fetch=2, post_experts=0.9,
        routing_offload=0.02, qkv_offload=0.02,
    )  # fmt: skip
    sweep = simulate(make_schedule("cgopipe", shape), durations, num_sweeps=3)
    assert sweep.duration_s <= 1.1 * sweep.busy_s[Resource.H2D]


@given(st.sampled_from(NAMES), SHAPES, st.randoms(use_true_random=False))
def test_every_schedule_runs_to_its_end_in_order(name: str, shape: SweepShape, random) -> None:  # type: ignore[no-untyped-def]
    plan = make_schedule(name, shape)
    durations = {task.key: random.random() for task in plan.tasks}
    sweep = simulate(plan, lambda task: durations[task.key], num_sweeps=2)
    assert len(sweep.intervals) == len(plan.tasks)
    end_s = {}
    for resource in Resource:
        free_s = 0.0
        for interval in (i for i in sweep.intervals if i.task.resource is resource):
            assert interval.start_s >= free_s
            free_s = interval.end_s
    for interval in sweep.intervals:
        assert all(interval.start_s >= end_s[key] for key in interval.task.after if key in end_s)
        end_s[interval.task.key] = interval.end_s


@settings(max_examples=200)
@given(SHAPES, st.randoms(use_true_random=False))
def test_cgopipe_is_never_slower_than_serial(shape: SweepShape, random) -> None:  # type: ignore[no-untyped-def]
    shape = replace(shape, experts=ALL_STREAMED)  # what is fetched may queue behind a page that serial brings up later
    durations: dict[object, float] = {}

    def duration_s(task: Task) -> float:
        # Marks take no time, and a task takes the same in both schedules.
        return 0.0 if task.key.name is MARK else durations.setdefault(task.key, random.random())

    serial = simulate(make_schedule("serial", shape), duration_s, num_sweeps=3)
    assert simulate(make_schedule("cgopipe", shape), duration_s, num_sweeps=3).duration_s <= serial.duration_s + 1e-9


def test_the_first_sweep_waits_for_nothing_of_a_sweep_before() -> None:
    plan = make_schedule("cgopipe", SweepShape(num_layers=2, num_micro_batches=1, pages_per_layer=(3, 3)))
    durations = seconds(post_attention=1, weight_page=10)
    assert simulate(plan, durations).duration_s == 31  # the pages of layer 1; those of layer 0 are there
    assert simulate(plan, durations, num_sweeps=3).duration_s == 60
