#!/usr/bin/env python
"""Throughput against host memory, for CGOPipe and for FlexGen's order S4: modelled for GPUs, measured on the emulated
device.

Tests the paper's claim that its upper bound is reached with 2 to 3 times less CPU memory, which the paper does not
measure. The measured part varies the KV budget, hence the batch, of the plain-torch decoder; decode only.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.decoder_engine import Sequences, Step
from benchmarks.host_memory_model import MODEL, modelled
from benchmarks.machine import describe
from benchmarks.pipeline import FULL, Bench, Cpus, Rounds, Workload
from benchmarks.workloads import MTBENCH, PaperWorkload
from vllm_moe_lightning import workload as planned

SCHEDULES = ("cgopipe", "s4")
GPUS = ("t4", "l4")
GEN_LEN = 128
BATCHES = (24, 48, 96, 192, 384, 768)
QUICK_BATCHES = (12, 48, 96)
BALANCED_AT = 2
"""Index from the end: the batch whose computing takes as long as the link's pages. Below it the link bounds."""
HOSTS_GIB = (96, 104, 112, 120, 128, 144, 160, 192, 224, 256, 320, 384, 512, 768, 1024, 1536, 2048)
QUICK_HOSTS_GIB = (112, 192, 384, 1024)
REACHED = 0.9


def paper_workload(gen_len: int = GEN_LEN) -> planned.Workload:
    work: PaperWorkload = next(each for each in MTBENCH if each.gen_len == gen_len)
    return planned.Workload(prompt_len=work.prompt_mean, gen_len=work.gen_len, prompt_len_max=work.prompt_max)


def step_of(workload: Workload, batch: int) -> Step:
    """The first `batch` sequences decode a token, over the caches of all."""
    sequences = Sequences(workload.num_seqs, workload.context_len, workload.block_size)
    sequences.lens = [workload.context_len - 1] * workload.num_seqs
    token_ids = torch.randint(0, workload.model.vocab_size, (batch,), generator=torch.Generator().manual_seed(0))
    return sequences.step([1] * batch + [0] * (workload.num_seqs - batch), token_ids)


def kv_bytes_per_seq(workload: Workload) -> int:
    model = workload.model
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * model.dtype.itemsize
    return per_token * workload.context_len


def measure(
    workload: Workload, batches: Sequence[int], num_rounds: int, steps_per_round: int, console: Console
) -> dict[str, Any]:
    bench = Bench(workload, Cpus.split())
    os.sched_setaffinity(0, bench.cpus.compute)
    steps = {batch: step_of(workload, batch) for batch in batches}
    points = [(schedule, batch) for batch in batches for schedule in SCHEDULES]
    measured = {point: Rounds() for point in points}
    bench.step = steps[batches[-BALANCED_AT]]
    link_bytes_per_s = bench.calibrated_bytes_per_s(steps_per_round)
    with bench.engine(link_bytes_per_s) as engine:
        for index in track(range(num_rounds), "rounds", console=console, transient=True):
            for position in range(len(points)):  # another one first in each round
                schedule, batch = points[(index + position) % len(points)]
                bench.step = steps[batch]
                bench.take_steps(engine, schedule, steps_per_round, measured[schedule, batch])
        expert_bytes = engine.store.host_bytes
    rows = []
    for (schedule, batch), rounds in measured.items():
        kv = batch * kv_bytes_per_seq(workload)
        busy_s = {name: statistics.median(values) for name, values in rounds.busy_s.items()}
        step_s = statistics.median(rounds.step_s)
        rows.append(
            {
                "schedule": schedule,
                "device": "emulated",
                "batch_size": batch,
                "kv_bytes": kv,
                "host_bytes": kv + expert_bytes,
                "step_s": step_s,
                "tokens_per_s": batch / step_s,
                "tokens_per_s_spread": [batch / max(rounds.step_s), batch / min(rounds.step_s)],
                "busy_s": busy_s,
                "busiest_resource": max(busy_s, key=lambda name: busy_s[name]),
                # Eq. 12 with the measured times: as if all resources overlapped.
                "bound_tokens_per_s": batch / max(busy_s.values()),
            }
        )
    return {
        "rows": rows,
        "expert_bytes": expert_bytes,
        "context_len": workload.context_len,
        "link_bytes_per_s": link_bytes_per_s,
        "num_rounds": num_rounds,
    }


def host_bytes_for(rows: Sequence[Mapping[str, Any]], wanted: float) -> float | None:
    """Least host memory for so many tokens/s, in a straight line between the points; None: never reached."""
    ordered = sorted(rows, key=lambda row: row["host_bytes"])
    for before, after in zip([None, *ordered], ordered, strict=False):
        if after["tokens_per_s"] >= wanted:
            if before is None:
                return float(after["host_bytes"])
            part = (wanted - before["tokens_per_s"]) / (after["tokens_per_s"] - before["tokens_per_s"])
            return float(before["host_bytes"] + part * (after["host_bytes"] - before["host_bytes"]))
    return None


def _ratio(num_bytes: Mapping[str, float | None]) -> float | None:
    top, bottom = num_bytes["s4"], num_bytes["cgopipe"]
    return top / bottom if top and bottom else None


def summary_of(model: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    of = {name: [row for row in measured["rows"] if row["schedule"] == name] for name in SCHEDULES}
    best = {name: max(row["tokens_per_s"] for row in rows) for name, rows in of.items()}
    level = REACHED * min(best.values())
    bytes_at_level = {name: host_bytes_for(rows, level) for name, rows in of.items()}
    kv_at_level = {name: n and n - measured["expert_bytes"] for name, n in bytes_at_level.items()}
    return {
        "modelled": {
            gpu: {
                f"{entry['share']:g}": {key: value for key, value in entry.items() if key.startswith("s4_over")}
                for entry in curves["shares"]
            }
            for gpu, curves in model.items()
        },
        "measured_best_tokens_per_s": best,
        "measured_best_cgopipe_over_s4": best["cgopipe"] / best["s4"],
        "measured_same_tokens_per_s": level,
        "measured_host_bytes_at_same_tokens_per_s": bytes_at_level,
        "measured_s4_over_cgopipe_at_same_tokens_per_s": _ratio(bytes_at_level),
        "measured_s4_over_cgopipe_of_kv_at_same_tokens_per_s": _ratio(kv_at_level),
    }


def show(result: Mapping[str, Any], console: Console) -> None:
    for gpu, curves in result["modelled"].items():
        table = Table(
            title=f"Modelled, not run: {MODEL} on {gpu}, prompt {curves['prompt_len']:g}, {GEN_LEN} generated"
        )
        for column in ("host GiB", *(f"{name}: tokens/s, bound by" for name in SCHEDULES)):
            table.add_column(column, justify="right")
        for index, point in enumerate(curves["points"]["cgopipe"]):
            table.add_row(f"{point['host_gib']:g}", *(_cell(curves["points"][name][index]) for name in SCHEDULES))
        table.add_row("no limit", *(f"{curves['bound_tokens_per_s'][name]:.0f}" for name in SCHEDULES))
        console.print(table)
        for entry in curves["shares"]:
            console.print(json.dumps(entry), markup=False, highlight=False)
    table = Table(title="Measured on the emulated device, decode only; medians of the rounds")
    for column in ("schedule", "batch", "KV MB", "host MB", "tokens/s", "min..max", "bound", "busiest"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for row in sorted(result["measured"]["rows"], key=lambda row: (row["schedule"], row["batch_size"])):
        low, high = row["tokens_per_s_spread"]
        table.add_row(
            row["schedule"],
            str(row["batch_size"]),
            f"{row['kv_bytes'] / 1e6:.0f}",
            f"{row['host_bytes'] / 1e6:.0f}",
            f"{row['tokens_per_s']:.0f}",
            f"{low:.0f}..{high:.0f}",
            f"{row['bound_tokens_per_s']:.0f}",
            row["busiest_resource"],
        )
    console.print(table)
    console.print(json.dumps(result["summary"]), markup=False, highlight=False)
    head = result["machine"]
    console.print(
        f"{head['cpu']}, {head['num_cpus']} CPUs, load {head['load_average']:.1f}, commit {head['commit']}. S4's "
        f"attention runs on the emulated device's one core. Not measured: a GPU, a real link, prefill."
    )


def _cell(point: Mapping[str, Any]) -> str:
    return "-" if point["tokens_per_s"] is None else f"{point['tokens_per_s']:.1f}, {point['bottleneck']}"


def main(
    json_file: Annotated[Path, typer.Option("--json", help="Where the results go.")],
    quick: Annotated[bool, typer.Option(help="Few points and a small model: shows that it runs.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in each of which every point is measured.")] = 3,
    steps_per_round: Annotated[int, typer.Option(min=1, help="Measured steps of a point per round.")] = 2,
) -> None:
    """Model two GPUs, measure the emulated device, print tables, write JSON."""
    torch.set_num_threads(1)  # the launching thread; attention and the copies have threads of their own
    torch.set_grad_enabled(False)
    console = Console(width=max(Console().width, 110))
    head, work = describe(), paper_workload()
    hosts = [float(host) for host in (QUICK_HOSTS_GIB if quick else HOSTS_GIB)]
    model = {gpu: modelled(gpu, work, hosts) for gpu in GPUS[: 1 if quick else None]}
    workload, batches = FULL, QUICK_BATCHES if quick else BATCHES
    if quick:
        workload = replace(FULL, model=replace(FULL.model, num_layers=3, intermediate=256))
    measured = measure(replace(workload, num_seqs=max(batches)), batches, rounds, steps_per_round, console)
    result = {
        "device": "emulated",
        "summary": summary_of(model, measured),
        "machine": head,
        "modelled": model,
        "measured": measured,
    }
    show(result, console)
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
