#!/usr/bin/env python
"""Writes the tables of benchmarks/README.md that come from recorded results: run it after recording anew.

A table stands between two comments, `<!-- table: NAME -->` and `<!-- end of table -->`. A test compares them with the
results, so that no figure is copied by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.figures import RECORDED, entries
from benchmarks.figures import markdown as figure_table

PAGE = RECORDED.parent / "README.md"
TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
NOT_RECORDED = "(not recorded yet)"
Result = Mapping[str, Any]


def _lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    table = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def _rate(row: Result) -> str:
    low, high = row["tokens_per_s_spread"]
    rounds = len(row["elapsed_s_rounds"])
    return f"{row['tokens_per_s']:.0f}" + (f" ({low:.0f}..{high:.0f})" if rounds > 1 else "")


def throughput_table(result: Result) -> str:
    """Tokens/s of a workload a row, an arm a column; how fast CGOPipe is beside each."""
    arms = list(dict.fromkeys(row["arm"] for row in result["rows"]))
    rows = []
    for workload, padded in dict.fromkeys((row["workload"], row["padded"]) for row in result["rows"]):
        of = {row["arm"]: row for row in result["rows"] if (row["workload"], row["padded"]) == (workload, padded)}
        ours = of["cgopipe"]
        tokens = f"{ours['text_tokens']} + {ours['padding_tokens']} + {ours['generated_tokens']}"
        bound = ours["modelled_tokens_per_s"]
        load = result["machines"][f"{workload}{', padded' if padded else ''}"]["load_average"]
        cells = [_rate(of[arm]) if arm in of else "-" for arm in arms]
        rows.append([f"{workload}{', padded' if padded else ''}", tokens, f"{bound:.0f}", *cells, f"{load:.1f}"])
    return _lines(["workload", "tokens: text + padding + generated", "modelled bound", *arms, "load"], rows)


def host_memory_table(result: Result) -> str:
    """What the same tokens/s take of host memory."""
    rows = []
    for gpu, curves in result["modelled"].items():
        for entry in curves["shares"]:
            memory, kv = entry["host_gib_at_same_tokens_per_s"], entry["kv_gib_at_same_tokens_per_s"]
            rows.append(
                [
                    f"{curves['model']} on {gpu.upper()}, modelled",
                    f"{entry['same_tokens_per_s']:.0f} ({entry['share']:.0%} of the lower bound)",
                    f"{memory['cgopipe']:.0f} / {memory['s4']:.0f} GiB",
                    f"{entry['s4_over_cgopipe_at_same_tokens_per_s']:.2f}",
                    f"{kv['cgopipe']:.0f} / {kv['s4']:.0f} GiB",
                    f"{entry['s4_over_cgopipe_of_kv_at_same_tokens_per_s']:.2f}",
                ]
            )
    summary, expert_bytes = result["summary"], result["measured"]["expert_bytes"]
    memory = summary["measured_host_bytes_at_same_tokens_per_s"]
    rows.append(
        [
            f"emulated device, measured, load {result['machine']['load_average']:.1f}",
            f"{summary['measured_same_tokens_per_s']:.0f} (90% of S4's best)",
            f"{memory['cgopipe'] / 1e6:.0f} / {memory['s4'] / 1e6:.0f} MB",
            f"{summary['measured_s4_over_cgopipe_at_same_tokens_per_s']:.2f}",
            f"{(memory['cgopipe'] - expert_bytes) / 1e6:.0f} / {(memory['s4'] - expert_bytes) / 1e6:.0f} MB",
            f"{summary['measured_s4_over_cgopipe_of_kv_at_same_tokens_per_s']:.2f}",
        ]
    )
    return _lines(["", "tokens/s of both", "host memory, CGOPipe / S4", "times", "of it KV cache", "times"], rows)


def baselines_table(result: Result) -> str:
    """An arm a row: tokens/s at each batch, and how many times as fast ours is."""
    batches = sorted({row["batch_size"] for row in result["rows"]})
    rows = []
    for arm in dict.fromkeys(row["arm"] for row in result["rows"]):
        of = {row["batch_size"]: row for row in result["rows"] if row["arm"] == arm}
        cells = []
        for batch in batches:
            over = of[batch].get("ours_is_faster_by") if batch in of else None
            cells += [_rate(of[batch]) if batch in of else "-", f"{over['median']:.2f}" if over else ""]
        rows.append([arm, *cells])
    rows += [[arm, reason, *[""] * (2 * len(batches) - 1)] for arm, reason in result["not_run"].items()]
    heads = [head for batch in batches for head in (f"batch {batch}, tokens/s", "ours over it")]
    return _lines(["", *heads], rows)


TABLES: Mapping[str, Callable[[Result], str]] = {
    "throughput": throughput_table,
    "host_memory_sweep": host_memory_table,
    "baselines": baselines_table,
}
"""By the name of the results."""


def table(name: str) -> str:
    if name == "figures":
        return figure_table(entries(RECORDED))
    path = RECORDED / f"{name}.json"
    return TABLES[name](json.loads(path.read_text())) if path.exists() else NOT_RECORDED


def with_tables(page: str) -> str:
    """The page with all its tables as recorded."""
    return TABLE.sub(lambda found: f"{found[1]}{table(found[2])}\n{found[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
    print(f"tables written: {PAGE}")
