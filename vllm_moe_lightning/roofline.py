"""The hierarchical roofline: which roof bounds an operation, and on which level it belongs. Eqs 1 to 11 of the paper.

Level i is the GPU, level j the host that holds the data; an operation has one operational intensity on each, FLOPs per
byte touched there. Peaks are taken as they are: kernel efficiencies are for times (kernel_costs), not for roofs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from vllm_moe_lightning.hardware import HardwareProfile
from vllm_moe_lightning.kernel_costs import attention_work, experts_work
from vllm_moe_lightning.model_spec import MoeModelSpec
from vllm_moe_lightning.workload import HrmPolicy, SweepLoad, Workload, decode_load


class Roof(StrEnum):
    GPU_COMPUTE = "GPU compute"
    GPU_MEMORY = "GPU memory"
    LINK = "link"
    CPU_COMPUTE = "CPU compute"
    CPU_MEMORY = "CPU memory"


@dataclass(frozen=True)
class Peaks:
    """P and B of both levels and of the link from the host to the GPU."""

    gpu_flops_per_s: float
    gpu_bytes_per_s: float
    cpu_flops_per_s: float
    cpu_bytes_per_s: float
    link_bytes_per_s: float

    @classmethod
    def of(cls, profile: HardwareProfile) -> Peaks:
        return cls(
            gpu_flops_per_s=profile.gpu.total_flops_per_s,
            gpu_bytes_per_s=profile.gpu.total_bandwidth_bytes_per_s,
            cpu_flops_per_s=profile.cpu.flops_per_s,
            cpu_bytes_per_s=profile.cpu.bandwidth_bytes_per_s,
            link_bytes_per_s=profile.link.h2d_bytes_per_s,
        )


@dataclass(frozen=True)
class Operation:
    """A computation with its FLOPs per byte touched on each level."""

    name: str
    gpu_intensity: float
    """I^i: per kernel, so it grows with the micro-batch."""
    cpu_intensity: float
    """I^j: per byte that leaves the host, so it grows with the whole batch."""


def ridge_intensity(flops_per_s: float, bytes_per_s: float) -> float:
    """Eq. 3: where a level stops being bound by its memory."""
    return flops_per_s / bytes_per_s


def _lowest(roofs: dict[Roof, float]) -> tuple[float, Roof]:
    roof = min(roofs, key=lambda name: roofs[name])
    return roofs[roof], roof


def attainable_on_gpu(peaks: Peaks, operation: Operation) -> tuple[float, Roof]:
    """Eq. 7, data fetched from the host: (FLOP/s, the roof that binds)."""
    return _lowest(
        {
            Roof.GPU_COMPUTE: peaks.gpu_flops_per_s,  # Eq. 4
            Roof.GPU_MEMORY: peaks.gpu_bytes_per_s * operation.gpu_intensity,  # Eq. 5
            Roof.LINK: peaks.link_bytes_per_s * operation.cpu_intensity,  # Eq. 6
        }
    )


def attainable_on_gpu_resident(peaks: Peaks, operation: Operation) -> tuple[float, Roof]:
    """Eq. 8 on the GPU: all data is already there."""
    return _lowest(
        {
            Roof.GPU_COMPUTE: peaks.gpu_flops_per_s,
            Roof.GPU_MEMORY: peaks.gpu_bytes_per_s * operation.gpu_intensity,
        }
    )


def attainable_on_cpu(peaks: Peaks, operation: Operation) -> tuple[float, Roof]:
    """Eq. 8 on the host."""
    return _lowest(
        {
            Roof.CPU_COMPUTE: peaks.cpu_flops_per_s,
            Roof.CPU_MEMORY: peaks.cpu_bytes_per_s * operation.cpu_intensity,
        }
    )


def turning_point_p1(peaks: Peaks) -> float:
    """Eq. 9, solved for I^j: below it, compute where the data is; moving it can't win.

    Host memory faster than the link: the equation holds where the host's compute roof meets the link's. Otherwise the
    link's roof is above the host's everywhere, and moving always wins.
    """
    if peaks.cpu_bytes_per_s < peaks.link_bytes_per_s:
        return 0.0
    return peaks.cpu_flops_per_s / peaks.link_bytes_per_s


def turning_point_p2(peaks: Peaks, gpu_intensity: float) -> float:
    """Eq. 10: from here on the GPU itself binds, and a larger batch (a higher I^j) gains nothing."""
    roof_flops_per_s = min(peaks.gpu_flops_per_s, peaks.gpu_bytes_per_s * gpu_intensity)
    return roof_flops_per_s / peaks.link_bytes_per_s


def balance_gpu_intensity(peaks: Peaks, cpu_intensity: float) -> float:
    """Eq. 11, solved for I^i: the kernel's intensity at which GPU memory and link take equally long. Below it, raise
    the micro-batch."""
    return peaks.link_bytes_per_s * cpu_intensity / peaks.gpu_bytes_per_s


@dataclass(frozen=True)
class Placement:
    """Where an operation belongs, and what it is bound by there."""

    operation: Operation
    on_gpu: bool
    roof: Roof
    flops_per_s: float
    p1: float
    p2: float
    balance_gpu_intensity: float


def place(peaks: Peaks, operation: Operation) -> Placement:
    """The faster of computing on the host and moving the data to the GPU; a tie goes to the host: it moves nothing."""
    gpu_flops_per_s, gpu_roof = attainable_on_gpu(peaks, operation)
    cpu_flops_per_s, cpu_roof = attainable_on_cpu(peaks, operation)
    on_gpu = gpu_flops_per_s > cpu_flops_per_s
    return Placement(
        operation=operation,
        on_gpu=on_gpu,
        roof=gpu_roof if on_gpu else cpu_roof,
        flops_per_s=gpu_flops_per_s if on_gpu else cpu_flops_per_s,
        p1=turning_point_p1(peaks),
        p2=turning_point_p2(peaks, operation.gpu_intensity),
        balance_gpu_intensity=balance_gpu_intensity(peaks, operation.cpu_intensity),
    )


def decode_attention(spec: MoeModelSpec, workload: Workload) -> Operation:
    """Every sequence has its own KV, so its intensity is the same on both levels and for all batches."""
    flops, num_bytes = attention_work(spec, SweepLoad(decode_seqs=1.0, decode_context=workload.mean_decode_context))
    return Operation("attention", flops / num_bytes, flops / num_bytes)


def moe_ffn(spec: MoeModelSpec, workload: Workload, policy: HrmPolicy) -> Operation:
    """Routed experts of one layer: the host gives all of them once per batch, a kernel reads those that are touched."""
    load = decode_load(workload, policy)
    batch_flops, _ = experts_work(spec, load.tokens)
    kernel_flops, kernel_bytes = experts_work(spec, load.tokens / policy.num_micro_batches)
    return Operation("MoE FFN", kernel_flops / kernel_bytes, batch_flops / spec.expert_layer_bytes)


def tokens_to_saturate(spec: MoeModelSpec, peaks: Peaks) -> int:
    """Batch from which streaming all experts is hidden behind GPU compute: P2 at the GPU's compute roof."""
    flops_per_token, _ = experts_work(spec, 1.0)
    intensity = turning_point_p2(peaks, math.inf)
    return math.ceil(intensity * spec.expert_layer_bytes / flops_per_token)
