"""The arithmetic of benchmarks/predicted_vs_measured.py: delays read off records, task times, rank correlation."""

import pytest

from benchmarks.cpu_clock import CpuClock
from benchmarks.predicted_vs_measured import kendall_tau
from benchmarks.task_times import Plan, TaskRun, TaskTimes, delays_of
from vllm_moe_lightning.pipeline.schedule import SweepShape, make_schedule
from vllm_moe_lightning.pipeline.simulator import simulate
from vllm_moe_lightning.pipeline.tasks import TaskName
from vllm_moe_lightning.resources import Resource

SHAPE = SweepShape(num_layers=4, num_micro_batches=2, pages_per_layer=(2, 2, 2, 2))
SCHEDULE = make_schedule("cgopipe", SHAPE)
SECONDS = {TaskName.SWEEP_START: 0.0, TaskName.WEIGHT_PAGE: 0.03, TaskName.ATTENTION: 0.02}


def plan() -> Plan:
    pages = {(layer, page): 300 for layer in range(4) for page in range(2)}
    return Plan(SCHEDULE, tokens=(10, 10), page_bytes=pages, qkv_bytes_per_token=5, output_bytes_per_token=5)


def simulated_runs(num_sweeps: int, start_s: float = 0.0) -> list[TaskRun]:
    """What perfect streams would record."""
    runs = []
    for count in range(1, num_sweeps + 1):
        sweep = simulate(SCHEDULE, lambda task: SECONDS.get(task.key.name, 0.01), count)
        runs += [TaskRun(i.task.key, start_s + i.start_s, start_s + i.end_s) for i in sweep.intervals]
    return [run for run in runs if run.key.name is not TaskName.SWEEP_START]


def test_a_pipeline_without_delays_has_none() -> None:
    delays, between_s = delays_of(SCHEDULE, simulated_runs(3))
    assert max(delays.values()) == pytest.approx(0.0, abs=1e-12)
    assert between_s == pytest.approx(0.0, abs=1e-12)


def test_a_late_start_is_the_delay_of_its_kind_alone() -> None:
    runs = simulated_runs(2)
    late = [run._replace(start_s=run.start_s + 0.001) if run.key.name is TaskName.ATTENTION else run for run in runs]
    delays, _ = delays_of(SCHEDULE, late)
    attention = [seconds for (name, _), seconds in delays.items() if name is TaskName.ATTENTION]
    others = [seconds for (name, _), seconds in delays.items() if name is not TaskName.ATTENTION]
    assert attention == pytest.approx([0.001] * len(attention))
    assert others == pytest.approx([0.0] * len(others), abs=1e-12)


@pytest.mark.parametrize("delay_s", [0.0, 0.002])
def test_the_base_policy_is_predicted_from_its_own_tasks(delay_s: float) -> None:
    kinds = (TaskName.PRE_ATTENTION, TaskName.POST_ATTENTION, TaskName.ATTENTION)
    times = TaskTimes(
        at_base_s={(name, layer): SECONDS.get(name, 0.01) for name in kinds for layer in range(4)},
        line=dict.fromkeys(kinds, (1.0, 0.1)),
        base_tokens=10,
        copy_overhead_s={TaskName.WEIGHT_PAGE: 0.0, TaskName.QKV_OFFLOAD: 0.005, TaskName.HIDDEN_LOAD: 0.005},
        link_bytes_per_s=10_000,
        delay_s={(TaskName.POST_ATTENTION, True): delay_s},
        between_sweeps_s=0.5,
    )
    expected_s = simulate(SCHEDULE, lambda task: SECONDS.get(task.key.name, 0.01), 2).duration_s + 0.5
    if delay_s:
        assert times.step_s(plan()) > expected_s
    else:
        assert times.step_s(plan()) == pytest.approx(expected_s)


def test_tasks_grow_with_the_micro_batch_and_copies_with_their_bytes() -> None:
    times = TaskTimes(
        at_base_s={(TaskName.ATTENTION, 0): 0.02},
        line={TaskName.ATTENTION: (0.01, 0.001)},
        base_tokens=10,
        copy_overhead_s={TaskName.QKV_OFFLOAD: 0.003},
        link_bytes_per_s=100,
        delay_s={},
        between_sweeps_s=0.0,
    )
    larger = Plan(SCHEDULE, tokens=(30, 30), page_bytes={}, qkv_bytes_per_token=5, output_bytes_per_token=5)
    seconds = times.duration_s(larger, ())
    attention = next(t for t in SCHEDULE.tasks if t.key.name is TaskName.ATTENTION)
    offload = next(t for t in SCHEDULE.tasks if t.resource is Resource.D2H and t.key.name is TaskName.QKV_OFFLOAD)
    assert seconds(attention) == pytest.approx(0.02 * (0.01 + 0.03) / (0.01 + 0.01))
    assert seconds(offload) == pytest.approx(0.003 + 30 * 5 / 100)


@pytest.mark.parametrize(
    ("pairs", "tau"),
    [
        ([(1, 10), (2, 20), (3, 30)], 1.0),
        ([(1, 30), (2, 20), (3, 10)], -1.0),
        ([(1, 10), (2, 30), (3, 20)], 1 / 3),
        ([(1, 10), (1, 20), (2, 30)], 2 / 3),  # told apart by the measurement alone: neither right nor wrong
    ],
)
def test_kendall_tau_counts_pairs_in_the_right_order_less_the_others(
    pairs: list[tuple[float, float]], tau: float
) -> None:
    assert kendall_tau(pairs) == pytest.approx(tau)


def test_others_share_is_what_we_did_not_use() -> None:
    before, after = CpuClock(all_s=100.0, ours_s=10.0, wall_s=0.0), CpuClock(all_s=103.0, ours_s=11.0, wall_s=2.0)
    assert before.others_share(after, num_cpus=2) == pytest.approx((3.0 - 1.0) / 4.0)
    idle = CpuClock(all_s=100.9, ours_s=11.0, wall_s=2.0)  # ticks are coarse: never below zero
    assert before.others_share(idle, num_cpus=2) == 0.0
