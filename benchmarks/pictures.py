#!/usr/bin/env python
"""Draws the README's pictures from results (JSON): throughput, predicted against measured, a Gantt chart, the roofline,
and throughput against host memory. What has no results is not drawn, and a line says so."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer

from benchmarks.machine import ROOT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Result = Mapping[str, Any]
# Ours in blue, the other schedules in warm colours, what is no offload in grey.
COLOURS = {
    "cgopipe": "#1f5fa8",
    "s2": "#e5883b",
    "s3": "#d9a441",
    "s4": "#b5382a",
    "serial": "#7a5195",
    "vLLM in RAM": "#9a9a9a",
}
OTHER_COLOURS = ("#e5883b", "#b5382a", "#7a5195", "#9a9a9a")
BOUND_COLOUR = "black"
GANTT_SCHEDULES = ("cgopipe", "s2", "s3", "serial")
ROOFLINE_GPU = "t4"
MEMORY_TICKS_GIB = (128, 256, 512, 1024, 2048)


class IncompleteResultsError(Exception):
    """The results are of a version of the benchmark that did not keep what the picture shows."""


def draw_throughput(result: Result, path: Path) -> None:
    """A cluster of bars per workload; a line over CGOPipe's bar at the modelled bound."""
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys((row["workload"], row["padded"]) for row in result["rows"]))
    arms = list(dict.fromkeys(row["arm"] for row in result["rows"]))
    figure = Figure(figsize=(max(7.0, 2.0 + 1.7 * len(workloads)), 4.2), layout="constrained")
    axes = figure.add_subplot()
    width = 0.85 / len(arms)
    is_bound_named = False
    for index, arm in enumerate(arms):
        colour = COLOURS.get(arm, OTHER_COLOURS[index % len(OTHER_COLOURS)])
        for row in (row for row in result["rows"] if row["arm"] == arm):
            x = workloads.index((row["workload"], row["padded"])) + (index - (len(arms) - 1) / 2) * width
            height, (low, high) = row["tokens_per_s"], row["tokens_per_s_spread"]
            axes.bar([x], [height], width * 0.92, color=colour)
            axes.errorbar([x], [height], yerr=[[height - low], [high - height]], color="black", linewidth=0.8)
            bound = row.get("modelled_tokens_per_s")
            if bound:
                label = None if is_bound_named else "modelled bound of CGOPipe"
                axes.hlines([bound], x - width / 2, x + width / 2, color=BOUND_COLOUR, linewidth=1.6, label=label)
                is_bound_named = True
        axes.bar([0], [0], color=colour, label=arm)
    names = [f"{name}{chr(10)}padded" if padded else name for name, padded in workloads]
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_ylabel("generated tokens/s, prefill included")
    load = result["machine"]["load_average"]
    axes.set_title(f"{result['device']} device, {result['machine']['cpu']}, load {load:.1f}", fontsize=9, loc="left")
    figure.legend(loc="outside upper center", fontsize=8, frameon=False, ncols=4)
    _without_frame(axes)
    figure.savefig(path, dpi=150)


def draw_predicted(result: Result, path: Path) -> None:
    from benchmarks.predicted_vs_measured import plot

    plot(dict(result), path)


def draw_gantt(result: Result, path: Path) -> None:
    """A measured step of each schedule."""
    from vllm_moe_lightning.pipeline.gantt import plot_gantt
    from vllm_moe_lightning.pipeline.trace import TraceSpan
    from vllm_moe_lightning.resources import Resource

    rows = {row["schedule"]: row for row in result["rows"]}
    if not all("spans" in rows[name] for name in GANTT_SCHEDULES):
        raise IncompleteResultsError("these results of benchmarks/pipeline.py hold no spans; run it again")
    panels = []
    for name in GANTT_SCHEDULES:
        spans = [
            TraceSpan(Resource(resource), label, begin_s, end_s)
            for resource, label, begin_s, end_s in rows[name]["spans"]
        ]
        title = f"{name}: a measured step on the emulated device (median {rows[name]['step_s'] * 1e3:.0f} ms)"
        panels.append((title, spans))
    plot_gantt(panels, path)


def draw_roofline(result: Result, path: Path) -> None:
    """Of the memory sweep's machine and model, with the policy for the most host memory that it was modelled at."""
    from benchmarks.paper_fit import spec_of
    from vllm_moe_lightning.hardware_presets import preset_profile
    from vllm_moe_lightning.roofline_plot import plot_roofline
    from vllm_moe_lightning.workload import HrmPolicy, Workload

    curves = result["modelled"][ROOFLINE_GPU]
    point = next(point for point in reversed(curves["points"]["cgopipe"]) if point["tokens_per_s"] is not None)
    policy = HrmPolicy(
        micro_batch_size=point["micro_batch_size"],
        num_micro_batches=point["num_micro_batches"],
        num_resident_layers=point["num_resident_layers"],
    )
    workload = Workload(curves["prompt_len"], curves["gen_len"])
    plot_roofline(spec_of(curves["model"]), preset_profile(ROOFLINE_GPU), workload, policy, path)


def draw_memory(result: Result, path: Path) -> None:
    """Modelled machines, and the measured emulated device."""
    from matplotlib.figure import Figure

    modelled = result["modelled"]
    figure = Figure(figsize=(4.4 * (len(modelled) + 1), 3.8), layout="constrained")
    panels = figure.subplots(1, len(modelled) + 1, squeeze=False)[0]
    for axes, (gpu, curves) in zip(panels, modelled.items(), strict=False):
        for name, points in curves["points"].items():
            there = [point for point in points if point["tokens_per_s"] is not None]
            memory, rates = [point["host_gib"] for point in there], [point["tokens_per_s"] for point in there]
            axes.plot(memory, rates, "o-", markersize=3, color=COLOURS[name], label=name)
            bound = curves["bound_tokens_per_s"][name]
            axes.axhline(bound, color=COLOURS[name], linewidth=0.8, linestyle=":", label=f"{name}, no memory limit")
        axes.set_xscale("log", base=2)
        axes.set_xticks(MEMORY_TICKS_GIB, map(str, MEMORY_TICKS_GIB))
        _label_memory(axes, "host memory, GiB", f"modelled, not run: {curves['model']} on {gpu.upper()}")
    measured, axes = result["measured"], panels[-1]
    for name in curves["points"]:
        rows = sorted((r for r in measured["rows"] if r["schedule"] == name), key=lambda row: row["host_bytes"])
        memory = [row["host_bytes"] / 1e6 for row in rows]
        rates = [row["tokens_per_s"] for row in rows]
        spread = [
            [row["tokens_per_s"] - row["tokens_per_s_spread"][0] for row in rows],
            [row["tokens_per_s_spread"][1] - row["tokens_per_s"] for row in rows],
        ]
        axes.errorbar(memory, rates, yerr=spread, fmt="o-", markersize=3, color=COLOURS[name], label=name)
        bounds = [row["bound_tokens_per_s"] for row in rows]
        axes.plot(memory, bounds, ":", linewidth=0.9, color=COLOURS[name], label=f"{name}, all overlapped")
    _label_memory(axes, "host memory, MB", "measured on the emulated device, decode only")
    figure.savefig(path, dpi=150)


def _label_memory(axes: Axes, x_label: str, title: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=9, loc="left")
    axes.legend(fontsize=7, frameon=False)
    _without_frame(axes)


def _without_frame(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


PICTURES: Sequence[tuple[str, str, Callable[[Result, Path], None]]] = (
    ("throughput", "throughput", draw_throughput),
    ("predicted_vs_measured", "predicted_vs_measured", draw_predicted),
    ("gantt", "pipeline", draw_gantt),
    ("roofline", "host_memory_sweep", draw_roofline),
    ("host_memory_sweep", "host_memory_sweep", draw_memory),
)
"""(picture, results, how)"""


def main(
    results: Annotated[Path, typer.Option(help="Folder of the results.")] = ROOT / "benchmarks" / "results",
    out: Annotated[Path | None, typer.Option(help="Default: pictures/ in the results' folder.")] = None,
) -> None:
    """Draw all pictures that there are results for."""
    folder = out or results / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    for name, source, draw in PICTURES:
        path = results / f"{source}.json"
        if not path.exists():
            print(f"not drawn: {name}, for there is no {path}")
            continue
        try:
            draw(json.loads(path.read_text()), folder / f"{name}.png")
        except IncompleteResultsError as error:
            print(f"not drawn: {name}: {error}")
            continue
        print(f"drawn: {folder / f'{name}.png'}")


if __name__ == "__main__":
    typer.run(main)
