"""What gpu_check.py found, for people: goals, tables, and what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu_engine import STOCK
from vllm_moe_lightning.hardware import HardwareProfile

GOALS = {
    "h2d_share_of_peak": 0.95,  # at least
    "step_over_busiest_resource": 1.10,  # at most
    "throughput_over_stock_like": 3.0,  # at least
    "prediction_error": 0.15,  # at most
}
AT_LEAST = {"h2d_share_of_peak", "throughput_over_stock_like"}
# Between schedules: they compute the same step, but S4's attention is another kernel.
MOST_DIFFERENCE = 0.05


def summarise(device: str, profile: HardwareProfile, arms: dict[str, Any], prediction: dict[str, Any]) -> Any:
    rows = {row["arm"]: row for row in arms["rows"]}
    ours = rows["cgopipe"]
    ratios = {
        name: ours["tokens_per_s"]["median"] / row["tokens_per_s"]["median"]
        for name, row in rows.items()
        if name != "cgopipe"
    }
    figures = {
        "h2d_share_of_peak": ours["h2d_bytes_per_s"]["median"] / profile.link.h2d_bytes_per_s,
        "step_over_busiest_resource": ours["step_over_busiest_resource"]["median"],
        "throughput_over_stock_like": ratios.get(STOCK),
        "prediction_error": abs(prediction["error"]),
    }
    met = {
        name: None if value is None else bool(value >= goal if name in AT_LEAST else value <= goal)
        for (name, goal), value in zip(GOALS.items(), figures.values(), strict=True)
    }
    return {
        "device": device,
        **figures,
        "throughput_over": ratios,
        "h2d_peak_bytes_per_s": profile.link.h2d_bytes_per_s,
        "goals": GOALS,
        # Tiny shapes on a CPU say that the check runs, not how fast a GPU is.
        "goals_met": met if device == "cuda" else None,
    }


def show(result: dict[str, Any], console: Console) -> None:
    for group, rows in result["checks"].items():
        failed = [f"{row['check']}: {row['error']:.2g} > {row['limit']:g}" for row in rows if not row["ok"]]
        console.print(
            f"{group}: {len(rows)} checks, {failed or 'all within tolerance'}" if rows else f"{group}: not run"
        )
    summary, arms, prediction = result["summary"], result["arms"], result["prediction"]
    label = summary["device"]
    table = Table(title=f"One decode step, {label}, median of its rounds (times in ms)")
    for column in ("arm", "sequences", "step", "compute", "cpu", "h2d", "d2h", "host waits", "H2D GB/s", "tokens/s"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for row in arms["rows"]:
        table.add_row(
            row["arm"],
            str(row["num_seqs"]),
            f"{row['step_s']['median'] * 1e3:.1f}",
            *(f"{row['busy_s'][name]['median'] * 1e3:.1f}" for name in ("compute", "cpu", "h2d", "d2h")),
            f"{row['host_wait_s']['median'] * 1e3:.1f}",
            f"{row['h2d_bytes_per_s']['median'] / 1e9:.2f}",
            f"{row['tokens_per_s']['median']:.0f}",
        )
    console.print(table)
    table = Table(title=f"CGOPipe's step by resource, {label} (ms)")
    for column in ("resource", "predicted", "measured"):
        table.add_column(column, justify="left" if column == "resource" else "right")
    for resource, entry in prediction["resources"].items():
        table.add_row(resource, *(f"{entry[key] * 1e3:.1f}" for key in ("predicted_s", "measured_s")))
    table.add_row("step", f"{prediction['predicted_step_s'] * 1e3:.1f}", f"{prediction['measured_step_s'] * 1e3:.1f}")
    console.print(table)
    ratios = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in summary["throughput_over"].items())
    console.print(f"{label}: CGOPipe's throughput over: {ratios}")
    for name, goal in GOALS.items():
        value = summary[name]
        bound = "at least" if name in AT_LEAST else "at most"
        verdict = "" if summary["goals_met"] is None else f": {'met' if summary['goals_met'][name] else 'NOT met'}"
        console.print(
            f"{label}: {name} {'not measured' if value is None else f'{value:.3f}'} ({bound} {goal}){verdict}"
        )
    for name, reason in arms["null_reasons"].items():
        console.print(f"{name}: not measured: {reason}")
    if arms["sweep_without_host_sync"] is not None:
        console.print(f"host synchronisation inside of a step: {arms['sweep_without_host_sync']}")
    elapsed = result["elapsed_s"]
    times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in elapsed.items())
    console.print(f"{sum(elapsed.values()):.0f} s: {times}")
    machine = result["machine"]
    console.print(f"{machine['gpu']} beside {machine['cpu']}, {machine['num_cpus']} CPUs, commit {machine['commit']}")


def failures(result: dict[str, Any]) -> Sequence[str]:
    """What is wrong, not merely slow."""
    return [row["check"] for rows in result["checks"].values() for row in rows if not row["ok"]] + [
        name for name, error in result["arms"]["difference_from_cgopipe"].items() if error > MOST_DIFFERENCE
    ]
