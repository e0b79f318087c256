"""What would raise throughput most: the plan made anew with a little more of each resource.

Planned anew, not read from dual prices: with more memory the best plan has other integers, where a price says nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from vllm_moe_lightning.hardware import HardwareProfile
from vllm_moe_lightning.model_spec import MoeModelSpec
from vllm_moe_lightning.policy.grid import GB
from vllm_moe_lightning.policy.limits import PlanLimits
from vllm_moe_lightning.policy.search import PlannedPolicy, find_policy
from vllm_moe_lightning.workload import Workload

MORE = 1.1


@dataclass(frozen=True)
class MarginalValue:
    """Of a little more of one resource, the plan adapted to it."""

    change: str
    tokens_per_s: float
    gain: float
    """Relative: 0.05 is 5 % more tokens per second."""


def _more_gpu_memory(hardware: HardwareProfile) -> HardwareProfile:
    gpu = hardware.gpu
    return replace(hardware, gpu=replace(gpu, memory_bytes=gpu.memory_bytes + int(GB / gpu.num_gpus)))


def _more_host_memory(hardware: HardwareProfile) -> HardwareProfile:
    more_bytes = int(10 * GB)
    limit = hardware.limits.cgroup_memory_bytes
    limits = replace(hardware.limits, cgroup_memory_bytes=None if limit is None else limit + more_bytes)
    cpu = replace(hardware.cpu, memory_bytes=hardware.cpu.memory_bytes + more_bytes)
    return replace(hardware, cpu=cpu, limits=limits)


def _faster_link(hardware: HardwareProfile) -> HardwareProfile:
    link = hardware.link
    faster = replace(link, h2d_bytes_per_s=link.h2d_bytes_per_s * MORE, d2h_bytes_per_s=link.d2h_bytes_per_s * MORE)
    return replace(hardware, link=faster)


def _faster(level: str, figure: str) -> Callable[[HardwareProfile], HardwareProfile]:
    def change(hardware: HardwareProfile) -> HardwareProfile:
        old = getattr(hardware, level)
        return replace(hardware, **{level: replace(old, **{figure: getattr(old, figure) * MORE})})

    return change


CHANGES: dict[str, Callable[[HardwareProfile], HardwareProfile]] = {
    "+1 GB GPU memory": _more_gpu_memory,
    "+10 GB host memory": _more_host_memory,
    "+10 % link": _faster_link,
    "+10 % GPU FLOP/s": _faster("gpu", "flops_per_s"),
    "+10 % GPU memory bandwidth": _faster("gpu", "bandwidth_bytes_per_s"),
    "+10 % CPU FLOP/s": _faster("cpu", "flops_per_s"),
    "+10 % host memory bandwidth": _faster("cpu", "bandwidth_bytes_per_s"),
}


def marginal_values(
    model: MoeModelSpec,
    hardware: HardwareProfile,
    workload: Workload,
    limits: PlanLimits,
    planned: PlannedPolicy,
) -> list[MarginalValue]:
    """Largest gain first."""
    values = []
    changes = dict(CHANGES)
    if hardware.disk is not None:
        changes["+10 % disk"] = _faster("disk", "read_bytes_per_s")
    for name, change in changes.items():
        more = find_policy(model, change(hardware), workload, limits).tokens_per_s
        values.append(MarginalValue(name, more, more / planned.tokens_per_s - 1.0))
    return sorted(values, key=lambda value: -value.gain)
