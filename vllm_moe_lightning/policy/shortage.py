"""What is missing when nothing fits: need and have per memory, and the smallest change with which a plan exists."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_moe_lightning.hardware import HardwareProfile
from vllm_moe_lightning.memory_model import MemoryNeed
from vllm_moe_lightning.model_spec import MoeModelSpec
from vllm_moe_lightning.policy.grid import GB, Choice, Floats, Line, PlanTable, memory_needs
from vllm_moe_lightning.policy.limits import PlanLimits
from vllm_moe_lightning.policy.screening import FEASIBILITY_GB
from vllm_moe_lightning.workload import Workload

# Asked for on top, so that the change is enough in spite of tolerances and whole bytes.
MARGIN_GB = 2 * FEASIBILITY_GB + 2 / GB

NEGLIGIBLE_GB = 0.0005


@dataclass(frozen=True)
class Shortage:
    """Extra GB that may be planned with. None: no amount of that memory alone would do."""

    extra_gpu_gb: float | None
    extra_host_gb: float | None
    extra_both_gb: tuple[float, float]
    """(GPU, host), the least sum."""
    row: int
    """The choice that comes nearest: the smallest sum of what is short."""
    choice: Choice

    def report(
        self,
        model: MoeModelSpec,
        hardware: HardwareProfile,
        workload: Workload,
        limits: PlanLimits,
        table: PlanTable,
    ) -> str:
        policy = table.policy(self.row, self.choice)
        gpu, host = memory_needs(model, hardware, workload, limits.batching, policy)
        places = [f"on the {'GPU' if on_gpu else 'CPU'}" for on_gpu in (policy.attention_on_gpu, policy.ffn_on_gpu)]
        lines = [
            f"no policy for {model.name} fits {hardware.name}; the nearest has {policy.num_micro_batches} "
            f"micro-batches of {policy.micro_batch_size}, attention {places[0]}, experts {places[1]}, "
            f"{policy.num_resident_layers:g} of {model.num_moe_layers} layers resident:",
            f"  {'memory':<8}{'need':>12}{'have':>12}{'short of':>12}",
            _line("GPU", gpu),
            _line("host", host),
            *(_items("GPU", gpu) + _items("host", host)),
            f"smallest change that fits: {self.cure(hardware)}",
        ]
        if hardware.disk is None and host.free_bytes < 0:
            lines.append("or give the profile a disk, from which layers can be read in every sweep")
        return "\n".join(lines)

    def cure(self, hardware: HardwareProfile) -> str:
        """In bytes of the machine: only a share of them may be planned with."""
        shares = hardware.efficiencies.gpu_memory, hardware.efficiencies.host_memory
        words = []
        if self.extra_host_gb is not None:
            words.append(f"{_rounded_up_gb(self.extra_host_gb / shares[1])} GB more host memory")
        if self.extra_gpu_gb is not None:
            words.append(f"{_rounded_up_gb(self.extra_gpu_gb / shares[0])} GB more GPU memory")
        if not words:
            gpu_gb, host_gb = self.extra_both_gb
            words.append(
                f"{_rounded_up_gb(gpu_gb / shares[0])} GB more GPU memory and "
                f"{_rounded_up_gb(host_gb / shares[1])} GB more host memory"
            )
        return " or ".join(words)


def _rounded_up_gb(gb: float) -> str:
    return f"{np.ceil(gb * 1000) / 1000:.3f}"


def _line(name: str, need: MemoryNeed) -> str:
    short = f"{max(-need.free_bytes, 0.0) / GB:>9.3f} GB" if need.free_bytes < 0 else f"{'-':>12}"
    return f"  {name:<8}{need.total_bytes / GB:>9.3f} GB{need.budget_bytes / GB:>9.3f} GB{short}"


def _items(name: str, need: MemoryNeed) -> list[str]:
    """What a short memory is needed for, largest first."""
    if need.fits:
        return []
    items = sorted(need.items.items(), key=lambda item: -item[1])
    return [
        f"    {name}: {item} {num_bytes / GB:.3f} GB" for item, num_bytes in items if num_bytes >= NEGLIGIBLE_GB * GB
    ]


def find_shortage(table: PlanTable) -> Shortage:
    """Over every row and every number of resident layers; k and D as helpful to host memory as they can be.

    For a given R, more KV on the GPU moves memory from host to GPU about one to one, so the three least changes are at
    the ends: k = 0, the k that the GPU has room for, the k that the host needs, k = 1.
    """
    least = {"gpu": np.inf, "host": np.inf, "both": np.inf}
    both, nearest, choice = (0.0, 0.0), 0, (0.0, 0.0, 0.0)
    for resident in range(table.num_moe_layers + 1):
        disk = np.minimum(table.max_disk, table.num_moe_layers - resident)
        allowed = (table.min_resident <= resident) & (resident <= table.max_resident) & (table.min_disk <= disk)
        index = np.flatnonzero(allowed)
        if not len(index):
            continue
        disk, gpu, host = disk[index], table.gpu_gb.rows(index), table.host_gb.rows(index)
        budgets = ((gpu, table.gpu_budget_gb - MARGIN_GB), (host, table.host_budget_gb - MARGIN_GB))
        for kv_ratio in _kv_ratios(table.max_kv_ratio[index], budgets, resident, disk):
            gpu_gb, host_gb = (line.at(resident, kv_ratio, disk) - budget for line, budget in budgets)
            least["gpu"] = min(least["gpu"], float(gpu_gb[host_gb <= 0.0].min(initial=np.inf)))
            least["host"] = min(least["host"], float(host_gb[gpu_gb <= 0.0].min(initial=np.inf)))
            short = np.maximum(gpu_gb, 0.0) + np.maximum(host_gb, 0.0)
            row = int(np.argmin(short))
            if short[row] < least["both"]:
                least["both"] = float(short[row])
                both = (max(float(gpu_gb[row]), 0.0), max(float(host_gb[row]), 0.0))
                nearest, choice = int(index[row]), (float(resident), float(kv_ratio[row]), float(disk[row]))
    return Shortage(
        extra_gpu_gb=least["gpu"] if np.isfinite(least["gpu"]) else None,
        extra_host_gb=least["host"] if np.isfinite(least["host"]) else None,
        extra_both_gb=both,
        row=nearest,
        choice=choice,
    )


def _kv_ratios(highest: Floats, budgets: tuple[tuple[Line, float], ...], resident: float, disk: Floats) -> list[Floats]:
    ratios = [np.zeros_like(highest)]
    if highest.any():
        ratios.append(highest)
        for line, budget_gb in budgets:
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = (budget_gb - line.at(resident, 0.0, disk)) / line.per_kv_gpu_ratio
            ratios.append(np.clip(np.nan_to_num(ratio), 0.0, highest))
    return ratios
