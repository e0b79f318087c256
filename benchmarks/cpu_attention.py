#!/usr/bin/env python
"""Decode attention on the CPU against the speed of reading the same memory."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.attention_arms import Arm, Batch, anchor_arms, our_arm
from benchmarks.attention_shapes import Shape
from vllm_moe_lightning.kernels.attention import available_isas

SHAPES = [Shape(64, context_len, block_size) for context_len in (512, 2048) for block_size in (32, 128)]


def measure(arms: dict[str, Arm], num_rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of this thread's CPU time and of the clock, per arm, a round with every arm after another first."""
    names = list(arms)
    cpu_s: dict[str, list[float]] = {name: [] for name in names}
    wall_s: dict[str, list[float]] = {name: [] for name in names}
    for index in range(-1, num_rounds):  # round -1 warms up
        for position in range(len(names)):
            name = names[(index + position) % len(names)]
            started_s, started_cpu_s = time.perf_counter(), time.thread_time()
            arms[name]()
            ended_cpu_s, ended_s = time.thread_time(), time.perf_counter()
            if index >= 0:
                cpu_s[name].append(ended_cpu_s - started_cpu_s)
                wall_s[name].append(ended_s - started_s)
    return cpu_s, wall_s


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    context: Annotated[int, typer.Option(help="Only this context length.")] = 0,
    block: Annotated[int, typer.Option(help="Only this block size.")] = 0,
) -> None:
    torch.set_num_threads(1)
    console = Console(width=max(Console().width, 120))
    table = Table(title="one thread, GB/s of KV per CPU second: median (min..max)")
    for column in ("B x ctx, block", "arm", "GB/s", "min..max", "wall GB/s", "/ A"):
        table.add_column(column)
    for shape in SHAPES:
        if context not in (0, shape.context_len) or block not in (0, shape.block_size):
            continue
        batch = Batch(shape)
        anchors = anchor_arms(batch, None)
        ours = {isa: our_arm(batch, isa, None) for isa in available_isas() if isa != "scalar"}
        cpu_s, wall_s = measure({**anchors, **ours}, rounds)
        best = min(anchors, key=lambda name: statistics.median(cpu_s[name]))
        for name, seconds in cpu_s.items():
            rates = [shape.pass_bytes / each / 1e9 for each in seconds]
            over_anchor = [anchor / each for anchor, each in zip(cpu_s[best], seconds, strict=True)]
            table.add_row(
                f"{shape.num_seqs} x {shape.context_len}, {shape.block_size}",
                name,
                f"{statistics.median(rates):.1f}",
                f"{min(rates):.1f}..{max(rates):.1f}",
                f"{shape.pass_bytes / statistics.median(wall_s[name]) / 1e9:.1f}",
                f"{statistics.median(over_anchor):.2f}",
            )
        table.add_section()
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
