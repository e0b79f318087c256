#!/usr/bin/env python
"""The expert FFN on the CPU against what bounds it and against vLLM's: one process, interleaved rounds.

The bounds are the speed of reading the same weights, the best of four patterns, and torch.mm's rate on them. vLLM's
fused experts have the same weights, packed as they want them. All are given the same tokens and must agree.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.attention_rounds import SETTLE_S, measure
from benchmarks.ffn_arms import (
    OURS,
    Arm,
    Batch,
    Layer,
    VllmWeights,
    check_agreement,
    our_arms,
    read_passes,
    torch_mm_arm,
    vllm_weights,
)
from benchmarks.ffn_rows import make_row, summarise
from benchmarks.ffn_shapes import HUGE_PAGES, Setting, full_settings, quick_settings
from benchmarks.round_figures import Row, machine_line, median_of, most_others_share
from vllm_moe_lightning.host_limits import total_memory_bytes, usable_cpus
from vllm_moe_lightning.host_probes import torch_threads
from vllm_moe_lightning.kernels.attention import AttentionPool

QUICK_ROUNDS = 3
# A round with many tokens takes seconds by itself.
MOST_GEMM_ROUNDS = 5
OTHER_ISA_TOKENS = 16


def run_setting(setting: Setting, num_rounds: int, console: Console) -> list[Row]:
    """A row for each number of tokens and of threads."""
    layer = Layer(setting)
    others = {} if setting.group == HUGE_PAGES else vllm_weights(layer)
    rows = []
    for num_threads in setting.thread_counts:
        with torch_threads(num_threads), AttentionPool(num_threads) as threads:
            pool = threads if num_threads > 1 else None
            for tokens in setting.tokens_per_expert:
                console.print(
                    f"{setting.group}, {setting.shape.name}, {num_threads} threads, {tokens} tokens per expert"
                )
                rows.append(_measured_row(setting, layer, others, tokens, num_threads, pool, num_rounds))
    return rows


def _measured_row(
    setting: Setting,
    layer: Layer,
    others: dict[str, VllmWeights | str],
    tokens_per_expert: int,
    num_threads: int,
    pool: AttentionPool | None,
    num_rounds: int,
) -> Row:
    batch = Batch(layer, tokens_per_expert)
    is_streamed = tokens_per_expert <= OTHER_ISA_TOKENS
    arms = our_arms(batch, pool, has_other_isas=is_streamed and setting.group != HUGE_PAGES)
    arms["torch.mm"] = torch_mm_arm(batch)
    arms |= {name: Arm(None, each) if isinstance(each, str) else each.arm(batch) for name, each in others.items()}
    errors = check_agreement(batch, arms)
    passes = read_passes(layer, pool) | {name: arm.run for name, arm in arms.items() if arm.run is not None}
    rounds = measure(
        passes,
        num_rounds if is_streamed else min(num_rounds, MOST_GEMM_ROUNDS),
        settle_s=SETTLE_S if num_threads > 1 else 0.0,
        most_others_share=most_others_share(num_threads, usable_cpus()),
    )
    return make_row(setting, tokens_per_expert, num_threads, usable_cpus(), rounds, arms, errors)


def run(settings: list[Setting], num_rounds: int, console: Console) -> dict[str, Any]:
    """The results as JSON values."""
    head = machine.describe() | {"num_rounds": num_rounds}  # before our own load
    rows: list[Row] = []
    skipped = []
    for setting in settings:
        if 2 * setting.shape.weight_bytes > total_memory_bytes() / 2:
            skipped.append(f"{setting.shape}: its weights, ours and vLLM's, would fill more than half of the memory")
        else:
            rows += run_setting(setting, num_rounds, console)
    return {"summary": summarise(rows), "machine": head, "rows": rows, "skipped": skipped}


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Rows of both, the new ones in the place of those of the same case."""

    def case(row: Row) -> tuple[Any, ...]:
        return row["group"], row["shape"], row["num_threads"], row["tokens_per_expert"]

    taken = {case(row) for row in new["rows"]}
    rows = sorted([row for row in old["rows"] if case(row) not in taken] + new["rows"], key=case)
    return new | {"rows": rows, "summary": summarise(rows)}


def show(result: dict[str, Any], console: Console) -> None:
    for group, shape in dict.fromkeys((row["group"], row["shape"]) for row in result["rows"]):
        rows = [row for row in result["rows"] if (row["group"], row["shape"]) == (group, shape)]
        console.print(_table(rows, f"{shape}, {group}; medians of {result['machine']['num_rounds']} rounds, min..max"))
    console.print(
        "GB/s of weights (fraction of the read bandwidth A), from 32 tokens on GFLOP/s (fraction of torch.mm); "
        "x: how many times as fast ours is; *: others took the CPUs, left out of the summary"
    )
    for line in result["skipped"]:
        console.print(f"skipped: {line}", highlight=False)
    for name, value in result["summary"].items():
        if isinstance(value, float):
            console.print(f"  {name:45} {value:.2f}", highlight=False)
    for reason in sorted(set(result["summary"]["summary_null_reasons"].values())):
        names = [name for name, why in result["summary"]["summary_null_reasons"].items() if why == reason]
        console.print(f"  no {', '.join(names)}: {reason}", highlight=False)
    console.print(machine_line(result["machine"]))


def _table(rows: list[Row], title: str) -> Table:
    ran = {name for row in rows for name in row["arms"] if median_of(row, name, "ours_is_faster_by") is not None}
    columns = [OURS, *sorted(ran - {OURS})]
    table = Table(title=title)
    for column in ("tokens", "thr.", "A", *columns):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["tokens_per_expert"]),
            f"{row['num_threads']}{'*' if row['is_contended'] else ''}",
            f"{row['anchor_gb_per_s']:.1f}",
            *(_cell(row, name) for name in columns),
        )
    return table


def _cell(row: Row, name: str) -> str:
    entry = row["arms"].get(name, {})
    if "gflops" not in entry:
        return "-"
    if row["tokens_per_expert"] > OTHER_ISA_TOKENS:
        text = f"{entry['gflops']:.0f} ({entry['fraction_of_torch_mm']['median']:.2f})"
    else:
        text = f"{entry['gb_per_s']['median']:.1f} ({entry['fraction_of_read_bw']['median']:.2f})"
    if name == OURS:
        low, high = entry["gb_per_s"]["spread"]
        return f"{text}\n{low:.1f}..{high:.1f}"
    low, high = entry["ours_is_faster_by"]["spread"]
    return f"{text}\n{entry['ours_is_faster_by']['median']:.2f}x {low:.2f}..{high:.2f}"


def main(
    json_file: Annotated[Path, typer.Option("--json", help="Where the results go.")],
    quick: Annotated[bool, typer.Option(help="One shape, fewer tokens, 3 rounds: shows that it runs.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in each of which everything runs once.")] = 7,
    group: Annotated[str | None, typer.Option(help="Rows of this group alone: memory or huge pages.")] = None,
    shape: Annotated[str | None, typer.Option(help="Rows of this shape alone: mixtral or qwen3.")] = None,
    threads: Annotated[int | None, typer.Option(help="Rows with so many threads alone.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="Rows with so many tokens per expert; repeatable.")] = None,
    add: Annotated[bool, typer.Option(help="Keep the file's other rows: a run in parts, on a shared machine.")] = False,
) -> None:
    """Measure all shapes, print tables, write JSON."""
    torch.set_grad_enabled(False)
    settings, num_rounds = (quick_settings(), min(rounds, QUICK_ROUNDS)) if quick else (full_settings(), rounds)
    chosen = [
        replace(
            setting,
            tokens_per_expert=tuple(each for each in setting.tokens_per_expert if not tokens or each in tokens),
            thread_counts=tuple(count for count in setting.thread_counts if threads in (None, count)),
        )
        for setting in settings
        if group in (None, setting.group) and shape in (None, setting.shape.name)
    ]
    chosen = [setting for setting in chosen if setting.tokens_per_expert and setting.thread_counts]
    if not chosen:
        raise typer.BadParameter("these --group, --shape, --threads and --tokens leave nothing to measure")
    console = Console(width=max(Console().width, 150))
    result = run(chosen, num_rounds, console)
    if add and json_file.exists():
        result = merged(json.loads(json_file.read_text()), result)
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(result, indent=2) + "\n")
    show(result, console)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported, for its kernels
    typer.run(main)
