#!/usr/bin/env python
"""One command that tells in at most 8 minutes what the engine does on the GPU at hand: is it right, is it fast.

Kernels against float64; results of the schedules against plain torch; the machine's profile, a plan for it, and what
was predicted beside what was measured; all schedules and a stock-like layer prefetcher at equal device memory. Needs
torch, triton, numpy and this package: no vLLM, no network. `--device emulated` does the same in small on any CPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
import torch
import typer
from rich.console import Console

from benchmarks.fp64_checks import kernel_checks
from benchmarks.gpu_engine import ARMS, GpuEngine
from benchmarks.gpu_report import failures, show, summarise
from benchmarks.machine import ROOT, describe
from benchmarks.paged_moe_checks import paged_moe_checks
from benchmarks.schedule_check import schedule_error
from benchmarks.torch_decoder import DecoderConfig
from vllm_moe_lightning.config import MoeLightningConfig
from vllm_moe_lightning.cost_model import sweep_cost
from vllm_moe_lightning.device import CudaDevice, Device, EmulatedDevice
from vllm_moe_lightning.errors import MoeLightningError
from vllm_moe_lightning.hardware import MIB, HardwareProfile
from vllm_moe_lightning.host_limits import available_memory_bytes, usable_cpus
from vllm_moe_lightning.host_probes import QUICK, Effort
from vllm_moe_lightning.kernels import native
from vllm_moe_lightning.machine_readings import MeasuredMachine
from vllm_moe_lightning.model_spec import AttentionSpec, MoeModelSpec
from vllm_moe_lightning.pipeline.schedule import SCHEDULE_NAMES
from vllm_moe_lightning.policy.limits import PlanLimits
from vllm_moe_lightning.policy.search import PlannedPolicy, find_policy
from vllm_moe_lightning.profiling import attention_threads, measure_machine
from vllm_moe_lightning.prompt_place import prompt_places
from vllm_moe_lightning.workload import SweepLoad, Workload

GIB = 1 << 30
# The plain decoder sums in another order than the engine's kernels: error of hidden states after all layers.
RESULT_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
STREAM_OF = {"gpu": "compute", "cpu": "cpu", "h2d": "h2d", "d2h": "d2h"}


class DeviceKind(StrEnum):
    CUDA = "cuda"
    EMULATED = "emulated"


@dataclass(frozen=True)
class Check:
    """What is run: a model's layer shapes, how many of them, and for whom."""

    model: DecoderConfig
    context_len: int
    gen_len: int
    max_num_seqs: int
    device_memory_bytes: int
    effort: Effort
    num_rounds: int
    steps_per_round: int


MIXTRAL_LAYER = DecoderConfig(
    num_layers=8,
    hidden=4096,
    intermediate=14336,
    num_experts=8,
    top_k=2,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=32000,
    dtype=torch.bfloat16,
)
TINY_LAYER = DecoderConfig(num_layers=3, hidden=64, intermediate=96, num_experts=4, num_heads=4, num_kv_heads=2)
TINY_EFFORT = Effort(repeats=3, buffer_bytes=4 * MIB, kv_bytes=8 * MIB, gemm_size=256, disk_bytes=8 * MIB)


def check_for(kind: DeviceKind, device_memory_gib: float) -> Check:
    if kind is DeviceKind.EMULATED:
        return Check(TINY_LAYER, 48, 16, 64, 2 * MIB, TINY_EFFORT, num_rounds=1, steps_per_round=2)
    dtype = half_types()[-1]
    layer_bytes = 3 * MIXTRAL_LAYER.num_experts * MIXTRAL_LAYER.hidden * MIXTRAL_LAYER.intermediate * dtype.itemsize
    # Half of host memory: keys and values come beside them, and a layer more while they are moved.
    num_layers = min(MIXTRAL_LAYER.num_layers, int(available_memory_bytes() * 0.5 // layer_bytes))
    if num_layers < 3:
        raise typer.BadParameter(
            f"this check needs 3 layers of {layer_bytes / GIB:.1f} GiB in half of the host's memory, and "
            f"{available_memory_bytes() / GIB:.1f} GiB are available"
        )
    model = replace(MIXTRAL_LAYER, num_layers=num_layers, dtype=dtype)
    memory_bytes = int(device_memory_gib * GIB)
    return Check(model, 544, 64, 1024, memory_bytes, QUICK, num_rounds=2, steps_per_round=3)


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


def make_device(kind: DeviceKind, memory_bytes: int, *, stall_timeout_s: float = 60.0) -> Device:
    if kind is DeviceKind.EMULATED:
        return EmulatedDevice(memory_bytes, stall_timeout_s=stall_timeout_s)
    return CudaDevice(memory_bytes, stall_timeout_s=stall_timeout_s)


def half_types() -> list[torch.dtype]:
    """Of 16 bits, as far as the GPU has them: bfloat16 came with compute capability 8."""
    return [torch.float16, torch.bfloat16] if torch.cuda.get_device_capability() >= (8, 0) else [torch.float16]


def result_checks(kind: DeviceKind) -> list[dict[str, Any]]:
    """Every schedule on a small model, against plain torch on the CPU."""
    rows = []
    for dtype in [torch.float32, *(half_types() if kind is DeviceKind.CUDA else [])]:
        for schedule in SCHEDULE_NAMES:
            error = schedule_error(make_device(kind, 64 * MIB), schedule, dtype)
            limit = RESULT_TOLERANCE[dtype]
            rows.append({"check": f"{schedule} {dtype}", "error": error, "limit": limit, "ok": error <= limit})
    return rows


def page_table_checks(kind: DeviceKind) -> list[dict[str, Any]]:
    """On a GPU with Triton; elsewhere its tests run it in Triton's interpreter."""
    if kind is DeviceKind.EMULATED or importlib.util.find_spec("triton") is None:
        return []
    return paged_moe_checks(torch.device("cuda", torch.cuda.current_device()), half_types())


def spec_of(config: DecoderConfig) -> MoeModelSpec:
    return MoeModelSpec(
        name=f"{config.num_layers} layers of the plain decoder",
        model_type="mixtral",
        num_layers=config.num_layers,
        num_dense_layers=0,
        hidden=config.hidden,
        vocab=config.vocab_size,
        num_experts=config.num_experts,
        top_k=config.top_k,
        expert_intermediate=config.intermediate,
        attention=AttentionSpec.grouped_query(config.hidden, config.num_heads, config.num_kv_heads, config.head_dim),
        tied_embeddings=True,
    )


def capped(check: Check, profile: HardwareProfile) -> HardwareProfile:
    """The machine with one GPU of the budget's size."""
    memory_bytes = int(check.device_memory_bytes / profile.efficiencies.gpu_memory)
    gpu = msgspec.structs.replace(profile.gpu, memory_bytes=memory_bytes, num_gpus=1)
    return msgspec.structs.replace(profile, gpu=gpu)


def plan_for(check: Check, profile: HardwareProfile) -> PlannedPolicy:
    """No layer is resident, so that what the stock-like arm keeps its KV in stays free."""
    spec = spec_of(check.model)
    limits = PlanLimits(
        max_num_seqs=check.max_num_seqs,
        num_resident_layers=0,
        attention_on_gpu=False,
        ffn_on_gpu=True,
        kv_on_host=True,
        **prompt_places(MoeLightningConfig(), spec, profile),
    )
    workload = Workload(prompt_len=check.context_len - check.gen_len // 2, gen_len=check.gen_len)
    return find_policy(spec, profile, workload, limits)


def measure_arms(check: Check, kind: DeviceKind, planned: PlannedPolicy, console: Console) -> dict[str, Any]:
    """All arms in each round, another one first each time."""
    policy = planned.policy
    options = MoeLightningConfig(
        num_micro_batches=policy.num_micro_batches,
        num_resident_layers=0,
        lookahead=policy.lookahead,
        attention_threads=attention_threads(usable_cpus()),
    )
    device = make_device(kind, check.device_memory_bytes)
    bench = GpuEngine(check.model, device, options, policy.batch_size, check.context_len)
    try:
        for index in range(check.num_rounds):
            for position in range(len(ARMS)):
                name = ARMS[(index + position) % len(ARMS)]
                console.print(f"round {index + 1} of {check.num_rounds}: {name}", style="dim")
                bench.measure(name, check.steps_per_round)
        rows = [arm.row(name) for name, arm in bench.arms.items() if arm.step_s]
        differences = bench.differences()
        sync_free = _launches_without_host_sync(bench) if kind is DeviceKind.CUDA else None
        return {
            "rows": rows,
            "null_reasons": bench.null_reasons,
            "difference_from_cgopipe": differences,
            "sweep_without_host_sync": sync_free,
            "memory": device.memory_report().splitlines(),
            "experts_bytes": bench.engine.store.host_bytes,
            "page_bytes": bench.engine.policy.page_bytes,
        }
    finally:
        bench.close()


def _launches_without_host_sync(bench: GpuEngine) -> str:
    """`ok`, or torch's word for the first call of a CGOPipe step that waited for the GPU behind our back."""
    bench.measure("cgopipe", 1)  # under its schedule, and with its kernels loaded
    torch.cuda.set_sync_debug_mode("error")
    try:
        bench.take()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "ok"


def predicted_and_measured(
    check: Check, profile: HardwareProfile, planned: PlannedPolicy, row: dict[str, Any]
) -> dict[str, Any]:
    """Of CGOPipe's decode step, by resource: the cost model's seconds beside those of the streams."""
    load = SweepLoad(decode_seqs=planned.policy.batch_size, decode_context=check.context_len)
    cost = sweep_cost(spec_of(check.model), profile, planned.policy, load)
    by_resource = {
        resource: {"predicted_s": float(cost.busy_s[resource]), "measured_s": row["busy_s"][stream]["median"]}
        for resource, stream in STREAM_OF.items()
    }
    return {
        "resources": by_resource,
        "predicted_step_s": float(cost.time_s),
        "measured_step_s": row["step_s"]["median"],
        "error": float(cost.time_s) / row["step_s"]["median"] - 1.0,
        "predicted_bottleneck": str(cost.bottleneck),
        "measured_bottleneck": max(by_resource, key=lambda resource: by_resource[resource]["measured_s"]),
    }


@contextmanager
def timed(name: str, seconds: dict[str, float], console: Console) -> Iterator[None]:
    console.print(f"{name} ...")
    started_s = time.monotonic()
    yield
    seconds[name] = time.monotonic() - started_s


def run(check: Check, kind: DeviceKind, folder: Path, console: Console) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    with timed("build", seconds, console):
        build_library(console)
    with timed("kernels against float64", seconds, console):
        kernels = kernel_checks()
    with timed("page-table MoE kernel", seconds, console):
        page_table = page_table_checks(kind)
    with timed("schedules against plain torch", seconds, console):
        results = result_checks(kind)
    with timed("profile", seconds, console):
        measured: MeasuredMachine = measure_machine("gpu_check", effort=check.effort, disk_folder=folder)
    with timed("plan", seconds, console):
        profile = capped(check, measured.profile)
        planned = plan_for(check, profile)
    with timed("arms", seconds, console):
        arms = measure_arms(check, kind, planned, console)
    ours = next(row for row in arms["rows"] if row["arm"] == "cgopipe")
    prediction = predicted_and_measured(check, profile, planned, ours)
    config = check.model
    return {
        "summary": summarise(str(kind), measured.profile, arms, prediction),
        "checks": {"kernels": kernels, "page_table_moe": page_table, "schedules": results},
        "arms": arms,
        "prediction": prediction,
        "plan": planned.to_dict(),
        "profile": msgspec.to_builtins(measured.profile),
        "workload": {
            "num_layers": config.num_layers,
            "hidden": config.hidden,
            "intermediate": config.intermediate,
            "num_experts": config.num_experts,
            "top_k": config.top_k,
            "heads": [config.num_heads, config.num_kv_heads, config.head_dim],
            "dtype": str(config.dtype),
            "context_len": check.context_len,
            "device_memory_bytes": check.device_memory_bytes,
        },
        "machine": {**describe(), **_gpu(kind)},
        "elapsed_s": seconds,
    }


def _gpu(kind: DeviceKind) -> dict[str, Any]:
    if kind is DeviceKind.EMULATED:
        return {"gpu": "none: the device is emulated"}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "gpu_memory_gb": properties.total_memory / 1e9,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }


def main(
    folder: Annotated[Path, typer.Option("--out", help="Where gpu_check.json goes.")],
    device: Annotated[DeviceKind, typer.Option(help="The GPU, or in small the emulated device.")] = DeviceKind.CUDA,
    device_memory_gib: Annotated[float, typer.Option(min=0.1, help="Cap of device memory; on the GPU only.")] = 8.0,
) -> None:
    """Run everything, print tables, write JSON. Ends with 1 if a result is wrong."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)  # the launching thread; attention and the copies have threads of their own
    console = Console(width=max(Console().width, 120))
    if device is DeviceKind.CUDA and not torch.cuda.is_available():
        raise typer.BadParameter("torch.cuda sees no GPU here; --device emulated runs anywhere")
    folder.mkdir(parents=True, exist_ok=True)
    result = run(check_for(device, device_memory_gib), device, folder, console)
    show(result, console)
    (folder / "gpu_check.json").write_text(json.dumps(result, indent=2) + "\n")
    if wrong := failures(result):
        console.print(f"WRONG: {wrong}")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
