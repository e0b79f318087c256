"""Throughput against host memory by the cost model: CGOPipe, and FlexGen's order S4, each with its own best policy.

The paper says that its upper bound is reached with 2 to 3 times less CPU memory, and shows no measurement of it. Here
both systems plan for the same machine with more and more host memory; the bound is what they reach when it is no limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace as replace_struct

from benchmarks.paper_fit import spec_of
from vllm_moe_lightning.errors import PolicyInfeasibleError
from vllm_moe_lightning.hardware import GIB, HardwareProfile
from vllm_moe_lightning.hardware_presets import preset_profile
from vllm_moe_lightning.policy.limits import Batching, PlanLimits
from vllm_moe_lightning.policy.search import PlannedPolicy, find_policy
from vllm_moe_lightning.workload import Workload

MODEL = "mixtral-8x7b"
NO_LIMIT_GIB = 64 * 1024.0
LEAST_GIB = 32.0
SHARES = (0.5, 0.9)
KV_ITEM = "KV cache"  # of MemoryNeed.items
TOLERANCE_GIB = 1.0
LIMITS = {
    "cgopipe": PlanLimits(batching=Batching.STATIC, attention_on_gpu=False, ffn_on_gpu=True, kv_on_host=True),
    "s4": PlanLimits(batching=Batching.STATIC, attention_on_gpu=True, ffn_on_gpu=True),
}
"""The paper's static batches. S4 may keep a share of the KV cache on the GPU, as FlexGen does."""


@dataclass(frozen=True)
class MemoryCurve:
    """One schedule on one GPU."""

    gpu: str
    schedule: str
    workload: Workload

    def planned(self, host_gib: float) -> PlannedPolicy | None:
        """None: does not fit."""
        try:
            return find_policy(
                spec_of(MODEL), with_host_memory(self.gpu, host_gib), self.workload, LIMITS[self.schedule]
            )
        except PolicyInfeasibleError:
            return None

    def tokens_per_s(self, host_gib: float) -> float:
        planned = self.planned(host_gib)
        return 0.0 if planned is None else planned.tokens_per_s

    def point(self, host_gib: float) -> dict[str, Any]:
        planned = self.planned(host_gib)
        row: dict[str, Any] = {"host_gib": host_gib, "tokens_per_s": None}
        if planned is not None:
            policy = planned.policy
            row |= {
                "tokens_per_s": planned.tokens_per_s,
                "bottleneck": str(planned.bottleneck),
                "micro_batch_size": policy.micro_batch_size,
                "num_micro_batches": policy.num_micro_batches,
                "num_resident_layers": policy.num_resident_layers,
                "kv_gpu_ratio": policy.kv_gpu_ratio,
                "host_bytes_used": planned.host_memory.total_bytes,
                "kv_host_bytes": planned.host_memory.items[KV_ITEM],
            }
        return row


def with_host_memory(gpu: str, host_gib: float) -> HardwareProfile:
    """The preset's machine, with so much memory and no other limit."""
    profile = preset_profile(gpu)
    return replace_struct(profile, cpu=replace_struct(profile.cpu, memory_bytes=int(host_gib * GIB)))


def least_memory_gib(tokens_per_s: Callable[[float], float], wanted: float) -> float | None:
    """By bisection, since more memory never plans slower; None where no memory is enough."""
    low, high = LEAST_GIB, NO_LIMIT_GIB
    if tokens_per_s(high) < wanted:
        return None
    while high - low > max(TOLERANCE_GIB, 0.01 * low):
        # Geometric: what there is to find lies near the lower end.
        middle = (low * high) ** 0.5
        if tokens_per_s(middle) >= wanted:
            high = middle
        else:
            low = middle
    return high


def modelled(gpu: str, workload: Workload, hosts_gib: list[float]) -> dict[str, Any]:
    """Both curves, their bounds, and what memory each share of a bound takes."""
    curves = {schedule: MemoryCurve(gpu, schedule, workload) for schedule in LIMITS}
    bounds = {schedule: curve.tokens_per_s(NO_LIMIT_GIB) for schedule, curve in curves.items()}
    result: dict[str, Any] = {
        "gpu": gpu,
        "model": MODEL,
        "prompt_len": workload.prompt_len,
        "gen_len": workload.gen_len,
        "bound_tokens_per_s": bounds,
        "points": {name: [curve.point(host) for host in hosts_gib] for name, curve in curves.items()},
        "shares": [],
    }
    for share in SHARES:
        own = {name: least_memory_gib(curve.tokens_per_s, share * bounds[name]) for name, curve in curves.items()}
        # The same throughput for both: the lower bound's share, which both can reach.
        level = share * min(bounds.values())
        level_gib = {name: least_memory_gib(curve.tokens_per_s, level) for name, curve in curves.items()}
        level_kv_gib = {name: _kv_gib(curves[name], host_gib) for name, host_gib in level_gib.items()}
        result["shares"].append(
            {
                "share": share,
                "host_gib_of_own_bound": own,
                "s4_over_cgopipe_of_own_bound": _ratio(own),
                "same_tokens_per_s": level,
                "host_gib_at_same_tokens_per_s": level_gib,
                "s4_over_cgopipe_at_same_tokens_per_s": _ratio(level_gib),
                "kv_gib_at_same_tokens_per_s": level_kv_gib,
                "s4_over_cgopipe_of_kv_at_same_tokens_per_s": _ratio(level_kv_gib),
            }
        )
    return result


def _kv_gib(curve: MemoryCurve, host_gib: float | None) -> float | None:
    """Of the host memory, what the KV cache takes: the weights are the same for both."""
    planned = None if host_gib is None else curve.planned(host_gib)
    return None if planned is None else planned.host_memory.items[KV_ITEM] / GIB


def _ratio(host_gib: dict[str, float | None]) -> float | None:
    top, bottom = host_gib["s4"], host_gib["cgopipe"]
    return None if top is None or bottom is None else top / bottom
