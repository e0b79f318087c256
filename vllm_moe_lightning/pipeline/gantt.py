"""A picture of a sweep: a row for each resource, a bar for each task, coloured by what the task does.

Draws what the streams recorded and what the simulator predicts alike. matplotlib is wanted only when drawing.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from vllm_moe_lightning.pipeline.simulator import Interval, SimulatedSweep
from vllm_moe_lightning.pipeline.tasks import TaskName
from vllm_moe_lightning.pipeline.trace import ROWS, SweepSpan, Trace, TraceSource, TraceSpan
from vllm_moe_lightning.resources import LABELS

_COLOURS = {
    TaskName.PRE_ATTENTION: "tab:blue",
    TaskName.POST_ATTENTION: "tab:cyan",
    TaskName.QKV_OFFLOAD: "tab:olive",
    TaskName.ATTENTION: "tab:green",
    TaskName.EXPERTS_OFFLOAD: "darkkhaki",
    TaskName.EXPERTS: "limegreen",
    TaskName.EXPERTS_LOAD: "salmon",
    TaskName.POST_EXPERTS: "paleturquoise",
    TaskName.ROUTING_OFFLOAD: "palegoldenrod",
    TaskName.EXPERTS_FETCH: "sandybrown",
    TaskName.HIDDEN_LOAD: "tab:red",
    TaskName.WEIGHT_PAGE: "tab:orange",
    TaskName.KV_LOAD: "tab:pink",
    TaskName.DEVICE_ATTENTION: "tab:purple",
    TaskName.KV_APPEND: "tab:brown",
}
_OTHER, _OTHER_COLOUR = "other", "lightgrey"
_MS_PER_S = 1e3


def simulated_spans(sweep: SimulatedSweep) -> list[TraceSpan]:
    """A simulated sweep as spans; marks, which take no time, left out."""
    return _spans(sweep.intervals)


def _spans(intervals: Iterable[Interval]) -> list[TraceSpan]:
    return [
        TraceSpan(interval.task.resource, str(interval.task.key), interval.start_s, interval.end_s)
        for interval in intervals
        if interval.end_s > interval.start_s
    ]


def simulated_trace(sweep: SimulatedSweep) -> Trace:
    shape = sweep.schedule.shape
    source = TraceSource("simulated", sweep.schedule.name, shape.lookahead, shape.pages_per_layer, shape.with_attention)
    whole = SweepSpan(
        sweep.end_s - sweep.duration_s,
        sweep.end_s,
        shape.num_micro_batches,
        experts=shape.experts,
        context=tuple(sorted(shape.context)),
    )
    return Trace(source, (whole,), tuple(_spans([*sweep.carried_over, *sweep.intervals])))


def plot_gantt(panels: Iterable[tuple[str, Iterable[TraceSpan]]], path: Path) -> None:
    """One panel under the other for each (title, spans), on one time scale from each panel's first task on.

    The format follows the path's ending: png, svg or pdf. A title should say whether the spans are measured or
    simulated, and on which device.
    """
    drawn = [(title, sorted(spans, key=lambda span: span.start_s)) for title, spans in panels]
    if not drawn or not all(spans for _, spans in drawn):
        empty = [title for title, spans in drawn if not spans]
        raise ValueError(f"nothing to draw{f' for {empty}' if empty else ''}: was recording on?")
    from matplotlib.figure import Figure  # not pyplot: no display, no global state
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 0.6 + 1.9 * len(drawn)), layout="constrained")
    all_axes = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
    shown: dict[str, str] = {}
    for axes, (title, spans) in zip(all_axes, drawn, strict=True):
        begin_s = spans[0].start_s
        for position, row in enumerate(ROWS):
            of_row = [span for span in spans if span.resource is row]
            kinds = [_kind(span.label) for span in of_row]
            shown |= dict(kinds)
            axes.broken_barh(
                [((span.start_s - begin_s) * _MS_PER_S, (span.end_s - span.start_s) * _MS_PER_S) for span in of_row],
                (position - 0.4, 0.8),
                facecolors=[colour for _, colour in kinds],
                edgecolor="white",
                linewidth=0.2,
            )
        axes.set_yticks(range(len(ROWS)), [LABELS[row] for row in ROWS])
        axes.set_ylim(len(ROWS) - 0.5, -0.5)  # compute on top, as in the paper's figure
        axes.set_title(title, fontsize=9, loc="left")
    all_axes[-1].set_xlabel("ms")
    handles = [Patch(color=colour, label=name) for name, colour in sorted(shown.items())]
    figure.legend(handles=handles, loc="outside right upper", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _kind(label: str) -> tuple[str, str]:
    """(name, colour) of a span labelled like `post_attention(3,1)`."""
    name = label.partition("(")[0]
    return next(((kind.value, colour) for kind, colour in _COLOURS.items() if kind == name), (_OTHER, _OTHER_COLOUR))
