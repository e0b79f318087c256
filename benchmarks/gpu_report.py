"""What gpu_check.py found, for people: goals and tables, of whatever parts there are."""

from __future__ import annotations

from collections.abc import Mapping
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
STREAMS = ("compute", "cpu", "h2d", "d2h")


def summarise(
    device: str, profile: HardwareProfile | None, arms: Mapping[str, Any], prediction: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The figures that have goals: None for those that want a part which there is none of."""
    rows = {row["arm"]: row for row in arms["rows"]}
    ours = rows.get("cgopipe")
    ratios = {
        name: ours["tokens_per_s"]["median"] / row["tokens_per_s"]["median"]
        for name, row in rows.items()
        if ours is not None and name != "cgopipe"
    }
    peak = None if profile is None else profile.link.h2d_bytes_per_s
    figures = {
        "h2d_share_of_peak": None if ours is None or peak is None else ours["h2d_bytes_per_s"]["median"] / peak,
        "step_over_busiest_resource": None if ours is None else ours["step_over_busiest_resource"]["median"],
        "throughput_over_stock_like": ratios.get(STOCK),
        "prediction_error": None if prediction is None else abs(prediction["error"]),
    }
    met = {
        name: None if value is None else bool(value >= goal if name in AT_LEAST else value <= goal)
        for (name, goal), value in zip(GOALS.items(), figures.values(), strict=True)
    }
    return {
        "device": device,
        **figures,
        "throughput_over": ratios,
        "h2d_peak_bytes_per_s": peak,
        "goals": GOALS,
        # Tiny shapes on a CPU say that the check runs, not how fast a GPU is.
        "goals_met": met if device == "cuda" else None,
    }


def show(result: Mapping[str, Any], console: Console) -> None:
    """Each part that there is; then what was dropped, what failed."""
    label = result["device"]
    for group, rows in result.get("checks", {}).items():
        _show_checks(group, rows, console)
    if (arms := result.get("arms")) is not None:
        _show_arms(arms, label, console)
    if (prediction := result.get("prediction")) is not None:
        _show_prediction(prediction, label, console)
    if (summary := result.get("summary")) is not None:
        _show_summary(summary, label, console)
    if (small := result.get("small_batches")) is not None:
        _show_small_batches(small, label, console)
    if (speed := result.get("page_table_speed")) is not None:
        _show_speed(speed, label, console)
    for row in result.get("host_sync") or []:
        console.print(f"{row['case']}: host synchronisation {row['found']} (expected: {row['expected']})", markup=False)
    if (staging := result.get("staging")) is not None:
        rates = ", ".join(f"{name} {value:.2f}x" for name, value in staging["pageable_over_pinned"].items())
        console.print(f"{label}: pageable over pinned memory: {rates}")
    stages = ", ".join(f"{name} {entry.get('seconds', 0):.0f} s" for name, entry in result["stages"].items())
    console.print(f"{result['elapsed_s']:.0f} s: {stages}")
    machine = result["machine"]
    host = ", ".join(f"{name} {machine.get(name, 'unknown')}" for name in ("gpu", "cpu", "num_cpus", "commit"))
    console.print(host, markup=False)
    for name, why in result["dropped"].items():
        console.print(f"DROPPED {name}: {why}", markup=False)
    for what in result["failed"]:
        console.print(f"FAILED {what}", markup=False)


def _show_checks(group: str, rows: list[dict[str, Any]], console: Console) -> None:
    failed = [row for row in rows if not row["ok"]]
    console.print(f"{group}: {len(rows)} checks, {len(failed) or 'none'} failed")


def _show_arms(arms: Mapping[str, Any], label: str, console: Console) -> None:
    table = Table(title=f"One decode step, {label}, median of {arms['rounds']} round(s) (times in ms)")
    for column in ("arm", "sequences", "step", *STREAMS, "host waits", "H2D GB/s", "tokens/s"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for row in arms["rows"]:
        table.add_row(
            row["arm"],
            str(row["num_seqs"]),
            f"{row['step_s']['median'] * 1e3:.1f}",
            *(f"{row['busy_s'][name]['median'] * 1e3:.1f}" for name in STREAMS),
            f"{row['host_wait_s']['median'] * 1e3:.1f}",
            f"{row['h2d_bytes_per_s']['median'] / 1e9:.2f}",
            f"{row['tokens_per_s']['median']:.0f}",
        )
    console.print(table)
    for name, reason in arms["null_reasons"].items():
        console.print(f"{name}: not measured: {reason}", markup=False)
    if arms.get("sweep_without_host_sync") is not None:
        console.print(f"host synchronisation inside of a step: {arms['sweep_without_host_sync']}", markup=False)


def _show_prediction(prediction: Mapping[str, Any], label: str, console: Console) -> None:
    table = Table(title=f"CGOPipe's step by resource, {label} (ms)")
    for column in ("resource", "predicted", "measured"):
        table.add_column(column, justify="left" if column == "resource" else "right")
    for resource, entry in prediction["resources"].items():
        table.add_row(resource, *(f"{entry[key] * 1e3:.1f}" for key in ("predicted_s", "measured_s")))
    table.add_row("step", f"{prediction['predicted_step_s'] * 1e3:.1f}", f"{prediction['measured_step_s'] * 1e3:.1f}")
    console.print(table)


def _show_summary(summary: Mapping[str, Any], label: str, console: Console) -> None:
    ratios = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in summary["throughput_over"].items())
    console.print(f"{label}: CGOPipe's throughput over: {ratios or 'nothing that was measured'}")
    for name, goal in GOALS.items():
        value = summary[name]
        bound = "at least" if name in AT_LEAST else "at most"
        met = None if summary["goals_met"] is None else summary["goals_met"][name]
        verdict = "" if met is None else f": {'met' if met else 'NOT met'}"
        console.print(
            f"{label}: {name} {'not measured' if value is None else f'{value:.3f}'} ({bound} {goal}){verdict}"
        )


def _show_small_batches(small: Mapping[str, Any], label: str, console: Console) -> None:
    slots, experts = small.get("expert_slots"), small.get("num_experts")
    table = Table(title=f"Steps of few tokens, {label}; {slots} of {experts} experts have room where they are fetched")
    for column in ("experts", "tokens", "step, ms", "tokens/s", "over streamed", "MB up", "of streamed", "hits"):
        table.add_column(column, justify="left" if column == "experts" else "right")
    for row in small["rows"]:
        ratio, share, hits = (
            row.get(key) for key in ("throughput_over_streamed", "h2d_bytes_over_streamed", "hit_ratio")
        )
        table.add_row(
            row["place"],
            str(row["num_tokens"]),
            f"{row['step_s']['median'] * 1e3:.2f}",
            f"{row['tokens_per_s']['median']:.1f}",
            "" if ratio is None else f"{ratio['median']:.2f}x",
            f"{row['h2d_bytes_per_step']['median'] / 1e6:.1f}",
            "" if share is None else f"{share['median']:.0%}",
            "" if hits is None else f"{hits['median']:.0%}",
        )
    console.print(table)


def _show_speed(rows: list[dict[str, Any]], label: str, console: Console) -> None:
    table = Table(title=f"Page-table MoE kernel at one layer, {label}; torch.mm expert by expert beside it")
    for column in ("tokens", "kernel", "ms", "mm, ms", "over mm", "GB/s", "of peak", "TFLOP/s", "of peak"):
        table.add_column(column, justify="right")
    for row in rows:
        if "kernel_s" not in row:
            continue
        shares = (row.get(f"share_of_{name}_peak") for name in ("memory", "gemm"))
        of_memory, of_gemm = ("" if share is None else f"{share:.0%}" for share in shares)
        table.add_row(
            str(row["num_tokens"]),
            row["kernel"],
            f"{row['kernel_s']['best'] * 1e3:.3f}",
            f"{row['mm_s']['best'] * 1e3:.3f}",
            f"{row['over_mm']:.2f}x",
            f"{row['bytes_per_s'] / 1e9:.1f}",
            of_memory,
            f"{row['flops_per_s'] / 1e12:.2f}",
            of_gemm,
        )
    console.print(table)
