"""Times a schedule on paper: each resource runs its tasks in order, each task after those it waits for.

The same tasks that the executor launches, so predicted and achieved times can be laid side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_moe_lightning.pipeline.schedule import Schedule
from vllm_moe_lightning.pipeline.tasks import Resource, Task, TaskKey


@dataclass(frozen=True)
class Interval:
    task: Task
    start_s: float
    end_s: float


@dataclass(frozen=True)
class SimulatedSweep:
    intervals: tuple[Interval, ...]
    duration_s: float
    busy_s: dict[Resource, float]


def simulate(schedule: Schedule, duration_s: Callable[[Task], float], num_sweeps: int = 1) -> SimulatedSweep:
    """Time `num_sweeps` sweeps one after the other and report the last, in which the pipeline is warm.

    `duration_s` gives the seconds a task keeps its resource busy.
    """
    free_s = dict.fromkeys(Resource, 0.0)
    done_s: dict[TaskKey, float] = {}
    begin_s = 0.0
    for _ in range(num_sweeps):
        begin_s = max(free_s[Resource.GPU], free_s[Resource.CPU])  # sampling follows the last post-attention
        intervals: list[Interval] = []
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
    return SimulatedSweep(tuple(intervals), end_s - begin_s, busy_s)
