"""What a machine can do: memory levels, links and kernel efficiencies, each figure with its source.

Decides which readings are believable. How they become times is cost_model's business; measuring them is profiling's.
Figures of `GpuLevel` are of one GPU; those of `HostLink` are of the whole machine, all its GPUs together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

MIB = 1 << 20
GIB = 1 << 30
EMULATED_GPU_NAME = "emulated device"
"""Of a machine without a GPU: its memory is a part of the host's, its FLOP/s are a core's."""


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the levels: no unknown keys, no change after parsing."""


class GpuLevel(_Strict, frozen=True):
    """One GPU: datasheet peaks for dense 16-bit work. `KernelEfficiencies` says what is reached of them."""

    name: str
    memory_bytes: int
    """As the driver reports it, which is less than the datasheet's round figure."""
    bandwidth_bytes_per_s: float
    flops_per_s: float
    num_gpus: int = 1

    @property
    def total_memory_bytes(self) -> int:
        return self.memory_bytes * self.num_gpus

    @property
    def total_bandwidth_bytes_per_s(self) -> float:
        return self.bandwidth_bytes_per_s * self.num_gpus

    @property
    def total_flops_per_s(self) -> float:
        return self.flops_per_s * self.num_gpus


class CpuLevel(_Strict, frozen=True):
    """The host: all sockets that we may use."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    """Reads with all threads, not the datasheet's channels x rate."""
    flops_per_s: float
    """fp32 vector peak, which is what CPU attention and a CPU GEMM without matrix units are bound by."""
    num_threads: int = 1


class DiskLevel(_Strict, frozen=True):
    """A file system that pages can be read from directly, as a third level below host memory."""

    name: str
    capacity_bytes: int
    read_bytes_per_s: float


class HostLink(_Strict, frozen=True):
    """Both directions between host and GPUs, with pinned memory."""

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    bidirectional_share: float = 0.9
    """Share of its speed that each direction keeps while the other runs too. 0.5: the two only take turns."""
    latency_s: float = 10e-6
    """Of one copy, from its launch to its first byte."""

    @property
    def slowdown_per_opposite_s(self) -> float:
        """Seconds that one second of traffic the other way adds, the two overlapped: 1 / share - 1."""
        return 1.0 / self.bidirectional_share - 1.0


class HostLimits(_Strict, frozen=True):
    """What the operating system lets us take of the host. None: no limit is set."""

    cgroup_memory_bytes: int | None = None
    memlock_bytes: int | None = None


class KernelEfficiencies(_Strict, frozen=True):
    """Reached / peak of each kind of kernel. The only place where the model departs from peaks."""

    gpu_gemm: float = 0.6
    """Of the GPU's FLOP/s, for projections and experts of a large micro-batch."""
    gpu_attention: float = 0.35
    """Of the GPU's FLOP/s, for prefill attention."""
    gpu_bandwidth: float = 0.75
    """Of device memory bandwidth, for kernels that stream weights or KV."""
    gpu_experts: float | None = None
    """Of the GPU's FLOP/s, for routed experts, whose grouped GEMM is another kernel. None: as gpu_gemm."""
    gpu_experts_bandwidth: float | None = None
    """Of device memory bandwidth, for the experts' weights. None: as gpu_bandwidth."""
    gpu_overlap: float = 1.0
    """Share of the shorter of a GEMM's two times, arithmetic and memory, that hides behind the longer one. 1: the
    roofline. 0: a core, which first brings a weight into its cache and then computes with it."""
    cpu_attention_bandwidth: float = 0.55
    """Of host bandwidth, for decode attention over paged KV."""
    cpu_attention_flops: float = 0.5
    cpu_prompt_attention: float | None = None
    """Of the CPU's FLOP/s, for attention of prompts there: tiles of many query tokens, with units of 16 bits more than
    1. None, as in profiles from before it was measured: as cpu_attention_flops."""
    cpu_logit_flops: float = 0.0
    """FLOPs, at that speed, that the softmax takes for each (query token, key) of a head, beside QK^T and PV."""
    cpu_experts_bandwidth: float = 0.7
    """Of host bandwidth, for experts on the CPU with few tokens each."""
    cpu_gemm: float = 0.5
    """Of the CPU's FLOP/s, for experts on the CPU with many tokens each. More than 1 where their type has faster units
    than fp32: matrix units, dot products of 16 bits."""
    gpu_memory: float = 0.9
    """Share of device memory that is planned with; the rest is for the CUDA context and fragmentation."""
    host_memory: float = 0.9
    """Share of host memory that is planned with; the rest is for the system and the engine's own processes."""


class TaskOverheads(_Strict, frozen=True):
    """Seconds that a task costs however small it is. Copies have `HostLink.latency_s`."""

    gpu_task_s: float = 150e-6
    """A pre- or post-attention task: some ten kernel launches from Python."""
    cpu_task_s: float = 30e-6
    """Waking the attention threads and joining them."""
    sweep_s: float = 5e-3
    """Once per sweep: scheduler, input preparation, sampling's synchronisation, detokenisation."""


class HardwareProfile(_Strict, frozen=True):
    """One machine. Raises ValueError at construction if a figure is zero, not a number or out of all reason."""

    name: str
    gpu: GpuLevel
    cpu: CpuLevel
    link: HostLink
    disk: DiskLevel | None = None
    limits: HostLimits = HostLimits()
    efficiencies: KernelEfficiencies = KernelEfficiencies()
    overheads: TaskOverheads = TaskOverheads()
    sources: dict[str, str] = {}
    """Where a figure comes from, by its path: {"gpu.memory_bytes": "nvidia-smi", ...}."""
    measured_at: str | None = None
    """ISO time of the measurement; None for presets."""

    def __post_init__(self) -> None:
        wrong = list(unbelievable_readings(self))
        if wrong:
            raise ValueError(f"hardware profile {self.name!r}: " + "; ".join(wrong))

    @property
    def gpu_memory_budget_bytes(self) -> int:
        return int(self.gpu.total_memory_bytes * self.efficiencies.gpu_memory)

    @property
    def host_memory_bytes(self) -> int:
        """What there is of host memory for this process: the machine's or the cgroup's, whichever is less."""
        limit = self.limits.cgroup_memory_bytes
        return self.cpu.memory_bytes if limit is None else min(self.cpu.memory_bytes, limit)

    @property
    def host_memory_budget_bytes(self) -> int:
        return int(self.host_memory_bytes * self.efficiencies.host_memory)


# Lowest and highest believable value. Wide on purpose: an emulated device of a few MiB is a machine too.
_BYTES = (1 * MIB, 1 << 50)
_BYTES_PER_S = (1e6, 1e15)
_FLOPS_PER_S = (1e7, 1e18)
_SHARE = (0.01, 1.0)
_OVERHEAD_S = (0.0, 1.0)
_COUNT = (1, 1 << 14)
BELIEVABLE: dict[str, tuple[float, float]] = {
    "gpu.memory_bytes": _BYTES,
    "gpu.bandwidth_bytes_per_s": _BYTES_PER_S,
    "gpu.flops_per_s": _FLOPS_PER_S,
    "gpu.num_gpus": _COUNT,
    "cpu.memory_bytes": _BYTES,
    "cpu.bandwidth_bytes_per_s": _BYTES_PER_S,
    "cpu.flops_per_s": _FLOPS_PER_S,
    "cpu.num_threads": _COUNT,
    "disk.capacity_bytes": _BYTES,
    "disk.read_bytes_per_s": _BYTES_PER_S,
    "link.h2d_bytes_per_s": _BYTES_PER_S,
    "link.d2h_bytes_per_s": _BYTES_PER_S,
    "link.bidirectional_share": (0.5, 1.0),
    "link.latency_s": _OVERHEAD_S,
    "limits.cgroup_memory_bytes": _BYTES,
    "limits.memlock_bytes": (0, float(1 << 62)),
    **{f"efficiencies.{name}": _SHARE for name in KernelEfficiencies.__struct_fields__},
    "efficiencies.cpu_gemm": (_SHARE[0], 100.0),
    "efficiencies.cpu_prompt_attention": (_SHARE[0], 100.0),
    "efficiencies.cpu_logit_flops": (0.0, 1e5),
    "efficiencies.gpu_overlap": (0.0, 1.0),
    **{f"overheads.{name}": _OVERHEAD_S for name in TaskOverheads.__struct_fields__},
}


def unbelievable_readings(profile: HardwareProfile) -> Iterator[str]:
    """A sentence for each figure that is not a number, not positive where it must be, or out of all reason."""
    for path, (lowest, highest) in BELIEVABLE.items():
        level_name, field = path.split(".")
        level = getattr(profile, level_name)
        value = getattr(level, field) if level is not None else None
        if value is None:
            continue
        if not math.isfinite(value) or not lowest <= value <= highest:
            source = profile.sources.get(path, "no source given")
            yield (
                f"{path} = {value!r} ({source}) is not between {lowest:g} and {highest:g}; "
                f"measure again or set it by hand"
            )


def profile_from_dict(raw: object, where: str = "hardware profile") -> HardwareProfile:
    """Strict: an unknown key, a wrong type or an unbelievable reading is a ValueError that names it."""
    try:
        return msgspec.convert(raw, HardwareProfile, strict=True)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from error


def profile_from_json(text: str | bytes, where: str = "hardware profile") -> HardwareProfile:
    try:
        raw: Any = msgspec.json.decode(text)
    except msgspec.DecodeError as error:  # NaN and Infinity are no JSON, and end here
        raise ValueError(f"{where}: not JSON: {error}") from error
    return profile_from_dict(raw, where)


def profile_to_json(profile: HardwareProfile) -> str:
    return msgspec.json.format(msgspec.json.encode(profile), indent=2).decode() + "\n"


def read_profile(path: Path) -> HardwareProfile:
    return profile_from_json(path.read_bytes(), str(path))


def write_profile(profile: HardwareProfile, path: Path) -> None:
    path.write_text(profile_to_json(profile))
