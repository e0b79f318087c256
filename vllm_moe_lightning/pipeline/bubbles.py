"""Why a resource did nothing: each gap between its tasks is put down to what the task that ended it waited for."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from vllm_moe_lightning.pipeline.expert_places import ExpertPlaces
from vllm_moe_lightning.pipeline.schedule import SweepShape, make_schedule
from vllm_moe_lightning.pipeline.tasks import Task, wait_name
from vllm_moe_lightning.pipeline.trace import SweepSpan, Trace, TraceSource, TraceSpan
from vllm_moe_lightning.resources import Resource

BETWEEN_SWEEPS = "between sweeps"
NOT_LAUNCHED = "not launched yet"
NOTHING_TO_DO = "nothing left to do"
MEANINGS = {
    BETWEEN_SWEEPS: "LM head, sampling, scheduling",
    NOT_LAUNCHED: "the launching thread was at something else",
    NOTHING_TO_DO: "no task of this resource followed",
}

LATE_S = 2e-4
"""A paced copy is said to begin when the link was free, though its thread woke up this much later."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Bubble:
    """Time in which a resource did nothing, by reason."""

    reason: str
    """A kind of wait ("hidden_load<-attention"), or one of BETWEEN_SWEEPS, NOT_LAUNCHED, NOTHING_TO_DO."""
    resource: Resource | None
    """That was waited for."""
    time_s: float


def bubbles_of(
    trace: Trace,
    of_resource: Mapping[Resource, Sequence[TraceSpan]],
    resource: Resource,
    idle: Iterable[Interval],
    between: Sequence[Interval],
) -> tuple[Bubble, ...]:
    """Each idle interval of `resource` is put down to what the task that ended it waited for.

    A task starts once its stream is free and the tasks it waits for are done. So the interval up to the end of the
    latest of them is theirs, and the rest the launching thread's. What lies between sweeps is neither's.
    """
    sweeps = sorted(sweep for sweep in trace.sweeps if not sweep.is_dummy)
    begins = [sweep.start_s for sweep in sweeps]
    spans = of_resource[resource]
    starts = [span.start_s for span in spans]
    ends_of = _ends_by_label(trace.spans)
    resource_of = {_task_of(span): span.resource for span in trace.spans}
    totals: dict[tuple[str, Resource | None], float] = defaultdict(float)
    for begin_s, end_s in idle:
        pieces = difference([(begin_s, end_s)], between)
        totals[BETWEEN_SWEEPS, None] += end_s - begin_s - length(pieces)
        place = bisect_left(starts, end_s)
        is_ended = place < len(spans) and starts[place] == end_s  # else by the end of what is looked at
        sweep = sweeps[max(0, bisect_right(begins, end_s) - 1)]
        task = _tasks_of(trace.source, sweep).get(_task_of(spans[place])) if is_ended else None
        if task is None:
            totals[NOTHING_TO_DO, None] += length(pieces)
            continue
        released_s, reason, awaited_resource = begin_s, NOT_LAUNCHED, None
        for key in task.after:
            ends = ends_of.get(str(key), [])
            before = bisect_right(ends, end_s + LATE_S)
            if before and ends[before - 1] > released_s:
                released_s, reason = ends[before - 1], wait_name(task.key, key)
                awaited_resource = resource_of[str(key)]
        waited_s = length(intersection(pieces, [(begin_s, released_s)]))
        totals[reason, awaited_resource] += waited_s
        totals[NOT_LAUNCHED, None] += length(pieces) - waited_s
    bubbles = [Bubble(reason, awaited, time_s) for (reason, awaited), time_s in totals.items() if time_s > 0]
    return tuple(sorted(bubbles, key=lambda bubble: -bubble.time_s))


def _tasks_of(source: TraceSource, sweep: SweepSpan) -> dict[str, Task]:
    return _tasks_by_label(source, sweep.num_micro_batches, sweep.experts, frozenset(sweep.context))


@lru_cache(maxsize=64)
def _tasks_by_label(
    source: TraceSource, num_micro_batches: int, experts: ExpertPlaces, context: frozenset[int]
) -> dict[str, Task]:
    shape = SweepShape(
        len(source.pages_per_layer),
        num_micro_batches,
        experts.pages(source.pages_per_layer),
        source.lookahead,
        source.with_attention,
        context=context,
        experts=experts,
    )
    return {str(task.key): task for task in make_schedule(source.schedule, shape).tasks}


def _task_of(span: TraceSpan) -> str:
    """Without what stands behind it: a task may consist of several operations ("attention(0,1) (prompts)")."""
    return span.label.partition(" ")[0]


def _ends_by_label(spans: Iterable[TraceSpan]) -> dict[str, list[float]]:
    ends: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        ends[_task_of(span)].append(span.end_s)
    return {label: sorted(values) for label, values in ends.items()}


def intersection(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Both ascending, each without overlaps."""
    result: list[Interval] = []
    first = second = 0
    while first < len(some) and second < len(others):
        begin_s, end_s = max(some[first][0], others[second][0]), min(some[first][1], others[second][1])
        if begin_s < end_s:
            result.append((begin_s, end_s))
        if some[first][1] < others[second][1]:
            first += 1
        else:
            second += 1
    return result


def difference(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What of `some` is not in `others`; both ascending, each without overlaps."""
    result: list[Interval] = []
    position = 0
    for begin_s, end_s in some:
        while position < len(others) and others[position][1] <= begin_s:
            position += 1
        index = position
        while index < len(others) and others[index][0] < end_s:
            if others[index][0] > begin_s:
                result.append((begin_s, others[index][0]))
            begin_s = max(begin_s, others[index][1])
            index += 1
        if begin_s < end_s:
            result.append((begin_s, end_s))
    return result


def length(intervals: Iterable[Interval]) -> float:
    return sum(end_s - begin_s for begin_s, end_s in intervals)
