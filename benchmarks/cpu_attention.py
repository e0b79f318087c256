#!/usr/bin/env python
"""Decode attention on the CPU against what bounds it and against others: one process, interleaved rounds.

The bound is the speed of reading the same buffer, the best of four patterns. The others are vLLM's CPU kernels on their
own cache layout and torch's attention on contiguous context. All are given the same keys and values and must agree.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import machine
from benchmarks.attention_arms import (
    OURS,
    QUANTISED_ROW_TOLERANCE,
    Arm,
    Batch,
    ContiguousContext,
    QuantisedContext,
    check_agreement,
    our_arms,
    read_passes,
)
from benchmarks.attention_plot import PLOTTED_GROUP, plot_rows
from benchmarks.attention_rounds import SETTLE_S, measure, one_core_stolen
from benchmarks.attention_rows import (
    BEST_VLLM,
    VLLM_OWN_DTYPE,
    best_vllm,
    fraction,
    make_row,
    others_share_allowed,
    over,
    summarise,
)
from benchmarks.attention_shapes import Setting, full_settings, quick_settings
from benchmarks.round_figures import Row, machine_line
from benchmarks.vllm_attention import VllmCaches
from vllm_moe_lightning.host_limits import total_memory_bytes, usable_cpus
from vllm_moe_lightning.host_probes import torch_threads
from vllm_moe_lightning.kernels.attention import AttentionPool

QUICK_ROUNDS = 3
GROUP_TITLES = {
    "memory": "Caches in memory (layers in turn)",
    "cache-warm": "The same job again and again: caches partly in the CPU's cache",
    "stolen core": "All threads, while another process computes on one of the cores",
    "one sequence": "One long sequence",
}

# Arms of one batch for the number of threads that torch has now.
OtherArms = Callable[[], dict[str, Arm]]


def vllm_arms(batch: Batch, has_quantised: bool) -> OtherArms:
    return VllmCaches(batch, has_quantised).arms


def run_setting(setting: Setting, num_rounds: int, others: Callable[[Batch, bool], OtherArms]) -> list[Row]:
    """A row for each number of threads."""
    with torch_threads(1):  # many small copies: threads would wait for each other's cores at each
        batch = Batch(setting.shape)
        other_arms = others(batch, setting.has_quantised)
        quantised = [QuantisedContext(batch, kind) for kind in QUANTISED_ROW_TOLERANCE if setting.has_quantised]
        context = None if setting.is_stolen else ContiguousContext(batch)
    rows = []
    for num_threads in setting.thread_counts:
        with torch_threads(num_threads), AttentionPool(num_threads) as threads:
            pool = threads if num_threads > 1 else None
            arms = our_arms(batch, pool) | other_arms()
            if context is not None:
                arms["sdpa"] = context.sdpa_arm()
            arms |= {f"ours {each.cache.kind}": each.arm(pool) for each in quantised}
            errors = check_agreement(batch, arms)
            rows.append(_measured_row(setting, num_threads, batch, pool, arms, errors, num_rounds))
    return rows


def _measured_row(
    setting: Setting,
    num_threads: int,
    batch: Batch,
    pool: AttentionPool | None,
    arms: Mapping[str, Arm],
    errors: Mapping[str, float],
    num_rounds: int,
) -> Row:
    def passes_of(arm: Arm) -> Callable[[], None]:
        return lambda: arm.run_pass(setting.shape.num_layers, setting.num_passes)

    passes = read_passes(batch, pool, setting.num_passes)
    passes |= {name: passes_of(arm) for name, arm in arms.items() if arm.run_layer is not None}
    settle_s = SETTLE_S if num_threads > 1 else 0.0
    has_run_up = setting.is_warm or (num_threads > 1 and not setting.is_stolen)
    with one_core_stolen() if setting.is_stolen else contextlib.nullcontext():
        rounds = measure(
            passes,
            num_rounds,
            settle_s=settle_s,
            has_run_up=has_run_up,
            most_others_share=others_share_allowed(setting, num_threads, usable_cpus()),
        )
    return make_row(setting, num_threads, rounds, arms, errors)


def run(settings: list[Setting], num_rounds: int, console: Console) -> dict[str, Any]:
    """The results as JSON values."""
    head = machine.describe()  # before our own load
    rows: list[Row] = []
    skipped = []
    for setting in track(settings, "shapes", console=console, transient=True):
        if setting.memory_bytes > total_memory_bytes() / 2:
            skipped.append(f"{setting.shape}: its caches would fill more than half of the memory")
        else:
            rows += run_setting(setting, setting.num_rounds(num_rounds), vllm_arms)
    return {"summary": summarise(rows), "machine": head, "rows": rows, "skipped": skipped}


def show(result: dict[str, Any], console: Console) -> None:
    for group, title in GROUP_TITLES.items():
        rows = [row for row in result["rows"] if row["group"] == group]
        if rows:
            console.print(_table(rows, f"{title}; medians of {_round_counts(rows)} rounds, min..max"))
    console.print(
        "GB/s of keys and values (fraction of the read bandwidth A); x: how many times as fast ours is; "
        "*: others took our CPUs, left out of the summary"
    )
    for line in result["skipped"]:
        console.print(f"skipped: {line}", highlight=False)
    for name, value in result["summary"].items():
        if name in result["summary"]["summary_null_reasons"] or isinstance(value, float):
            reason = result["summary"]["summary_null_reasons"].get(name, "")
            console.print(f"  {name:30} {'-' if value is None else f'{value:.2f}'}  {reason}", highlight=False)
    console.print(machine_line(result["machine"]))


def _round_counts(rows: list[Row]) -> str:
    return " or ".join(str(count) for count in sorted({len(row["arms"][OURS]["seconds_rounds"]) for row in rows}))


def _table(rows: list[Row], title: str) -> Table:
    found = {name for row in rows for name in row["arms"] if fraction(row, name) is not None}
    columns = [
        name
        for name in ("ours", "ours avx2", "ours int8", "ours fp8", BEST_VLLM, "vllm fp8", "sdpa")
        if name in found | {BEST_VLLM}
    ]
    table = Table(title=title)
    for column in ("batch, block", "thr.", "A", *columns):
        table.add_column(column, justify="left" if column == "batch, block" else "right")
    for row in rows:
        dtype = "" if row["dtype"] == "bfloat16" else f"\n{row['dtype']}"
        table.add_row(
            f"{row['num_seqs']} x {row['context_len']}, {row['block_size']}{dtype}",
            f"{row['num_threads']}{'*' if row['is_contended'] else ''}",
            f"{row['anchor_gb_per_s']:.1f}\n{row['anchor']}",
            *(_cell(row, best_vllm(row) if name == BEST_VLLM else name) for name in columns),
        )
    return table


def _cell(row: Row, name: str | None) -> str:
    entry = row["arms"].get(name)
    if entry is None or "null_reason" in entry:
        return "-"
    text = f"{entry['gb_per_s']['median']:.1f} ({fraction(row, name):.2f})"
    if name == OURS:
        low, high = entry["gb_per_s"]["spread"]
        return f"{text}\n{low:.1f}..{high:.1f}"
    low, high = entry["ours_is_faster_by"]["spread"]
    isa = f"{name.removeprefix('vllm ')} " if name in VLLM_OWN_DTYPE else ""
    return f"{isa}{text}\n{over(row, name):.2f}x {low:.2f}..{high:.2f}"


def main(
    json_file: Annotated[Path, typer.Option("--json", help="Where the results go.")],
    plot: Annotated[Path | None, typer.Option(help="Fractions of the read bandwidth (png, svg, pdf).")] = None,
    quick: Annotated[bool, typer.Option(help="Fewer shapes, less memory, 3 rounds: shows that it runs.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in each of which everything runs once.")] = 7,
    group: Annotated[str | None, typer.Option(help=f"One of these alone: {', '.join(GROUP_TITLES)}.")] = None,
) -> None:
    """Measure all shapes, print tables, write JSON."""
    if group not in (None, *GROUP_TITLES):
        raise typer.BadParameter(f"--group is one of {list(GROUP_TITLES)}, got {group!r}")
    if plot is not None and group not in (None, PLOTTED_GROUP):
        raise typer.BadParameter(f"--plot draws the group {PLOTTED_GROUP!r}, and --group {group!r} leaves it out")
    torch.set_grad_enabled(False)
    settings, num_rounds = (quick_settings(), min(rounds, QUICK_ROUNDS)) if quick else (full_settings(), rounds)
    settings = [setting for setting in settings if group in (None, setting.group)]
    console = Console(width=max(Console().width, 170))
    result = run(settings, num_rounds, console)
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(result, indent=2) + "\n")
    show(result, console)
    if plot is not None:
        plot_rows(result["rows"], plot)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported, for its kernels
    typer.run(main)
