#!/usr/bin/env python
"""Predicts the step time of twelve policies around a chosen one, then measures them: simulator against executor.

Task durations are measured once, at the base policy; how they grow with the micro-batch is timed separately, with
nothing overlapped. No policy is fitted. The device is emulated: this tests the model of overlap, not a GPU's speed.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.cpu_clock import CpuClock
from benchmarks.decoder_engine import DecoderEngine
from benchmarks.pipeline import FULL, Bench, Cpus, Workload, machine
from benchmarks.task_times import Plan, Round, Steps, TaskRun, TaskTimes
from vllm_moe_lightning.config import MoeLightningConfig, ScheduleName
from vllm_moe_lightning.device import EmulatedDevice
from vllm_moe_lightning.pipeline.tasks import TaskKey, TaskName

GOAL_MEDIAN_ERROR, GOAL_KENDALL_TAU = 0.10, 0.9
# At least two, for the time between them.
BASE_STEPS_PER_ROUND = 3
NUM_CALIBRATIONS = 4
RECORDS_KEPT = 50_000
# Steps during which other processes had more of our CPUs than this are taken again, and the least disturbed count.
# Others' share is read from the kernel, so that a measurement is never dropped for what it says.
MOST_OTHERS_SHARE = 0.05
MOST_ATTEMPTS = 3
# Micro-batch counts at which tasks are timed with nothing overlapped.
TIMED_ALONE = (2, 4, 8)


@dataclass(frozen=True)
class PolicyPoint:
    name: str
    num_micro_batches: int = 4
    lookahead: int = 2
    page_mib: float | None = None
    num_resident_layers: int = 0
    schedule: ScheduleName = "cgopipe"

    def options(self) -> MoeLightningConfig:
        return MoeLightningConfig(
            num_micro_batches=self.num_micro_batches,
            lookahead=self.lookahead,
            page_mib=self.page_mib,
            num_resident_layers=self.num_resident_layers,
            schedule=self.schedule,
            attention_threads=1,
        )


BASE = PolicyPoint("base")
# S4 is left out: it has tasks that the base policy never runs, so they could only be fitted.
POLICIES = (
    BASE,
    replace(BASE, name="2 micro-batches", num_micro_batches=2),
    replace(BASE, name="6 micro-batches", num_micro_batches=6),
    replace(BASE, name="8 micro-batches", num_micro_batches=8),
    replace(BASE, name="look-ahead 1", lookahead=1),
    replace(BASE, name="a layer in two pages", page_mib=16.0),
    replace(BASE, name="a layer in one page", page_mib=64.0),
    replace(BASE, name="4 layers resident", num_resident_layers=4),
    replace(BASE, name="serial", schedule="serial"),
    replace(BASE, name="s2", schedule="s2"),
    replace(BASE, name="s3", schedule="s3"),
    replace(BASE, name="s3, 4 layers resident", schedule="s3", num_resident_layers=4),
)


class PolicyBench(Bench):
    """The pipeline benchmark's model and step, under an engine for any policy."""

    def engine_for(self, point: PolicyPoint, link_bytes_per_s: float | None) -> DecoderEngine:
        for parameter, loaded in self._loaded:
            parameter.data = loaded
        device = EmulatedDevice(
            h2d_bytes_per_s=link_bytes_per_s, d2h_bytes_per_s=link_bytes_per_s, cpus=self.cpus.others
        )
        return DecoderEngine(self.model, device, point.options(), max_tokens=self.workload.num_seqs, caches=self.caches)

    def measure(self, engine: DecoderEngine, num_steps: int, steps: Steps, *, record: bool = False) -> None:
        """Add a round: `num_steps` steps back to back, after one that fills the pipeline."""
        cpus = sorted({*self.cpus.compute, *self.cpus.others})
        engine.step(self.step)
        best: Round | None = None
        for _ in range(MOST_ATTEMPTS):
            before = CpuClock.read(cpus)
            taken = self._take_round(engine, num_steps, record)
            others = before.others_share(CpuClock.read(cpus), len(cpus))
            if best is None or others < best.others_share:
                best = replace(taken, others_share=others)
            if others <= MOST_OTHERS_SHARE:
                break
        assert best is not None, "there is at least one attempt"
        steps.rounds.append(best)

    def _take_round(self, engine: DecoderEngine, num_steps: int, record: bool) -> Round:
        device = engine.device
        device.synchronize()
        device.set_recording(RECORDS_KEPT if record else 0)
        device.drain_records()
        started_s = time.monotonic()
        for _ in range(num_steps):
            engine.step(self.step)
        elapsed_s = time.monotonic() - started_s
        device.synchronize()
        records = device.drain_records() if record else []
        runs = tuple(TaskRun(_key_of(taken.label), taken.start_s, taken.end_s) for taken in records)
        return Round(step_s=elapsed_s / num_steps, runs=runs)


def _key_of(label: str) -> TaskKey:
    """`post_attention(3,1)` -> its key."""
    name, _, numbers = label.removesuffix(")").partition("(")
    layer, index = numbers.split(",")
    return TaskKey(TaskName(name), int(layer), int(index))


def kendall_tau(pairs: Sequence[tuple[float, float]], is_tie: Callable[[int, int], bool] = lambda i, j: False) -> float:
    """Share of pairs of policies in the right order less that in the wrong one; ties left out."""
    score = count = 0
    for i, (predicted, measured) in enumerate(pairs):
        for j, (other_predicted, other_measured) in enumerate(pairs[:i]):
            if not is_tie(i, j):
                product = (predicted - other_predicted) * (measured - other_measured)
                score += (product > 0) - (product < 0)
                count += 1
    return score / count if count else math.nan


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def run(workload: Workload, num_rounds: int, steps_per_round: int, console: Console) -> dict[str, Any]:
    load_before, started_s = os.getloadavg()[0], time.monotonic()
    bench = PolicyBench(workload, Cpus.split())
    os.sched_setaffinity(0, bench.cpus.compute)
    # The fastest, since others' load only slows compute: behind a link that is too slow all policies are alike.
    link_bytes_per_s = max(bench.calibrated_bytes_per_s(steps_per_round) for _ in range(NUM_CALIBRATIONS))
    base = Steps()
    base_plan: Plan | None = None
    measured = {point.name: Steps() for point in POLICIES}
    plans: dict[str, Plan] = {}
    alone: dict[int, tuple[Steps, Plan]] = {}
    for index in track(range(num_rounds), "rounds", console=console, transient=True):
        # The base policy's tasks are timed in every round, in steps that count for nothing else: others' load comes
        # and goes, and predictions should stand for the same stretch of time as the measurements.
        with bench.engine_for(BASE, link_bytes_per_s) as engine:
            base_plan = Plan.of(engine, bench.step)
            bench.measure(engine, BASE_STEPS_PER_ROUND, base, record=True)
        for count in TIMED_ALONE:
            point = replace(BASE, name="alone", num_micro_batches=count, schedule="serial", num_resident_layers=0)
            with bench.engine_for(point, None) as engine:
                if count not in alone:
                    alone[count] = Steps(), Plan.of(engine, bench.step)
                bench.measure(engine, 1, alone[count][0], record=True)
        for position in range(len(POLICIES)):  # another one first in each round
            point = POLICIES[(index + position) % len(POLICIES)]
            with bench.engine_for(point, link_bytes_per_s) as engine:
                plans[point.name] = Plan.of(engine, bench.step)
                bench.measure(engine, steps_per_round, measured[point.name])
    assert base_plan is not None, "there is at least one round"
    times = TaskTimes.measured(base, base_plan, alone, link_bytes_per_s)
    rows = [_row(point, measured[point.name], times.step_s(plans[point.name])) for point in POLICIES]
    return {
        "summary": {
            **_summary(rows),
            "num_rounds": num_rounds,
            "steps_per_round": steps_per_round,
            "elapsed_s": time.monotonic() - started_s,
            "load_average_before": load_before,
            "others_cpu_share": statistics.median(
                taken.others_share for steps in measured.values() for taken in steps.rounds
            ),
            "most_others_share": MOST_OTHERS_SHARE,
            **machine(bench.cpus),
        },
        "rows": rows,
        "calibration": {
            "policy": asdict(BASE),
            "link_bytes_per_s": link_bytes_per_s,
            "step_s": statistics.median(base.step_s),
            "step_s_rounds": base.step_s,
            "delay_s": {
                f"{name.value}, {'after waiting' if waited else 'in a row'}": seconds
                for (name, waited), seconds in times.delay_s.items()
            },
            "between_sweeps_s": times.between_sweeps_s,
            "task_s": {f"{name.value}({layer})": seconds for (name, layer), seconds in times.at_base_s.items()},
            "copy_overhead_s": {name.value: seconds for name, seconds in times.copy_overhead_s.items()},
            "alone_s_and_s_per_token": {name.value: line for name, line in times.line.items()},
        },
        "workload": {
            "num_seqs": workload.num_seqs,
            "context_len": workload.context_len,
            "num_layers": workload.model.num_layers,
            "experts_bytes": sum(layer.num_bytes for layer in bench.model.expert_layers()),
        },
    }


def _row(point: PolicyPoint, steps: Steps, predicted_s: float) -> dict[str, Any]:
    measured_s = statistics.median(steps.step_s)
    return {
        "policy": point.name,
        "device": "emulated",
        **{key: value for key, value in asdict(point).items() if key != "name"},
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "measured_s_quartiles": quartiles(steps.step_s),
        "measured_s_rounds": steps.step_s,
        "others_cpu_share_rounds": [taken.others_share for taken in steps.rounds],
        "error": predicted_s / measured_s - 1,
    }


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    pairs = [(row["predicted_s"], row["measured_s"]) for row in rows]

    def overlap(i: int, j: int) -> bool:
        """Whether the middle half of their rounds overlap: then the measurement has no order for them."""
        (low, high), (other_low, other_high) = (rows[k]["measured_s_quartiles"] for k in (i, j))
        return bool(low <= other_high and other_low <= high)

    errors = [abs(row["error"]) for row in rows]
    num_pairs = len(rows) * (len(rows) - 1) // 2
    error, tau = statistics.median(errors), kendall_tau(pairs)
    return {
        "device": "emulated",
        "median_abs_error": error,
        "kendall_tau": tau,
        "goals": {"median_abs_error": GOAL_MEDIAN_ERROR, "kendall_tau": GOAL_KENDALL_TAU},
        "goals_met": bool(error <= GOAL_MEDIAN_ERROR and tau >= GOAL_KENDALL_TAU),
        "worst_abs_error": max(errors),
        "median_abs_error_without_base": statistics.median(abs(r["error"]) for r in rows if r["policy"] != BASE.name),
        "kendall_tau_of_pairs_told_apart": kendall_tau(pairs, overlap),
        "num_pairs": num_pairs,
        "num_pairs_told_apart": sum(not overlap(i, j) for i in range(len(rows)) for j in range(i)),
    }


def show(result: dict[str, Any], console: Console) -> None:
    summary, workload, calibration = result["summary"], result["workload"], result["calibration"]
    table = Table(title=f"Step time on the emulated device, ms; median of {summary['num_rounds']} rounds")
    for column in ("policy", "predicted", "measured", "quartiles", "min..max", "error"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in result["rows"]:
        low, high = (f"{value * 1e3:.0f}" for value in row["measured_s_quartiles"])
        rounds = row["measured_s_rounds"]
        table.add_row(
            row["policy"],
            f"{row['predicted_s'] * 1e3:.0f}",
            f"{row['measured_s'] * 1e3:.0f}",
            f"{low}..{high}",
            f"{min(rounds) * 1e3:.0f}..{max(rounds) * 1e3:.0f}",
            f"{row['error']:+.1%}",
        )
    console.print(table)
    console.print(
        f"emulated: median error {summary['median_abs_error']:.1%} (goal {GOAL_MEDIAN_ERROR:.0%}, worst "
        f"{summary['worst_abs_error']:.1%}), Kendall tau {summary['kendall_tau']:.2f} (goal {GOAL_KENDALL_TAU}); "
        f"{summary['kendall_tau_of_pairs_told_apart']:.2f} over the {summary['num_pairs_told_apart']} of "
        f"{summary['num_pairs']} pairs whose quartiles don't overlap"
    )
    console.print(
        f"{workload['experts_bytes'] / 1e6:.0f} MB of experts in {workload['num_layers']} layers, "
        f"{workload['num_seqs']} sequences at context {workload['context_len']}, link paced to "
        f"{calibration['link_bytes_per_s'] / 1e6:.0f} MB/s; {summary['cpu']}, {summary['num_cpus']} CPUs, load "
        f"{summary['load_average_before']:.1f} before and {summary['load_average']:.1f} after, "
        f"other processes had {summary['others_cpu_share']:.0%} of the CPUs meanwhile, commit {summary['commit']}. "
        f"Not measured: a GPU, a real link, prefill."
    )


def plot(result: dict[str, Any], path: Path) -> None:
    """Predicted over measured step time, with the rounds' quartiles and the goal's band."""
    from matplotlib.figure import Figure

    rows, summary = result["rows"], result["summary"]
    figure = Figure(figsize=(6.5, 6), layout="constrained")
    axes = figure.add_subplot()
    lowest = 0.8 * min(min(row["measured_s"], row["predicted_s"]) for row in rows) * 1e3
    highest = 1.2 * max(max(row["measured_s"], row["predicted_s"]) for row in rows) * 1e3
    line = [lowest, highest]
    axes.plot(line, line, color="grey", linewidth=0.8)
    low, high = ([value * (1 + sign * GOAL_MEDIAN_ERROR) for value in line] for sign in (-1, 1))
    axes.fill_between(line, low, high, color="grey", alpha=0.15, label=f"within {GOAL_MEDIAN_ERROR:.0%}")
    for index, row in enumerate(rows):
        x, y = row["measured_s"] * 1e3, row["predicted_s"] * 1e3
        spread = [[abs(x - value * 1e3)] for value in row["measured_s_quartiles"]]
        label = f"{index + 1}  {row['policy']}"
        axes.errorbar([x], [y], xerr=spread, fmt="o", markersize=4, color=f"C{index % 10}", label=label)
        axes.annotate(str(index + 1), (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured step on the emulated device, ms (median and quartiles)")
    axes.set_ylabel("predicted step, ms")
    title = f"median error {summary['median_abs_error']:.1%}, Kendall tau {summary['kendall_tau']:.2f}"
    axes.set_title(title + f", load {summary['load_average']:.1f}", fontsize=10)
    axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(
    json_file: Annotated[Path, typer.Option("--json", help="Where the results go.")],
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Where the picture goes, as PNG, SVG or PDF.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="A small model and two rounds: shows that it runs.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in each of which every policy runs.")] = 5,
    steps_per_round: Annotated[int, typer.Option(min=1, help="Measured steps of a policy per round.")] = 2,
) -> None:
    """Predict and measure twelve policies, print a table, write JSON."""
    torch.set_num_threads(1)  # the launching thread; attention and the copies have threads of their own
    torch.set_grad_enabled(False)
    workload = replace(FULL, num_seqs=384)
    if quick:
        workload = replace(FULL, model=replace(FULL.model, intermediate=128), num_seqs=64)
        rounds, steps_per_round = min(rounds, 2), 1
    console = Console(width=max(Console().width, 110))
    result = run(workload, rounds, steps_per_round, console)
    show(result, console)
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(result, indent=2) + "\n")
    if plot_file is not None:
        plot(result, plot_file)


if __name__ == "__main__":
    typer.run(main)
