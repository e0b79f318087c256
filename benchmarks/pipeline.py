#!/usr/bin/env python
"""Compares the five schedules on the emulated device: one process, interleaved rounds, the link paced to the compute.

Step times, what each resource was busy with, and what the simulator predicts from the measured tasks. The device is
emulated: the figures say how well the engine overlaps, not how fast a GPU would be.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.decoder_engine import DecoderEngine, Sequences, make_caches
from benchmarks.machine import commit
from benchmarks.round_figures import ratios, spread
from benchmarks.torch_decoder import DecoderConfig, MoeDecoder
from vllm_moe_lightning.config import MoeLightningConfig
from vllm_moe_lightning.device import EmulatedDevice
from vllm_moe_lightning.host_limits import cpu_name
from vllm_moe_lightning.pipeline.counters import PipelineCounters
from vllm_moe_lightning.pipeline.gantt import plot_gantt, simulated_spans
from vllm_moe_lightning.pipeline.simulator import SimulatedSweep, simulate
from vllm_moe_lightning.pipeline.tasks import Task
from vllm_moe_lightning.pipeline.trace import TraceSpan
from vllm_moe_lightning.resources import RESOURCE_OF, Resource

SCHEDULES = ("cgopipe", "serial", "s2", "s3", "s4")
STREAM_OF = {Resource.GPU: "compute", Resource.D2H: "d2h", Resource.CPU: "cpu", Resource.H2D: "h2d"}
NUM_MICRO_BATCHES = 4
RECORDS_KEPT = 50_000
# A little above, so that the link is the busiest resource. It also carries hidden states and, under S4, context.
TRANSFER_OVER_COMPUTE = 1.05


@dataclass(frozen=True)
class Workload:
    """num_seqs sequences with context_len tokens each decode one token per step."""

    model: DecoderConfig
    num_seqs: int
    context_len: int
    block_size: int = 16


FULL = Workload(
    DecoderConfig(
        num_layers=8,
        hidden=512,
        intermediate=1152,
        num_experts=8,
        top_k=2,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=1024,
        dtype=torch.bfloat16,
    ),
    num_seqs=768,
    context_len=256,
)


@dataclass(frozen=True)
class Cpus:
    """One CPU for the launching thread, which is the compute stream; the streams' threads share the others. A stream
    that wakes up on the launching thread's CPU would take it away in the middle of a task."""

    compute: tuple[int, ...]
    others: tuple[int, ...]

    @classmethod
    def split(cls) -> Cpus:
        usable = tuple(sorted(os.sched_getaffinity(0)))
        return cls(usable[:1], usable[1:]) if len(usable) > 1 else cls(usable, usable)


@dataclass
class Rounds:
    """What one schedule was measured at; one entry per round."""

    step_s: list[float] = field(default_factory=list)
    busy_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    wait_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    task_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    last_step: list[TraceSpan] = field(default_factory=list)
    """What the streams did in the last step of all, from its own begin on."""

    def over_busiest(self) -> list[float]:
        """Step time over the busiest resource's, of each round."""
        return [step / max(values[index] for values in self.busy_s.values()) for index, step in enumerate(self.step_s)]

    def row(self, predicted_s: float) -> dict[str, Any]:
        step_s = statistics.median(self.step_s)
        busy_s = {name: statistics.median(values) for name, values in self.busy_s.items()}
        return {
            "step_s": step_s,
            "step_s_spread": [min(self.step_s), max(self.step_s)],
            "step_s_rounds": self.step_s,
            "busy_s": busy_s,
            "utilisation": {name: value / step_s for name, value in busy_s.items()},
            "busiest_resource": max(busy_s, key=lambda name: busy_s[name]),
            "step_over_busiest_resource": statistics.median(self.over_busiest()),
            "wait_s": {name: statistics.median(values) for name, values in self.wait_s.items()},
            "predicted_step_s": predicted_s,
            "achieved_over_predicted": step_s / predicted_s,
            "spans": [
                [str(span.resource), span.label, round(span.start_s, 6), round(span.end_s, 6)]
                for span in self.last_step
            ],
        }


class Bench:
    """One model, its context and one step, under a new engine as often as the link's speed changes."""

    def __init__(self, workload: Workload, cpus: Cpus) -> None:
        self.workload, self.cpus = workload, cpus
        self.model = MoeDecoder(workload.model)
        self._loaded = [(p, p.data) for layer in self.model.expert_layers() for p in layer.parameters.values()]
        sequences = Sequences(workload.num_seqs, workload.context_len, workload.block_size)
        self.caches = make_caches(workload.model, sequences.num_blocks, workload.block_size)
        rng = torch.Generator().manual_seed(0)
        for cache in self.caches:  # context worth attending to, without the prefill
            cache.blocks.copy_(torch.randn(cache.blocks[0].shape, generator=rng))
        sequences.lens = [workload.context_len - 1] * workload.num_seqs
        token_ids = torch.randint(0, workload.model.vocab_size, (workload.num_seqs,), generator=rng)
        # Taken again and again: each step then costs the same.
        self.step = sequences.step([1] * workload.num_seqs, token_ids)

    def engine(self, link_bytes_per_s: float | None) -> DecoderEngine:
        for parameter, loaded in self._loaded:
            parameter.data = loaded
        device = EmulatedDevice(
            h2d_bytes_per_s=link_bytes_per_s, d2h_bytes_per_s=link_bytes_per_s, cpus=self.cpus.others
        )
        device.set_recording(RECORDS_KEPT)
        options = MoeLightningConfig(num_micro_batches=NUM_MICRO_BATCHES, attention_threads=1)
        return DecoderEngine(self.model, device, options, max_tokens=self.workload.num_seqs, caches=self.caches)

    def take_steps(self, engine: DecoderEngine, schedule: str, num_steps: int, rounds: Rounds) -> None:
        """Add one round: `num_steps` steps back to back, after one that fills the pipeline the schedule's way."""
        executor, device = engine.executor, engine.device
        executor.policy = replace(executor.policy, schedule=schedule)
        engine.step(self.step)
        device.synchronize()
        device.drain_records()
        executor.counters = PipelineCounters()
        before, started_s = device.totals(), time.monotonic()
        for _ in range(num_steps):
            last_began_s = time.monotonic()
            engine.step(self.step)
        elapsed_s = time.monotonic() - started_s
        device.synchronize()
        after = device.totals()
        rounds.step_s.append(elapsed_s / num_steps)
        for name in before:
            rounds.busy_s[name].append((after[name].busy_s - before[name].busy_s) / num_steps)
        for name, wait_s in executor.counters.wait_s.items():
            rounds.wait_s[name].append(wait_s / num_steps)
        records = device.drain_records()
        for record in records:
            rounds.task_s[record.label].append(record.end_s - record.start_s)
        rounds.last_step = [
            TraceSpan(RESOURCE_OF[r.stream], r.label, r.start_s - last_began_s, r.end_s - last_began_s)
            for r in records
            if r.start_s >= last_began_s
        ]

    def calibrated_bytes_per_s(self, num_steps: int) -> float:
        """The link speed at which a step's pages take as long as its compute does now."""
        with self.engine(None) as engine:
            rounds = Rounds()
            self.take_steps(engine, "cgopipe", num_steps, rounds)
            return engine.store.sweep_bytes() / (rounds.busy_s["compute"][0] * TRANSFER_OVER_COMPUTE)


def predict(engine: DecoderEngine, schedule: str, rounds: Rounds) -> SimulatedSweep:
    """The simulator's step, from the median measured duration of each task."""
    durations = {label: statistics.median(values) for label, values in rounds.task_s.items()}
    engine.executor.policy = replace(engine.executor.policy, schedule=schedule)
    plan = engine.executor.schedule_for(NUM_MICRO_BATCHES)

    def duration_s(task: Task) -> float:
        return durations.get(str(task.key), 0.0)

    return simulate(plan, duration_s, num_sweeps=2)


def machine(cpus: Cpus) -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "num_cpus": len({*cpus.compute, *cpus.others}),
        "cpus_of_compute": cpus.compute,
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "commit": commit(),
    }


def run(
    workload: Workload, num_rounds: int, steps_per_round: int, console: Console
) -> tuple[dict[str, Any], dict[str, SimulatedSweep]]:
    """The results as JSON values, and the last simulated step of each schedule."""
    bench = Bench(workload, Cpus.split())
    os.sched_setaffinity(0, bench.cpus.compute)
    measured = {schedule: Rounds() for schedule in SCHEDULES}
    links_bytes_per_s = []
    for index in track(range(num_rounds), "rounds", console=console, transient=True):
        # Anew for each round, since the load that others put on the machine changes.
        links_bytes_per_s.append(bench.calibrated_bytes_per_s(steps_per_round))
        with bench.engine(links_bytes_per_s[-1]) as engine:
            for position in range(len(SCHEDULES)):  # another one first in each round
                schedule = SCHEDULES[(index + position) % len(SCHEDULES)]
                bench.take_steps(engine, schedule, steps_per_round, measured[schedule])
            simulated = {schedule: predict(engine, schedule, measured[schedule]) for schedule in SCHEDULES}
            experts_mb = engine.store.host_bytes / 1e6
    rows = {schedule: measured[schedule].row(simulated[schedule].duration_s) for schedule in SCHEDULES}

    # Each round holds both at one link speed and close in time.
    over_cgopipe = {name: ratios(measured[name].step_s, measured["cgopipe"].step_s) for name in SCHEDULES[1:]}
    cgopipe, model = rows["cgopipe"], workload.model
    result = {
        "summary": {
            "device": "emulated",
            "cgopipe_over_busiest_resource": cgopipe["step_over_busiest_resource"],
            **{f"{schedule}_over_cgopipe": over["median"] for schedule, over in over_cgopipe.items()},
            "spreads": {
                "cgopipe_over_busiest_resource": spread(measured["cgopipe"].over_busiest())["spread"],
                **{f"{schedule}_over_cgopipe": over["spread"] for schedule, over in over_cgopipe.items()},
            },
            "cgopipe_step_s": cgopipe["step_s"],
            "cgopipe_busiest_resource": cgopipe["busiest_resource"],
            "cgopipe_percent_of_bound": 100 / cgopipe["step_over_busiest_resource"],
            "transfer_over_compute": cgopipe["busy_s"]["h2d"] / cgopipe["busy_s"]["compute"],
            "experts_mb": experts_mb,
            "tokens_per_s": workload.num_seqs / cgopipe["step_s"],
            "num_rounds": num_rounds,
            "steps_per_round": steps_per_round,
            **machine(bench.cpus),
        },
        "workload": {
            "num_seqs": workload.num_seqs,
            "context_len": workload.context_len,
            "num_micro_batches": NUM_MICRO_BATCHES,
            "link_bytes_per_s": links_bytes_per_s,
            "num_layers": model.num_layers,
            "hidden": model.hidden,
            "intermediate": model.intermediate,
            "num_experts": model.num_experts,
            "top_k": model.top_k,
            "heads": [model.num_heads, model.num_kv_heads, model.head_dim],
            "dtype": str(model.dtype),
        },
        "rows": [{"schedule": schedule, "device": "emulated", **row} for schedule, row in rows.items()],
    }
    return result, simulated


def show(result: dict[str, Any], console: Console) -> None:
    summary, workload = result["summary"], result["workload"]
    speeds = [speed / 1e6 for speed in workload["link_bytes_per_s"]]
    console.print(
        f"emulated device: {summary['experts_mb']:.0f} MB of experts, {workload['num_seqs']} sequences at context "
        f"{workload['context_len']} decode one token, {workload['num_micro_batches']} micro-batches, link paced to "
        f"{min(speeds):.0f}..{max(speeds):.0f} MB/s (transfer / compute {summary['transfer_over_compute']:.2f})"
    )
    table = Table(title=f"Schedules on the emulated device, median of {summary['num_rounds']} rounds (times in ms)")
    for column in (
        "schedule",
        "step",
        "min..max",
        "compute",
        "cpu",
        "h2d",
        "d2h",
        "waits",
        "step/busiest",
        "predicted",
    ):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for row in result["rows"]:
        low, high = row["step_s_spread"]
        table.add_row(
            row["schedule"],
            f"{row['step_s'] * 1e3:.0f}",
            f"{low * 1e3:.0f}..{high * 1e3:.0f}",
            *(f"{row['busy_s'][name] * 1e3:.0f}" for name in ("compute", "cpu", "h2d", "d2h")),
            f"{sum(row['wait_s'].values()) * 1e3:.0f}",
            f"{row['step_over_busiest_resource']:.2f}",
            f"{row['predicted_step_s'] * 1e3:.0f}",
        )
    console.print(table)
    ratios = ", ".join(f"{name} {summary[f'{name}_over_cgopipe']:.2f}x" for name in SCHEDULES[1:])
    console.print(
        f"emulated: CGOPipe takes {summary['cgopipe_over_busiest_resource']:.2f} x its busiest resource "
        f"({summary['cgopipe_busiest_resource']}); the others' step time over CGOPipe's: {ratios}"
    )
    console.print(
        f"{summary['cpu']}, {summary['num_cpus']} CPUs, load {summary['load_average']:.1f}, torch {summary['torch']} "
        f"with {summary['torch_threads']} thread(s), commit {summary['commit']}. Not measured: a GPU, a real link."
    )


def main(
    json_file: Annotated[Path, typer.Option("--json", help="Where the results go.")],
    plot: Annotated[Path | None, typer.Option(help="Gantt chart of a step of each schedule (png, svg, pdf).")] = None,
    quick: Annotated[bool, typer.Option(help="A small model and few rounds: shows that it runs.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in each of which every schedule runs.")] = 5,
    steps_per_round: Annotated[int, typer.Option(min=1, help="Measured steps of a schedule per round.")] = 2,
) -> None:
    """Measure all schedules, print a table, write JSON."""
    torch.set_num_threads(1)  # the launching thread; attention and the copies have threads of their own
    torch.set_grad_enabled(False)
    workload = FULL
    if quick:
        workload = replace(FULL, model=replace(FULL.model, num_layers=3, intermediate=256), num_seqs=64)
        rounds, steps_per_round = min(rounds, 2), 1
    console = Console(width=max(Console().width, 110))
    result, simulated = run(workload, rounds, steps_per_round, console)
    show(result, console)
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(result, indent=2) + "\n")
    if plot is not None:
        titles = {name: f"{name}: {sweep.duration_s * 1e3:.0f} ms (simulated)" for name, sweep in simulated.items()}
        panels = ((titles[name], simulated_spans(simulated[name])) for name in ("cgopipe", "s2", "s3", "serial"))
        plot_gantt(panels, plot)


if __name__ == "__main__":
    typer.run(main)
