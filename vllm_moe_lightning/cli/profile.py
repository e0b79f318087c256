"""`profile`: measures this machine, or shows what was measured before, and writes it for `plan --hardware`."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

if TYPE_CHECKING:
    from vllm_moe_lightning.machine_readings import MeasuredMachine, Reading

GB = 1e9
# A median this far below the best means that others were at work, and the best itself is in doubt.
DISTURBED = 0.7


def profile(
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again, whatever the cache holds.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Some seconds, good to some ten percent.")] = False,
    disk_folder: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="Where the disk is read, from a file of up to 512 MiB.")
    ] = Path(),
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Where the profile goes, for `plan --hardware`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Measure this machine: memory, link, disk, and the kernels that run on it. Kept for the next time."""
    from vllm_moe_lightning.hardware import write_profile
    from vllm_moe_lightning.profile_cache import STALE_AFTER_S

    measured, warnings = _measured(refresh, quick, disk_folder)
    age_s = measured.age_s(datetime.now(UTC))
    if age_s > STALE_AFTER_S:
        warnings.append(f"measured {_age(age_s)} ago; machines change: measure again with --refresh")
    warnings += measured.warnings
    if output is not None:
        try:
            write_profile(measured.profile, output)
        except OSError as error:
            raise typer.BadParameter(f"--output: {error}") from error
    if as_json:
        shown = {**msgspec.to_builtins(measured), "age_s": age_s, "warnings": warnings}
        typer.echo(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode())
        return
    _show(measured, age_s, warnings)


def _measured(refresh: bool, quick: bool, disk_folder: Path) -> tuple[MeasuredMachine, list[str]]:
    """From the cache if that will do: then nothing heavy is imported. Progress goes to stderr, off the JSON's way."""
    from vllm_moe_lightning.errors import MoeLightningError
    from vllm_moe_lightning.profile_cache import cache_folder, fingerprint, load_cached

    if not refresh:
        cached, warnings = load_cached(cache_folder(), fingerprint(), quick=quick)
        if cached is not None:
            return cached, warnings
    try:
        return _measure_with_progress(refresh, quick, disk_folder)
    except ImportError as error:
        reason = f"`profile` measures with torch ({error}): install the package's cpu or cuda extra"
        typer.echo(reason, err=True)
        raise typer.Exit(1) from error
    except (MoeLightningError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


def _measure_with_progress(refresh: bool, quick: bool, disk_folder: Path) -> tuple[MeasuredMachine, list[str]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from vllm_moe_lightning.profiling import machine_profile

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring")

        def progress(step: str, done: int, total: int) -> None:
            bar.update(task, description=step, completed=done, total=total)

        if find_spec("vllm") is None:
            return machine_profile(quick=quick, refresh=refresh, disk_folder=disk_folder, progress=progress)
        progress("importing vLLM, whose experts' kernel the engine will run", 0, 1)
        from vllm_moe_lightning.integration.experts_probe import device_experts

        return machine_profile(
            quick=quick, refresh=refresh, disk_folder=disk_folder, progress=progress, experts_probe=device_experts
        )


def _age(seconds: float) -> str:
    for unit, length_s in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _figure(value: float | None, unit: str) -> str:
    from vllm_moe_lightning.machine_readings import BYTES_PER_S, FLOPS_PER_S, SECONDS

    if value is None:
        return "not run"
    scale = {BYTES_PER_S: (1e-9, "GB/s"), FLOPS_PER_S: (1e-9, "GFLOP/s"), SECONDS: (1e6, "µs")}
    factor, name = scale.get(unit, (1.0, ""))
    return f"{value * factor:.4g} {name}".strip()


def _is_disturbed(reading: Reading) -> bool:
    if reading.best is None or reading.median is None:
        return False
    return min(reading.best, reading.median) / max(reading.best, reading.median) < DISTURBED


def _show(measured: MeasuredMachine, age_s: float, warnings: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    profile = measured.profile
    console = Console()
    table = Table(title=profile.name, title_justify="left")
    for column in ("reading", "best", "median", "how"):
        table.add_column(column, justify="right" if column in ("best", "median") else "left")
    for reading in measured.readings:
        cells = [_figure(value, reading.unit) for value in (reading.best, reading.median)]
        style = "dim" if reading.best is None else "yellow" if _is_disturbed(reading) else ""
        table.add_row(reading.name, *(cells if reading.best is not None else [cells[0], ""]), reading.note, style=style)
    console.print(table)
    limits = profile.limits
    cgroup = "none" if limits.cgroup_memory_bytes is None else f"{limits.cgroup_memory_bytes / GB:.2f} GB"
    memlock = "none" if limits.memlock_bytes is None else f"{limits.memlock_bytes / GB:.3f} GB"
    console.print(
        f"device {profile.gpu.memory_bytes / GB:.1f} GB, host {profile.host_memory_bytes / GB:.1f} GB; "
        f"limits: cgroup memory {cgroup}, locked memory {memlock}",
        highlight=False,
    )
    how = "quickly, " if measured.quick else ""
    console.print(
        f"measured {how}in {measured.duration_s:.1f} s, {_age(age_s)} ago, at load {measured.load_average:.1f}",
        style="dim",
        highlight=False,
    )
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False)
