"""Times a schedule on paper: each resource runs its tasks in order, each task after those it waits for.

The same tasks that the executor launches, so predicted and achieved times can be laid side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_moe_lightning.pipeline.schedule import Schedule
from vllm_moe_lightning.pipeline.tasks import Task, TaskKey
from vllm_moe_lightning.resources import Resource


@dataclass(frozen=True)
class Interval:
    task: Task
    start_s: float
    end_s: float


@dataclass(frozen=True)
class SimulatedSweep:
    schedule: Schedule
    intervals: tuple[Interval, ...]
    carried_over: tuple[Interval, ...]
    """Of the sweep before: what ends after this one has begun, such as the pages of its first layer."""
    duration_s: float
    end_s: float
    """The intervals' clock begins with the first of the sweeps that were simulated."""
    busy_s: dict[Resource, float]


def simulate(schedule: Schedule, duration_s: Callable[[Task], float], num_sweeps: int = 1) -> SimulatedSweep:
    """Time `num_sweeps` sweeps one after the other and report the last, in which the pipeline is warm.

    `duration_s` gives the seconds a task keeps its resource busy.
    """
    free_s = dict.fromkeys(Resource, 0.0)
    done_s: dict[TaskKey, float] = {}
    begin_s = 0.0
    intervals: list[Interval] = []
    before: list[Interval] = []
    for _ in range(num_sweeps):
        begin_s = max(free_s[Resource.GPU], free_s[Resource.CPU])  # sampling follows the last post-attention
        before, intervals = intervals, []
        for task in schedule.tasks:
            ready_s = max((done_s.get(key, begin_s) for key in task.after), default=0.0)
            start_s = max(free_s[task.resource], ready_s)
            end_s = start_s + duration_s(task)
            free_s[task.resource] = done_s[task.key] = end_s
            intervals.append(Interval(task, start_s, end_s))
    end_s = free_s[Resource.GPU]
    busy_s = {
        resource: sum(i.end_s - i.start_s for i in intervals if i.task.resource is resource) for resource in Resource
    }
    carried_over = tuple(interval for interval in before if interval.end_s > begin_s)
    return SimulatedSweep(schedule, tuple(intervals), carried_over, end_s - begin_s, end_s, busy_s)
