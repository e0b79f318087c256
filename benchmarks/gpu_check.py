#!/usr/bin/env python
"""One command that tells in at most 8 minutes what the engine does on the GPU at hand: is it right, is it fast.

Results of the engine against plain torch, kernels against float64; the machine's profile, a plan for it, and what was
predicted beside what was measured; all schedules and a stock-like layer prefetcher at equal device memory; steps of few
tokens with experts streamed, on the CPU and fetched. Each part stands by itself: what fails is told with its traceback,
and the JSON is written after each part. Needs torch, triton, numpy and this package: no vLLM, no network. `--device
emulated` does the same in small on any CPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
import torch
import typer
from rich.console import Console

from benchmarks.check_run import CheckRun, end_in_time
from benchmarks.fp64_checks import kernel_checks
from benchmarks.gpu_device import DeviceKind, describe_gpu
from benchmarks.gpu_plan import Check, capped, check_for, options_of, plan_for, predicted_and_measured
from benchmarks.gpu_report import show, summarise
from benchmarks.host_sync import host_sync_checks
from benchmarks.machine import ROOT, describe
from benchmarks.paged_moe_checks import paged_moe_checks, torch_experts_checks
from benchmarks.paged_moe_speed import paged_moe_speed
from benchmarks.result_checks import result_checks
from benchmarks.schedule_arms import measure_schedules
from benchmarks.small_batches import measure_small_batches
from benchmarks.staging_speed import staging_speed
from vllm_moe_lightning.errors import MoeLightningError
from vllm_moe_lightning.hardware import HardwareProfile
from vllm_moe_lightning.host_limits import usable_cpus
from vllm_moe_lightning.kernels import native
from vllm_moe_lightning.policy.search import PlannedPolicy
from vllm_moe_lightning.profiling import measure_machine

# Seconds that a part is expected to take at most, on a GPU: with less left it is dropped. Parts come in the order of
# their worth and hold back what later ones take, so what goes first are rounds beyond the first, of all arms and then
# of small batches; then whatever part, or arm of the first round, would not end in time.
SMALL_BATCHES, PAGE_TABLE_SPEED = "steps of few tokens", "page-table MoE kernel's speed"
HOST_SYNC, STAGING, CPU_KERNELS = "host synchronisation", "pageable memory", "CPU kernels against float64"
OPTIONAL_S = {SMALL_BATCHES: 60.0, PAGE_TABLE_SPEED: 30.0, HOST_SYNC: 15.0, STAGING: 20.0, CPU_KERNELS: 10.0}
MEASURING_S = 150.0
"""Held back from the checks of the page-table kernel, whose compilation has no bound: profile, engine, a round."""
WRAP_UP_RATIO = 0.05
"""Of the minutes: what is left to a part that takes longer than expected."""
LEAST_MINUTES = 1.0
"""For what is not optional: the process is ended by force no sooner."""


def build_library(console: Console) -> None:
    """Where the package was not installed, or its sources changed since: by cmake, into build/gpu_check."""
    try:
        native.library()
        return
    except MoeLightningError as error:
        if shutil.which("cmake") is None:
            raise MoeLightningError(f"{error}; or install cmake and a C++17 compiler, and this builds it") from error
        console.print(f"building csrc: {error}")
    folder = ROOT / "build" / "gpu_check"
    subprocess.run(["cmake", "-S", str(ROOT / "csrc"), "-B", str(folder)], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(folder), f"-j{usable_cpus()}"], check=True, stdout=subprocess.DEVNULL)
    os.environ[native.LIBRARY_VARIABLE] = str(next(folder.rglob(native.LIBRARY_NAME)))
    native.library()


def after(name: str) -> float:
    """Seconds that the optional parts behind this one are expected to take."""
    names = list(OPTIONAL_S)
    return sum(OPTIONAL_S[later] for later in names[names.index(name) + 1 :])


def run_stages(check: Check, kind: DeviceKind, folder: Path, run: CheckRun) -> None:
    """All parts, what they give in run.result."""
    result, reserve_s = run.result, sum(OPTIONAL_S.values())
    result |= {"device": str(kind), "workload": workload_of(check)}
    result["machine"] = {}
    run.stage("machine", lambda: result["machine"].update(describe()), needs_device=False)
    run.stage("GPU", lambda: result["machine"].update(describe_gpu(kind)))
    run.stage("build", lambda: build_library(run.console), needs_device=False)
    run.stage("results against plain torch", lambda: result_checks(kind, run))
    run.stage("experts by torch's matrix products", lambda: torch_experts_checks(kind, run))
    run.stage("page-table MoE kernel", lambda: paged_moe_checks(kind, run, MEASURING_S + reserve_s))
    profile = run.stage("profile", lambda: measured_profile(check, folder, result))
    planned = run.stage("plan", lambda: planned_for(check, profile, result), needs_device=False)
    options, num_seqs = options_of(check, planned)
    run.stage("all arms", lambda: measure_schedules(check, kind, options, num_seqs, run, reserve_s))
    run.stage("summary", lambda: summarise_into(result, check, profile, planned), needs_device=False)
    run.stage(
        SMALL_BATCHES,
        lambda: measure_small_batches(check, kind, options, run, after(SMALL_BATCHES)),
        optional_s=OPTIONAL_S[SMALL_BATCHES],
    )
    peak = None if profile is None else profile.gpu
    result["page_table_speed"] = run.stage(
        PAGE_TABLE_SPEED, lambda: paged_moe_speed(kind, run, peak), optional_s=OPTIONAL_S[PAGE_TABLE_SPEED]
    )
    if kind is DeviceKind.CUDA:  # the emulated device has neither
        result["host_sync"] = run.stage(
            HOST_SYNC, lambda: host_sync_checks(kind, run), optional_s=OPTIONAL_S[HOST_SYNC]
        )
        result["staging"] = run.stage(STAGING, staging_speed, optional_s=OPTIONAL_S[STAGING])
    run.stage(CPU_KERNELS, lambda: check_cpu_kernels(run), optional_s=OPTIONAL_S[CPU_KERNELS], needs_device=False)
    result["status"] = "complete"
    run.write()


def check_cpu_kernels(run: CheckRun) -> None:
    for row in kernel_checks():
        run.check("cpu_kernels", row["check"], lambda row=row: row["error"], row["limit"], needs_device=False)


def measured_profile(check: Check, folder: Path, result: dict[str, Any]) -> HardwareProfile:
    profile = measure_machine("gpu_check", effort=check.effort, disk_folder=folder).profile
    result["profile"] = msgspec.to_builtins(profile)
    return profile


def planned_for(check: Check, profile: HardwareProfile | None, result: dict[str, Any]) -> PlannedPolicy:
    if profile is None:
        raise MoeLightningError("no profile of this machine to plan for; the arms run with fixed options")
    planned = plan_for(check, capped(check, profile))
    result["plan"] = planned.to_dict()
    return planned


def summarise_into(
    result: dict[str, Any], check: Check, profile: HardwareProfile | None, planned: PlannedPolicy | None
) -> None:
    """Prediction and goals, of what there is."""
    arms = result.get("arms", {"rows": []})
    ours = next((row for row in arms["rows"] if row["arm"] == "cgopipe"), None)
    prediction = None
    if ours is not None and profile is not None and planned is not None:
        prediction = predicted_and_measured(check, capped(check, profile), planned, ours)
    result["prediction"] = prediction
    result["summary"] = summarise(result["device"], profile, arms, prediction)


def workload_of(check: Check) -> dict[str, Any]:
    config = check.model
    return {
        "num_layers": config.num_layers,
        "hidden": config.hidden,
        "intermediate": config.intermediate,
        "num_experts": config.num_experts,
        "top_k": config.top_k,
        "heads": [config.num_heads, config.num_kv_heads, config.head_dim],
        "dtype": str(config.dtype),
        "context_len": check.context_len,
        "device_memory_bytes": check.device_memory_bytes,
    }


def main(
    folder: Annotated[Path, typer.Option("--out", help="Where gpu_check.json goes.")],
    device: Annotated[DeviceKind, typer.Option(help="The GPU, or in small the emulated device.")] = DeviceKind.CUDA,
    device_memory_gib: Annotated[float, typer.Option(min=0.1, help="Cap of device memory; on the GPU only.")] = 8.0,
    max_minutes: Annotated[float, typer.Option(min=0.0, help="What would take longer is dropped, and said.")] = 8.0,
) -> None:
    """Run everything, print tables, write JSON after each part. Ends with 1 if a part failed or a result is wrong."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)  # the launching thread; attention and the copies have threads of their own
    console = Console(width=max(Console().width, 120))
    on_gpu = device is DeviceKind.CUDA
    if on_gpu and not torch.cuda.is_available():
        raise typer.BadParameter("torch.cuda sees no GPU here; --device emulated runs anywhere")
    folder.mkdir(parents=True, exist_ok=True)
    if on_gpu:
        end_in_time(60.0 * max(LEAST_MINUTES, max_minutes), folder / "gpu_check.stacks")
    check = check_for(device, device_memory_gib)
    run = CheckRun(folder / "gpu_check.json", console, 60.0 * max_minutes * (1 - WRAP_UP_RATIO), on_gpu)
    run_stages(check, device, folder, run)
    show(run.result, console)
    if on_gpu and run.lost is not None:  # the driver may wait for ever when the process lets go of it
        sys.stdout.flush()
        os._exit(1)
    if run.result["failed"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
