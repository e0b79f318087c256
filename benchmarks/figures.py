#!/usr/bin/env python
"""Every figure that the READMEs show: where its value is in the results, its unit, and the command that makes it.

Writes them all to one file (`make bench`: build/bench/summary.json), from the results at hand and, for what was not
run, from the recorded ones; or as the table of benchmarks/README.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer

from benchmarks.machine import ROOT

RECORDED = ROOT / "benchmarks" / "results"
RATIO, SHARE = "times", "share"
BASELINES = ("vLLM", "transformers", "accelerate cpu_offload", "accelerate disk_offload", "llama.cpp")
MEMORY_RATIOS = (
    ("host memory S4 needs over CGOPipe's at the same tokens/s", "s4_over_cgopipe_at_same_tokens_per_s"),
    ("KV memory S4 needs over CGOPipe's at the same tokens/s", "s4_over_cgopipe_of_kv_at_same_tokens_per_s"),
)
Result = Mapping[str, Any]
Spread = tuple[float, float]


@dataclass(frozen=True)
class Figure:
    name: str
    results: str
    """Name of the JSON file, without its ending."""
    value: Callable[[Result], float | None]
    unit: str
    command: str
    """What records it; `make bench` may run a reduced form."""
    device: Callable[[Result], str]
    spread: Callable[[Result], Spread | None] = lambda result: None
    """Of the rounds, or over the rows; None where the value is computed and not measured."""

    def entry(self, folder: Path) -> dict[str, Any] | None:
        """None where the folder has no such results, or they lack the figure."""
        path = folder / f"{self.results}.json"
        if not path.exists():
            return None
        result = json.loads(path.read_text())
        value = self.value(result)
        if value is None:
            return None
        spread = self.spread(result)
        return {
            "name": self.name,
            "value": value,
            "spread": None if spread is None else list(spread),
            "unit": self.unit,
            "command": self.command,
            "device": self.device(result),
        }


def _emulated(result: Result) -> str:
    return "emulated"


def _cpu(result: Result) -> str:
    return "cpu"


def _named(result: Result) -> str:
    return str(result["device"])


def _command(script: str, results: str, more: str = "") -> str:
    return f"python benchmarks/{script}.py --json benchmarks/results/{results}.json{more}"


def _of_pipeline(key: str) -> tuple[Callable[[Result], float], Callable[[Result], Spread | None]]:
    def spread(result: Result) -> Spread | None:
        low_high = result["summary"].get("spreads", {}).get(key)
        return None if low_high is None else (low_high[0], low_high[1])

    return lambda result: result["summary"][key], spread


def _pipeline(name: str, key: str) -> Figure:
    value, spread = _of_pipeline(key)
    return Figure(name, "pipeline", value, RATIO, _command("pipeline", "pipeline"), _emulated, spread)


def _throughput(name: str, arm: str) -> Figure:
    def entry(result: Result) -> Mapping[str, Any]:
        return dict(result["summary"]["cgopipe_is_faster_by"].get(arm, {}))

    return Figure(
        name,
        "throughput",
        lambda result: entry(result).get("median"),
        RATIO,
        _command("throughput", "throughput"),
        _named,
        lambda result: tuple(entry(result)["spread"]),
    )


def _bound(result: Result) -> Mapping[str, Any]:
    return dict(result["summary"]["cgopipe_share_of_modelled_bound"] or {})


def _memory_model(gpu: str, what: str, key: str) -> Figure:
    return Figure(
        f"{what}, modelled, {gpu.upper()}",
        "host_memory_sweep",
        lambda result: result["summary"]["modelled"].get(gpu, {}).get("0.9", {}).get(key),
        RATIO,
        _command("host_memory_sweep", "host_memory_sweep"),
        _cpu,
    )


def _baseline(arm: str, batch: int) -> Figure:
    def entry(result: Result) -> Mapping[str, Any]:
        rows = (row for row in result["rows"] if row["arm"] == arm and row["batch_size"] == batch)
        return dict(next(rows, {}).get("ours_is_faster_by", {}))

    return Figure(
        f"ours over {arm}, batch {batch}",
        "baselines",
        lambda result: entry(result).get("median"),
        RATIO,
        _command("baselines", "baselines"),
        _emulated,
        lambda result: tuple(entry(result)["spread"]),
    )


def _attention(name: str, key: str, unit: str) -> Figure:
    plot = " --plot benchmarks/results/cpu_attention.png"
    return Figure(
        name,
        "cpu_attention",
        lambda result: result["summary"][key],
        unit,
        _command("cpu_attention", "cpu_attention", plot),
        _cpu,
    )


FIGURES: tuple[Figure, ...] = (
    _pipeline("CGOPipe's step over its busiest resource", "cgopipe_over_busiest_resource"),
    _pipeline("serial order's step over CGOPipe's", "serial_over_cgopipe"),
    _pipeline("S2's step over CGOPipe's", "s2_over_cgopipe"),
    _pipeline("S3's step over CGOPipe's", "s3_over_cgopipe"),
    _pipeline("S4's step over CGOPipe's", "s4_over_cgopipe"),
    _throughput("CGOPipe over serial order, whole jobs", "serial"),
    _throughput("CGOPipe over S2, whole jobs", "s2"),
    _throughput("CGOPipe over S3, whole jobs", "s3"),
    _throughput("CGOPipe over S4, whole jobs", "s4"),
    _throughput("CGOPipe over vLLM with all weights in RAM, whole jobs", "vLLM in RAM"),
    Figure(
        "CGOPipe's tokens/s over the modelled bound, whole jobs",
        "throughput",
        lambda result: _bound(result).get("median"),
        SHARE,
        _command("throughput", "throughput"),
        _named,
        lambda result: tuple(_bound(result)["spread"]),
    ),
    *(_memory_model(gpu, what, key) for gpu in ("t4", "l4") for what, key in MEMORY_RATIOS),
    Figure(
        "best tokens/s of CGOPipe over S4's, decode",
        "host_memory_sweep",
        lambda result: result["summary"]["measured_best_cgopipe_over_s4"],
        RATIO,
        _command("host_memory_sweep", "host_memory_sweep"),
        _named,
    ),
    Figure(
        "simulator's median error over 12 policies",
        "predicted_vs_measured",
        lambda result: result["summary"]["median_abs_error"],
        SHARE,
        _command("predicted_vs_measured", "predicted_vs_measured"),
        _emulated,
        lambda result: (0.0, result["summary"]["worst_abs_error"]),
    ),
    Figure(
        "planner's median error on whole jobs",
        "job_throughput",
        lambda result: result["summary"]["predicted_abs_error_median"],
        SHARE,
        _command("job_throughput", "job_throughput"),
        _emulated,
        lambda result: (
            min(abs(row["error"]) for row in result["rows"] if row["arm"] == "mixed"),
            result["summary"]["predicted_abs_error_worst"],
        ),
    ),
    Figure(
        "model's median error on the paper's 41 runs, settings left out",
        "hrm_vs_paper",
        lambda result: result["summary"]["median_abs_error_absolute_loss_left_out"],
        SHARE,
        _command("hrm_vs_paper", "hrm_vs_paper"),
        _cpu,
    ),
    _attention("CPU attention, part of the read bandwidth", "fraction_of_read_bw_block128", SHARE),
    _attention("CPU attention over vLLM's best", "vs_vllm_best_block128", RATIO),
    *(_baseline(arm, batch) for arm in BASELINES for batch in (1, 64)),
)


def entries(folder: Path) -> list[dict[str, Any]]:
    """Of all figures that have results: those in `folder`, else the recorded ones; `from` says which."""
    found = []
    for figure in FIGURES:
        for source in dict.fromkeys((folder, RECORDED)):
            entry = figure.entry(source)
            if entry is not None:
                shown = str(source.relative_to(ROOT)) if source.is_relative_to(ROOT) else str(source)
                found.append({**entry, "from": f"{shown}/{figure.results}.json"})
                break
    return found


def shown(value: float, unit: str) -> str:
    return f"{value:.1%}" if unit == SHARE else f"{value:.2f}"


def markdown(found: list[dict[str, Any]]) -> str:
    lines = ["| figure | value (min..max) | device | command |", "| --- | --- | --- | --- |"]
    for entry in found:
        value = shown(entry["value"], entry["unit"])
        if entry["spread"] is not None:
            low, high = (shown(bound, entry["unit"]) for bound in entry["spread"])
            value += f" ({low}..{high})"
        lines.append(f"| {entry['name']} | {value} | {entry['device']} | `{entry['command']}` |")
    return "\n".join(lines)


def main(
    results: Annotated[Path, typer.Option(help="Folder of the results at hand.")] = RECORDED,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where all figures go.")] = None,
    table: Annotated[bool, typer.Option(help="Print the table for the README.")] = False,
) -> None:
    """Collect all figures."""
    found = entries(results.resolve())
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(found, indent=2) + "\n")
        print(f"{len(found)} figures in {json_file}")
    if table or json_file is None:
        print(markdown(found))


if __name__ == "__main__":
    typer.run(main)
