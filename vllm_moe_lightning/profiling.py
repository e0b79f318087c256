"""Measures this machine into a HardwareProfile. Its device is the GPU, or without one the emulated device.

The emulated device computes on one thread and copies by memcpy, as the engine does where there is no GPU; CPU
attention has the remaining threads. Decides what a profile's figures are made of; the probes measure, and
profile_cache keeps the result.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from vllm_moe_lightning import device_probes, host_probes
from vllm_moe_lightning.hardware import (
    BELIEVABLE,
    EMULATED_GPU_NAME,
    CpuLevel,
    DiskLevel,
    GpuLevel,
    HardwareProfile,
    HostLimits,
    HostLink,
    KernelEfficiencies,
    TaskOverheads,
)
from vllm_moe_lightning.host_limits import cpu_name, host_limits, total_memory_bytes, usable_cpus
from vllm_moe_lightning.host_probes import FULL, QUICK, Effort
from vllm_moe_lightning.machine_readings import (
    READINGS_VERSION,
    MeasuredMachine,
    Reading,
    by_name,
    refuse_unbelievable,
)
from vllm_moe_lightning.profile_cache import cache_folder, fingerprint, load_cached, store_cached

Progress = Callable[[str, int, int], None]
"""(what is measured now, how many steps are done, how many there are)"""
Probe = Callable[[], Reading | list[Reading]]
ExpertsProbe = Callable[[Effort], list[Reading]]

EMULATED_MEMORY_SHARE = 0.25
"""Of host memory, for the emulated device: it has none of its own. `device_memory_mib` sets another budget."""
BUSY_LOAD_PER_CPU = 0.5
LEAST_FLOPS_SHARE = 0.05
"""Of the time of attention of prompts, what QK^T and PV take at least."""


def machine_profile(
    *,
    quick: bool = False,
    refresh: bool = False,
    disk_folder: Path = Path(),
    cache: Path | None = None,
    progress: Progress = lambda step, done, total: None,
    experts_probe: ExpertsProbe | None = None,
) -> tuple[MeasuredMachine, list[str]]:
    """This machine from the cache, or measured and cached. (measurement, warnings about the cache)

    experts_probe: measures the experts' kernel on the device; without it they are taken to run like other GEMMs.
    """
    folder = cache_folder() if cache is None else cache
    machine = fingerprint()
    warnings: list[str] = []
    if not refresh:
        cached, warnings = load_cached(folder, machine, quick=quick)
        if cached is not None:
            return cached, warnings
    measured = measure_machine(
        machine, quick=quick, disk_folder=disk_folder, progress=progress, experts_probe=experts_probe
    )
    return measured, warnings + store_cached(folder, measured)


def measure_machine(
    machine: str,
    *,
    quick: bool = False,
    effort: Effort | None = None,
    disk_folder: Path = Path(),
    progress: Progress = lambda step, done, total: None,
    experts_probe: ExpertsProbe | None = None,
) -> MeasuredMachine:
    """Raises ValueError naming each reading that can't be. `machine`: its fingerprint; `effort`: in place of the quick
    or the full one."""
    started_s, load_average = time.monotonic(), os.getloadavg()[0]
    num_threads = usable_cpus()
    spent = effort or (QUICK if quick else FULL)
    probes = {**_probes(num_threads, spent, disk_folder)}
    if experts_probe is not None:
        probes["experts on the device"] = lambda: experts_probe(spent)
    readings: list[Reading] = []
    for index, (label, probe) in enumerate(probes.items()):
        progress(label, index, len(probes))
        taken = probe()
        readings += taken if isinstance(taken, list) else [taken]
    progress("done", len(probes), len(probes))
    refuse_unbelievable(readings)
    capacity_bytes = shutil.disk_usage(disk_folder).total if "disk_read" in by_name(readings) else None
    profile = profile_of(readings, num_threads, host_limits(), total_memory_bytes(), capacity_bytes)
    return MeasuredMachine(
        fingerprint=machine,
        quick=quick,
        load_average=load_average,
        duration_s=time.monotonic() - started_s,
        readings=tuple(readings),
        profile=profile,
        warnings=tuple(_warnings(readings, load_average, num_threads)),
        version=READINGS_VERSION,
    )


def _probes(num_threads: int, effort: Effort, disk_folder: Path) -> Mapping[str, Probe]:
    """By what a progress display says."""
    counts = host_probes.thread_counts(num_threads)
    probes: dict[str, Probe] = {
        f"host memory read, {count} thread(s)": lambda count=count: host_probes.host_read(count, effort)  # type: ignore[misc]
        for count in counts
    }
    probes["memcpy"] = lambda: [host_probes.memcpy(count, effort) for count in sorted({1, num_threads})]
    for dtype in (torch.float32, torch.bfloat16):
        probes[f"CPU GEMM, {dtype}"] = lambda dtype=dtype: [  # type: ignore[misc]
            host_probes.gemm(count, dtype, effort) for count in sorted({1, num_threads})
        ]
    probes["GEMM of few rows"] = lambda: host_probes.few_row_gemms(effort)
    probes["prefill attention"] = lambda: host_probes.causal_attention(1, effort)
    probes["CPU attention"] = lambda: host_probes.decode_attention(attention_threads(num_threads), effort)
    probes["CPU attention of prompts"] = lambda: host_probes.prompt_attention(attention_threads(num_threads), effort)
    probes["CPU experts"] = lambda: host_probes.expert_ffn(attention_threads(num_threads), effort)
    probes["emulated link"] = lambda: device_probes.emulated_link(effort)
    probes["CUDA device"] = lambda: device_probes.cuda_device(effort)
    probes["disk read"] = lambda: host_probes.disk_read(disk_folder, effort)
    return probes


def attention_threads(num_threads: int) -> int:
    """As the engine divides them unless told otherwise: one for launching, the others for attention and experts."""
    return max(1, num_threads - 1)


def profile_of(
    readings: Sequence[Reading],
    num_threads: int,
    limits: HostLimits,
    memory_bytes: int,
    disk_capacity_bytes: int | None,
) -> HardwareProfile:
    """The figures of the cost model from the readings, each with its source."""
    found = by_name(readings)
    sources: dict[str, str] = {"cpu.memory_bytes": "/proc/meminfo", "limits.cgroup_memory_bytes": "cgroup"}

    def take(path: str, *names: str) -> float:
        """The highest of some readings."""
        best = max((found[name] for name in names if name in found), key=lambda reading: reading.value)
        sources[path] = f"measured: {best.name}" + (f" ({best.note})" if best.note else "")
        return best.value

    def whatever_threads(kind: str) -> list[str]:
        return [name for name in found if name.partition(".")[0] == kind]

    attending = attention_threads(num_threads)
    # On a busy machine fewer threads may reach more; and if our kernels beat the read probe, then memory is faster.
    our_reads = (f"attention_read.{attending}", f"expert_ffn_read.{attending}")
    host_read = take("cpu.bandwidth_bytes_per_s", *whatever_threads("host_read"), *our_reads)
    cpu_flops = take("cpu.flops_per_s", *whatever_threads("gemm_float32"))
    is_cuda = "cuda_gemm" in found
    gpu, link, memory_for_host = _device(take, is_cuda, sources, limits, memory_bytes)

    def share(path: str, name: str, of: float, most: float = 1.0) -> float:
        reached = found[name].value / of
        held = f", held to {most:g}" * (reached > most)
        sources[f"efficiencies.{path}"] = f"measured: {name}, {reached:.2f} of the peak{held}"
        return min(most, reached)

    on_device: dict[str, float]
    if is_cuda:
        # The device's peaks are what a GEMM and a copy reached, so there is nothing to take off them. Prefill attention
        # is not measured: the default stands.
        on_device = {"gpu_gemm": 1.0, "gpu_bandwidth": 1.0}
        sources |= {f"efficiencies.{name}": "the peak itself is measured" for name in on_device}
    else:
        on_device = {
            "gpu_gemm": share("gpu_gemm", "rows_gemm.1", gpu.flops_per_s),
            "gpu_bandwidth": share("gpu_bandwidth", "weights_gemm.1", gpu.bandwidth_bytes_per_s),
            "gpu_overlap": 0.0,
            "gpu_attention": share("gpu_attention", "causal_attention.1", gpu.flops_per_s),
        }
        sources["efficiencies.gpu_overlap"] = "chosen: the two figures of rows and weights are of times that add up"
    if not is_cuda and "rows_experts.1" in found:
        on_device["gpu_experts"] = share("gpu_experts", "rows_experts.1", gpu.flops_per_s)
        bandwidth = share("gpu_experts_bandwidth", "weights_experts.1", gpu.bandwidth_bytes_per_s)
        on_device["gpu_experts_bandwidth"] = bandwidth
    prompt_names = [f"prompt_attention_{dim}.{attending}" for dim in (host_probes.HEAD_DIM, host_probes.HALF_HEAD_DIM)]
    prompt_flops, logit_flops = flops_and_logit_flops(*(found[name].value for name in prompt_names))
    how = f"measured: {' and '.join(prompt_names)}"
    sources |= dict.fromkeys(("efficiencies.cpu_prompt_attention", "efficiencies.cpu_logit_flops"), how)
    efficiencies = KernelEfficiencies(
        cpu_prompt_attention=prompt_flops / cpu_flops,
        cpu_logit_flops=logit_flops,
        cpu_attention_bandwidth=share("cpu_attention_bandwidth", f"attention_read.{attending}", host_read),
        cpu_attention_flops=share("cpu_attention_flops", f"attention_cached.{attending}", cpu_flops),
        cpu_experts_bandwidth=share("cpu_experts_bandwidth", f"expert_ffn_read.{attending}", host_read),
        # The peak is of fp32; experts in bfloat16 go beyond it where there are matrix units or dot products.
        cpu_gemm=share("cpu_gemm", f"expert_ffn_gemm.{attending}", cpu_flops, BELIEVABLE["efficiencies.cpu_gemm"][1]),
        **on_device,
    )
    disk = None
    if disk_capacity_bytes is not None:
        read = take("disk.read_bytes_per_s", "disk_read")
        disk = DiskLevel(name="file system", capacity_bytes=disk_capacity_bytes, read_bytes_per_s=read)
    sources["overheads.cpu_task_s"] = f"measured: attention_task.{attending}"
    return HardwareProfile(
        name=f"{gpu.name} beside {cpu_name()}, {num_threads} threads",
        gpu=gpu,
        cpu=CpuLevel(
            name=cpu_name(),
            memory_bytes=memory_for_host,
            bandwidth_bytes_per_s=host_read,
            flops_per_s=cpu_flops,
            num_threads=num_threads,
        ),
        link=link,
        disk=disk,
        limits=limits,
        efficiencies=efficiencies,
        overheads=TaskOverheads(cpu_task_s=found[f"attention_task.{attending}"].value),
        sources=sources,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def flops_and_logit_flops(flops_per_s: float, half_flops_per_s: float) -> tuple[float, float]:
    """(FLOP/s of QK^T and PV alone, what a logit costs beside them in FLOPs at that speed) from FLOP/s at HEAD_DIM and
    at half of it, where a logit takes 4 D / (FLOP/s) + (a time of its own)."""
    # Others' load can turn the line over: logits are taken to cost something between nothing and nearly everything.
    s_per_flop = 2.0 / flops_per_s - 1.0 / half_flops_per_s
    s_per_flop = min(max(s_per_flop, LEAST_FLOPS_SHARE / flops_per_s), 1.0 / flops_per_s)
    return 1.0 / s_per_flop, 4.0 * host_probes.HEAD_DIM * (1.0 / flops_per_s - s_per_flop) / s_per_flop


def _device(
    take: Callable[..., float], is_cuda: bool, sources: dict[str, str], limits: HostLimits, memory_bytes: int
) -> tuple[GpuLevel, HostLink, int]:
    """The device, its link, and what of the host's memory is left to the host."""
    kind = "cuda" if is_cuda else "emulated"
    link = HostLink(
        h2d_bytes_per_s=take("link.h2d_bytes_per_s", f"{kind}_h2d"),
        d2h_bytes_per_s=take("link.d2h_bytes_per_s", f"{kind}_d2h"),
        bidirectional_share=take("link.bidirectional_share", f"{kind}_both_ways_share"),
        latency_s=take("link.latency_s", f"{kind}_copy_latency"),
    )
    if is_cuda:
        sources["gpu.memory_bytes"] = "CUDA driver"
        properties = torch.cuda.get_device_properties(0)
        gpu = GpuLevel(
            name=properties.name,
            memory_bytes=properties.total_memory,
            bandwidth_bytes_per_s=take("gpu.bandwidth_bytes_per_s", "cuda_memory"),
            flops_per_s=take("gpu.flops_per_s", "cuda_gemm"),
            # One figure for the link is all that is measured: alike GPUs, planned as if they shared it.
            num_gpus=torch.cuda.device_count(),
        )
        return gpu, link, memory_bytes
    available = memory_bytes if limits.cgroup_memory_bytes is None else min(memory_bytes, limits.cgroup_memory_bytes)
    device_bytes = int(available * EMULATED_MEMORY_SHARE)
    sources["gpu.memory_bytes"] = f"chosen: {EMULATED_MEMORY_SHARE:.0%} of the host's memory, for the emulated device"
    sources["cpu.memory_bytes"] = "/proc/meminfo and cgroup, less the emulated device's"
    gpu = GpuLevel(
        name=EMULATED_GPU_NAME,
        memory_bytes=device_bytes,
        bandwidth_bytes_per_s=take("gpu.bandwidth_bytes_per_s", "host_read.1"),
        flops_per_s=take("gpu.flops_per_s", "gemm_bfloat16.1", "gemm_float32.1"),
    )
    return gpu, link, available - device_bytes


def _warnings(readings: Sequence[Reading], load_average: float, num_threads: int) -> list[str]:
    warnings = [
        f"{reading.name} {reading.note}" for reading in readings if reading.name == "disk_read" and reading.best is None
    ]
    if load_average > BUSY_LOAD_PER_CPU * num_threads:
        warnings.append(
            f"the machine was busy (load {load_average:.1f} on {num_threads} CPUs): the figures are lower bounds, "
            f"measure again with --refresh when it is idle"
        )
    return warnings
