"""Task durations for any policy, from those measured at one: what the simulator is told.

A compute or attention task is as long as at the base policy, grown with its micro-batch as it does when it runs alone;
a copy takes its bytes over the link's speed, and the overhead that copies of its kind had. Before each comes the delay
that tasks of its kind had at the base policy between the moment they could begin and their beginning: launching, and
waking a thread if it had to wait. Nothing is fitted to the policies that are predicted.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.decoder_engine import DecoderEngine, Step
from vllm_moe_lightning.pipeline.schedule import Schedule
from vllm_moe_lightning.pipeline.simulator import simulate
from vllm_moe_lightning.pipeline.tasks import Task, TaskKey, TaskName
from vllm_moe_lightning.resources import Resource

COPIES = (TaskName.WEIGHT_PAGE, TaskName.HIDDEN_LOAD, TaskName.QKV_OFFLOAD)
NUM_PASSES = 4


class TaskRun(NamedTuple):
    """A task as a stream recorded it."""

    key: TaskKey
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Round:
    """Some steps of one policy, back to back."""

    step_s: float
    runs: tuple[TaskRun, ...] = ()
    others_share: float = 0.0
    """Of our CPUs' time, what other processes had meanwhile."""


@dataclass
class Steps:
    """One policy, an entry for each round: medians are taken over rounds, not over a round's steps."""

    rounds: list[Round] = field(default_factory=list)

    @property
    def step_s(self) -> list[float]:
        return [taken.step_s for taken in self.rounds]

    def task_s(self) -> dict[TaskKey, float]:
        """Of each round the mean, since a task that is interrupted now and then costs a step that much; of the rounds
        the median."""
        means: dict[TaskKey, list[float]] = defaultdict(list)
        for taken in self.rounds:
            of_key: dict[TaskKey, list[float]] = defaultdict(list)
            for run in taken.runs:
                of_key[run.key].append(run.end_s - run.start_s)
            for key, seconds in of_key.items():
                means[key].append(statistics.mean(seconds))
        return {key: statistics.median(values) for key, values in means.items()}


@dataclass(frozen=True)
class Plan:
    """What the simulator is told of a policy: its schedule, and how large its tasks are."""

    schedule: Schedule
    tokens: tuple[int, ...]
    """Of each micro-batch."""
    page_bytes: dict[tuple[int, int], int]
    qkv_bytes_per_token: int
    output_bytes_per_token: int

    @classmethod
    def of(cls, engine: DecoderEngine, step: Step) -> Plan:
        config, executor = engine.model.config, engine.executor
        groups = step.groups(executor.policy.num_micro_batches)
        return cls(
            schedule=executor.schedule_for(len(groups)),
            tokens=tuple(len(group) for group in groups),  # one new token for each sequence
            page_bytes={
                (layer, index): page.num_bytes
                for layer, streamed in engine.store.layers.items()
                for index, page in enumerate(streamed.pages)
            },
            qkv_bytes_per_token=config.qkv_bytes_per_token,
            output_bytes_per_token=config.num_heads * config.head_dim * config.dtype.itemsize,
        )

    def copied_bytes(self, key: TaskKey) -> int:
        match key.name:
            case TaskName.WEIGHT_PAGE:
                return self.page_bytes[key.layer, key.index]
            case TaskName.QKV_OFFLOAD:
                return self.tokens[key.index] * self.qkv_bytes_per_token
            case _:
                return self.tokens[key.index] * self.output_bytes_per_token


Delay = tuple[TaskName, bool]
"""The kind of a task, and whether its resource had to wait for others' tasks before it."""


def delays_of(schedule: Schedule, runs: Sequence[TaskRun]) -> tuple[dict[Delay, float], float]:
    """(mean delay of each kind, mean time between two sweeps) of a round. A delay runs from the moment at which the
    simulator would begin the task to its beginning."""
    runs_of: dict[TaskKey, list[TaskRun]] = defaultdict(list)
    for run in runs:
        runs_of[run.key].append(run)
    delays: dict[Delay, list[float]] = defaultdict(list)
    between: list[float] = []
    free_s: dict[Resource, float] = {}
    done_s: dict[TaskKey, float] = {}
    for sweep in range(min(map(len, runs_of.values()))):
        begins = True
        for task in schedule.tasks:
            if task.key not in runs_of:  # a mark: everything before it on its resource
                done_s[task.key] = free_s.get(task.resource, -math.inf)
                continue
            run = runs_of[task.key][sweep]
            ready_s = max((done_s[key] for key in task.after if key in done_s), default=-math.inf)
            could_begin_s = max(ready_s, free_s.get(task.resource, -math.inf))
            if task.resource is Resource.GPU and begins:
                begins = False
                if sweep:
                    between.append(run.start_s - could_begin_s)
            elif sweep or could_begin_s > -math.inf:
                waited = ready_s > free_s.get(task.resource, -math.inf)
                delays[task.key.name, waited].append(max(0.0, run.start_s - could_begin_s))
            free_s[task.resource] = done_s[task.key] = run.end_s
    return {kind: statistics.mean(values) for kind, values in delays.items()}, statistics.mean(between)


@dataclass(frozen=True)
class TaskTimes:
    """Durations for any policy, from those at the base policy."""

    at_base_s: dict[tuple[TaskName, int], float]
    """By name and layer: the first and the last layer do more."""
    line: dict[TaskName, tuple[float, float]]
    """(seconds at no tokens, seconds per token) of a task that runs alone. Only its shape is used."""
    base_tokens: float
    copy_overhead_s: dict[TaskName, float]
    link_bytes_per_s: float
    delay_s: dict[Delay, float]
    between_sweeps_s: float

    @classmethod
    def measured(cls, base: Steps, base_plan: Plan, alone: dict[int, tuple[Steps, Plan]], link: float) -> TaskTimes:
        by_layer: dict[tuple[TaskName, int], list[float]] = defaultdict(list)
        overheads: dict[TaskName, list[float]] = defaultdict(list)
        for key, seconds in base.task_s().items():
            by_layer[key.name, key.layer].append(seconds)
            if key.name in COPIES:
                overheads[key.name].append(seconds - base_plan.copied_bytes(key) / link)
        points: dict[TaskName, list[tuple[float, float]]] = defaultdict(list)
        for steps, plan in alone.values():
            for key, seconds in steps.task_s().items():
                if key.name not in COPIES:
                    points[key.name].append((plan.tokens[key.index], seconds))
        of_rounds = [delays_of(base_plan.schedule, taken.runs) for taken in base.rounds]
        kinds = {kind for delays, _ in of_rounds for kind in delays}
        return cls(
            at_base_s={key: statistics.mean(values) for key, values in by_layer.items()},
            line={name: _median_line(values) for name, values in points.items()},
            base_tokens=statistics.mean(base_plan.tokens),
            copy_overhead_s={name: statistics.median(values) for name, values in overheads.items()},
            link_bytes_per_s=link,
            delay_s={kind: statistics.median(d[kind] for d, _ in of_rounds if kind in d) for kind in kinds},
            between_sweeps_s=statistics.median(between for _, between in of_rounds),
        )

    def _delay_s(self, name: TaskName, waited: bool) -> float:
        """Of the other case where the base policy never had this one."""
        return self.delay_s.get((name, waited), self.delay_s.get((name, not waited), 0.0))

    def duration_s(self, plan: Plan, waiting: Collection[TaskKey]) -> Callable[[Task], float]:
        """`waiting`: the tasks before which their resource is idle."""

        def of(task: Task) -> float:
            key = task.key
            delay_s = self._delay_s(key.name, key in waiting)
            if key.name in COPIES:
                return delay_s + self.copy_overhead_s[key.name] + plan.copied_bytes(key) / self.link_bytes_per_s
            if key.name not in self.line:  # a mark
                return 0.0
            fixed_s, per_token_s = self.line[key.name]
            growth = (fixed_s + per_token_s * plan.tokens[key.index]) / (fixed_s + per_token_s * self.base_tokens)
            return delay_s + self.at_base_s[key.name, key.layer] * growth

        return of

    def step_s(self, plan: Plan) -> float:
        waiting: set[TaskKey] = set()
        for _ in range(NUM_PASSES):  # which tasks wait follows from the delays, and the delays from who waits
            # Two sweeps, so that the one reported starts with the pages that the one before it brought up.
            sweep = simulate(plan.schedule, self.duration_s(plan, waiting), num_sweeps=2)
            waiting, free_s = set(), dict.fromkeys(Resource, -math.inf)
            for interval in sweep.intervals:
                if interval.start_s > free_s[interval.task.resource]:
                    waiting.add(interval.task.key)
                free_s[interval.task.resource] = interval.end_s
        return self.between_sweeps_s + sweep.duration_s


def _median_line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """(intercept, slope) by least squares through the median at each size; the intercept not below zero."""
    of_size: dict[float, list[float]] = defaultdict(list)
    for size, seconds in points:
        of_size[size].append(seconds)
    sizes = list(of_size)
    medians = [statistics.median(values) for values in of_size.values()]
    slope, intercept = statistics.linear_regression(sizes, medians)
    if intercept < 0:
        slope, intercept = statistics.linear_regression(sizes, medians, proportional=True)
    return intercept, slope
