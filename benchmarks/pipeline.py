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
import subprocess
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
from rich.table import Table

from benchmarks.decoder_engine import DecoderEngine, Sequences, Step
from benchmarks.torch_decoder import DecoderConfig, MoeDecoder
from vllm_moe_lightning.config import MoeLightningConfig
from vllm_moe_lightning.device import EmulatedDevice
from vllm_moe_lightning.pipeline.counters import PipelineCounters
from vllm_moe_lightning.pipeline.simulator import simulate
from vllm_moe_lightning.pipeline.tasks import Resource, Task

SCHEDULES = ("cgopipe", "serial", "s2", "s3", "s4")
STREAM_OF = {Resource.GPU: "compute", Resource.D2H: "d2h", Resource.CPU: "cpu", Resource.H2D: "h2d"}
NUM_MICRO_BATCHES = 4
RECORDS_KEPT = 50_000
CALIBRATION_SWEEPS = 3
# The link also carries hidden states (and, under S4, context), so it ends up a little above the compute time.
TRANSFER_OVER_COMPUTE = 1.0


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
    num_seqs=512,
    context_len=512,
)


@dataclass
class Rounds:
    """What one schedule was measured at; one entry per round."""

    step_s: list[float] = field(default_factory=list)
    busy_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    wait_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    task_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def row(self, predicted_s: float) -> dict[str, Any]:
        step_s = statistics.median(self.step_s)
        busy_s = {name: statistics.median(values) for name, values in self.busy_s.items()}
        over_busiest = statistics.median(
            step / max(values[index] for values in self.busy_s.values()) for index, step in enumerate(self.step_s)
        )
        return {
            "step_s": step_s,
            "step_s_spread": [min(self.step_s), max(self.step_s)],
            "step_s_rounds": self.step_s,
            "busy_s": busy_s,
            "utilisation": {name: value / step_s for name, value in busy_s.items()},
            "busiest_resource": max(busy_s, key=lambda name: busy_s[name]),
            "step_over_busiest_resource": over_busiest,
            "wait_s": {name: statistics.median(values) for name, values in self.wait_s.items()},
            "predicted_step_s": predicted_s,
            "achieved_over_predicted": step_s / predicted_s,
        }


def decode_step(workload: Workload) -> Step:
    """A step that all sequences take with their context in place. Taken again and again, it costs the same."""
    sequences = Sequences(workload.num_seqs, workload.context_len, workload.block_size)
    sequences.lens = [workload.context_len - 1] * workload.num_seqs
    rng = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, workload.model.vocab_size, (workload.num_seqs,), generator=rng)
    return sequences.step([1] * workload.num_seqs, token_ids)


def make_engine(workload: Workload, h2d_bytes_per_s: float | None) -> DecoderEngine:
    device = EmulatedDevice(h2d_bytes_per_s=h2d_bytes_per_s, d2h_bytes_per_s=h2d_bytes_per_s)
    options = MoeLightningConfig(num_micro_batches=NUM_MICRO_BATCHES, attention_threads=1)
    num_blocks = workload.num_seqs * -(-workload.context_len // workload.block_size)
    engine = DecoderEngine(
        MoeDecoder(workload.model), device, options, num_blocks=num_blocks, max_tokens=workload.num_seqs
    )
    for layer, cache in enumerate(engine.caches):  # context worth attending to, without a prefill of hours
        cache.blocks.copy_(torch.randn(cache.blocks[0].shape, generator=torch.Generator().manual_seed(layer)))
    device.set_recording(RECORDS_KEPT)
    return engine


def take_steps(engine: DecoderEngine, step: Step, schedule: str, num_steps: int, rounds: Rounds) -> None:
    """Add one round: `num_steps` steps back to back, after one that fills the pipeline the schedule's way."""
    executor, device = engine.executor, engine.device
    executor.policy = replace(executor.policy, schedule=schedule)
    engine.step(step)
    device.synchronize()
    device.drain_records()
    executor.counters = PipelineCounters()
    before, started_s = device.totals(), time.monotonic()
    for _ in range(num_steps):
        engine.step(step)
    elapsed_s = time.monotonic() - started_s
    device.synchronize()
    after = device.totals()
    rounds.step_s.append(elapsed_s / num_steps)
    for name in before:
        rounds.busy_s[name].append((after[name].busy_s - before[name].busy_s) / num_steps)
    for name, wait_s in executor.counters.wait_s.items():
        rounds.wait_s[name].append(wait_s / num_steps)
    for record in device.drain_records():
        rounds.task_s[record.label].append(record.end_s - record.start_s)


def calibrated_bandwidth(workload: Workload, step: Step) -> float:
    """Bytes per second at which a sweep's pages take as long as its compute."""
    with make_engine(workload, None) as engine:
        rounds = Rounds()
        take_steps(engine, step, "cgopipe", CALIBRATION_SWEEPS, rounds)
        return engine.store.sweep_bytes() / (rounds.busy_s["compute"][0] * TRANSFER_OVER_COMPUTE)


def predict(engine: DecoderEngine, schedule: str, rounds: Rounds) -> float:
    """The simulator's step time, from the median measured duration of each task."""
    durations = {label: statistics.median(values) for label, values in rounds.task_s.items()}
    engine.executor.policy = replace(engine.executor.policy, schedule=schedule)
    plan = engine.executor.schedule_for(NUM_MICRO_BATCHES)

    def duration_s(task: Task) -> float:
        return durations.get(str(task.key), 0.0)

    return simulate(plan, duration_s, num_sweeps=2).duration_s


def machine() -> dict[str, Any]:
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    root = Path(__file__).resolve().parents[1]
    git = ["git", "-C", str(root)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True).stdout.strip()
    return {
        "cpu": cpu,
        "num_cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "commit": commit + ("+changes" if changed else ""),
    }


def run(workload: Workload, num_rounds: int, steps_per_round: int, console: Console) -> dict[str, Any]:
    step = decode_step(workload)
    h2d_bytes_per_s = calibrated_bandwidth(workload, step)
    with make_engine(workload, h2d_bytes_per_s) as engine:
        console.print(
            f"emulated device: {engine.store.host_bytes / 1e6:.0f} MB of experts, {workload.num_seqs} sequences at "
            f"context {workload.context_len}, {NUM_MICRO_BATCHES} micro-batches, link {h2d_bytes_per_s / 1e6:.0f} MB/s"
        )
        measured = {schedule: Rounds() for schedule in SCHEDULES}
        for index in range(num_rounds):
            for position in range(len(SCHEDULES)):  # another one first in each round
                schedule = SCHEDULES[(index + position) % len(SCHEDULES)]
                take_steps(engine, step, schedule, steps_per_round, measured[schedule])
        rows = {schedule: measured[schedule].row(predict(engine, schedule, measured[schedule])) for schedule in SCHEDULES}
        experts_mb = engine.store.host_bytes / 1e6

    def over_cgopipe(schedule: str) -> float:
        """Median over the rounds, each of which holds both under the same load."""
        pairs = zip(measured[schedule].step_s, measured["cgopipe"].step_s, strict=True)
        return statistics.median(other / ours for other, ours in pairs)

    cgopipe = rows["cgopipe"]
    model = workload.model
    return {
        "summary": {
            "device": "emulated",
            "cgopipe_over_busiest_resource": cgopipe["step_over_busiest_resource"],
            **{f"{schedule}_over_cgopipe": over_cgopipe(schedule) for schedule in SCHEDULES[1:]},
            "cgopipe_step_s": cgopipe["step_s"],
            "cgopipe_busiest_resource": cgopipe["busiest_resource"],
            "cgopipe_percent_of_bound": 100 / cgopipe["step_over_busiest_resource"],
            "transfer_over_compute": cgopipe["busy_s"]["h2d"] / cgopipe["busy_s"]["compute"],
            "experts_mb": experts_mb,
            "tokens_per_s": workload.num_seqs / cgopipe["step_s"],
            "num_rounds": num_rounds,
            "steps_per_round": steps_per_round,
            **machine(),
        },
        "workload": {
            "num_seqs": workload.num_seqs,
            "context_len": workload.context_len,
            "num_micro_batches": NUM_MICRO_BATCHES,
            "h2d_bytes_per_s": h2d_bytes_per_s,
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


def show(result: dict[str, Any], console: Console) -> None:
    summary = result["summary"]
    table = Table(title=f"Schedules on the emulated device, median of {summary['num_rounds']} rounds (times in ms)")
    for column in ("schedule", "step", "min..max", "compute", "cpu", "h2d", "d2h", "waits", "step/busiest", "predicted"):
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
    quick: Annotated[bool, typer.Option(help="A small model and few rounds: shows that it runs.")] = False,
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    steps_per_round: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Measure all schedules, print a table, write JSON."""
    torch.set_num_threads(1)  # the launching thread; attention and the copies have threads of their own
    torch.set_grad_enabled(False)
    workload = FULL
    if quick:
        workload = replace(FULL, model=replace(FULL.model, num_layers=3, intermediate=256), num_seqs=64)
        rounds, steps_per_round = min(rounds, 2), 1
    console = Console()
    result = run(workload, rounds, steps_per_round, console)
    show(result, console)
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
