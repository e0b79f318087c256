"""The choices a plan is made from, one row each, with the row's times and memory as straight lines.

A row fixes micro-batch size, count and the places of attention and FFN; what is left, (resident layers R, KV ratio k,
disk layers D), enters the cost model along straight lines, found by evaluating the model itself for all rows at once.
Where the model has a step, with the last streamed layer gone, the two sides are different rows.
Units from here on: GB and milliseconds per generated token, so that a solver sees numbers near one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from vllm_moe_lightning.cost_model import JobCost, static_batch_cost, steady_state_cost
from vllm_moe_lightning.hardware import HardwareProfile
from vllm_moe_lightning.memory_model import MemoryNeed, gpu_memory, host_memory
from vllm_moe_lightning.model_spec import MoeModelSpec
from vllm_moe_lightning.policy.limits import LARGEST_NUM_MICRO_BATCHES, Batching, PlanLimits
from vllm_moe_lightning.resources import HrmResource
from vllm_moe_lightning.workload import HrmPolicy, SweepLoad, Workload, buffered_load, prefill_load

GB = 1e9
MS = 1e-3
# A plan's grid never depends on the hardware: else more memory could move the grid and lose a better plan.
LARGEST_MICRO_BATCH = 4096

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Choice = tuple[float, float, float]
"""(resident layers R, KV ratio k, disk layers D)"""


@dataclass(frozen=True)
class Line:
    """A quantity of every row, affine in the row's continuous choices. Arrays: [num_rows]."""

    constant: Floats
    per_resident_layer: Floats
    per_kv_gpu_ratio: Floats
    per_disk_layer: Floats

    def at(self, resident: Any, kv_ratio: Any, disk: Any) -> Floats:
        """Numbers or arrays that broadcast against the rows."""
        return cast(
            Floats,
            self.constant
            + self.per_resident_layer * resident
            + self.per_kv_gpu_ratio * kv_ratio
            + self.per_disk_layer * disk,
        )

    def rows(self, index: Any) -> Line:
        return Line(
            self.constant[index],
            self.per_resident_layer[index],
            self.per_kv_gpu_ratio[index],
            self.per_disk_layer[index],
        )

    def times(self, factor: Floats) -> Line:
        return Line(
            self.constant * factor,
            self.per_resident_layer * factor,
            self.per_kv_gpu_ratio * factor,
            self.per_disk_layer * factor,
        )


@dataclass(frozen=True)
class PlanTable:
    """All rows. Arrays: [num_rows]."""

    micro_batch_size: Floats
    num_micro_batches: Floats
    attention_on_gpu: Bools
    ffn_on_gpu: Bools
    min_resident: Floats
    max_resident: Floats
    max_kv_ratio: Floats
    min_disk: Floats
    max_disk: Floats
    times_ms: Mapping[str, Mapping[HrmResource, Line]]
    """Phase -> resource -> milliseconds per generated token. A phase is as long as its busiest resource."""
    overhead_ms: Floats
    """Per generated token, of all phases."""
    gpu_gb: Line
    host_gb: Line
    gpu_budget_gb: float
    host_budget_gb: float
    num_moe_layers: int
    prefill_tokens_per_sweep: int | None
    lookahead: int
    prompts_on_gpu: bool
    """Where decode attention is on the CPU."""
    context_query_tokens: int
    least_kv_ratio: float = 0.0
    """What a choice's KV ratio counts from; the lines do too."""

    @property
    def num_rows(self) -> int:
        return len(self.micro_batch_size)

    @property
    def batch_size(self) -> Floats:
        return self.micro_batch_size * self.num_micro_batches

    def ms_per_token(self, resident: Any, kv_ratio: Any, disk: Any) -> Floats:
        """Of every row: the sum over phases of the busiest resource (Eq. 12), and the overhead."""
        total = self.overhead_ms
        for lines in self.times_ms.values():
            total = total + np.max([line.at(resident, kv_ratio, disk) for line in lines.values()], axis=0)
        return total

    def rows(self, index: Any) -> PlanTable:
        return replace(
            self,
            **{
                name: getattr(self, name)[index]
                for name in (
                    "micro_batch_size", "num_micro_batches", "attention_on_gpu", "ffn_on_gpu", "min_resident",
                    "max_resident", "max_kv_ratio", "min_disk", "max_disk", "overhead_ms",
                )
            },
            times_ms={
                phase: {resource: line.rows(index) for resource, line in lines.items()}
                for phase, lines in self.times_ms.items()
            },
            gpu_gb=self.gpu_gb.rows(index),
            host_gb=self.host_gb.rows(index),
        )  # fmt: skip

    def policy(self, row: int, choice: Choice) -> HrmPolicy:
        resident, kv_ratio, disk = choice
        return HrmPolicy(
            micro_batch_size=int(self.micro_batch_size[row]),
            num_micro_batches=int(self.num_micro_batches[row]),
            attention_on_gpu=bool(self.attention_on_gpu[row]),
            ffn_on_gpu=bool(self.ffn_on_gpu[row]),
            num_resident_layers=int(resident),
            kv_gpu_ratio=self.least_kv_ratio + float(kv_ratio),
            num_disk_layers=int(disk),
            prefill_tokens_per_sweep=self.prefill_tokens_per_sweep,
            lookahead=self.lookahead,
            prompts_on_gpu=self.prompts_on_gpu or bool(self.attention_on_gpu[row]),
            context_query_tokens=self.context_query_tokens,
        )


@dataclass(frozen=True)
class _PolicyArrays:
    """A policy of every row at once: what the cost model reads of HrmPolicy, with arrays for the two sizes."""

    micro_batch_size: Floats
    num_micro_batches: Floats
    attention_on_gpu: bool
    ffn_on_gpu: bool
    prefill_tokens_per_sweep: int | None
    lookahead: int
    prompts_on_gpu: bool
    context_query_tokens: int
    num_resident_layers: float = 0.0
    kv_gpu_ratio: float = 0.0
    num_disk_layers: float = 0.0

    @property
    def batch_size(self) -> Floats:
        return self.micro_batch_size * self.num_micro_batches


def micro_batch_sizes(largest: int = LARGEST_MICRO_BATCH) -> list[int]:
    """Every size up to 128, then steps of at most 1/32: finer than any kernel's efficiency is known."""
    sizes = list(range(1, 129))
    while sizes[-1] < largest:
        sizes.append(sizes[-1] + (1 << (sizes[-1].bit_length() - 6)))
    return [size for size in sizes if size <= largest]


def _sizes_and_counts(limits: PlanLimits) -> tuple[Floats, Floats]:
    sizes = [limits.micro_batch_size] if limits.micro_batch_size else micro_batch_sizes()
    counts = [limits.num_micro_batches] if limits.num_micro_batches else list(range(1, LARGEST_NUM_MICRO_BATCHES + 1))
    size, count = (array.ravel() for array in np.meshgrid(sizes, counts, indexing="ij"))
    if limits.fill_max_num_seqs and limits.max_num_seqs:
        count = np.array([each for each in counts if each <= limits.max_num_seqs])
        return (limits.max_num_seqs // count).astype(float), count.astype(float)
    allowed = size * count <= (limits.max_num_seqs or size.max() * count.max())
    return size[allowed].astype(float), count[allowed].astype(float)


def job_cost(
    spec: MoeModelSpec, profile: HardwareProfile, workload: Workload, batching: Batching, policy: HrmPolicy
) -> JobCost:
    cost = static_batch_cost if batching is Batching.STATIC else steady_state_cost
    return cost(spec, profile, workload, policy)


def peak_load(workload: Workload, batching: Batching, policy: HrmPolicy) -> SweepLoad:
    """The sweep that takes most memory."""
    return prefill_load(workload, policy) if batching is Batching.STATIC else buffered_load(workload, policy)


def memory_needs(
    spec: MoeModelSpec, profile: HardwareProfile, workload: Workload, batching: Batching, policy: HrmPolicy
) -> tuple[MemoryNeed, MemoryNeed]:
    """(GPU, host)"""
    peak = peak_load(workload, batching, policy)
    return gpu_memory(spec, profile, workload, policy, peak), host_memory(spec, profile, workload, policy, peak)


_Key = tuple[str, str]
_OVERHEAD: _Key = ("overhead", "")
_GPU_GB: _Key = ("memory", "gpu")
_HOST_GB: _Key = ("memory", "host")


def _figures(
    spec: MoeModelSpec, profile: HardwareProfile, workload: Workload, batching: Batching, arrays: _PolicyArrays
) -> dict[_Key, Floats]:
    """Everything a row is judged by, at one point of (R, k, D)."""
    policy = cast(HrmPolicy, arrays)
    cost = job_cost(spec, profile, workload, batching, policy)
    gpu, host = memory_needs(spec, profile, workload, batching, policy)
    phases = {"decode": (cost.decode, cost.num_decode_sweeps)}
    if cost.prefill is not None:
        phases["prefill"] = (cost.prefill, cost.num_prefill_sweeps)
    figures: dict[_Key, Any] = {_OVERHEAD: 0.0, _GPU_GB: gpu.total_bytes / GB, _HOST_GB: host.total_bytes / GB}
    for phase, (sweep, num_sweeps) in phases.items():
        ms_per_token = num_sweeps / cost.num_tokens / MS
        figures[_OVERHEAD] += sweep.overhead_s * ms_per_token
        for resource, busy_s in sweep.busy_s.items():
            figures[phase, resource] = busy_s * ms_per_token
    shape = arrays.micro_batch_size.shape
    return {key: np.broadcast_to(np.asarray(value, float), shape) for key, value in figures.items()}


class _Tabulator:
    """Makes the rows of one pair of places after the other."""

    def __init__(self, spec: MoeModelSpec, profile: HardwareProfile, workload: Workload, limits: PlanLimits) -> None:
        self.spec, self.profile, self.workload, self.limits = spec, profile, workload, limits
        self.all_sizes, self.all_counts = _sizes_and_counts(limits)
        self.size, self.count = self.all_sizes, self.all_counts

    def _keep_what_overlaps(self, on_gpu_alone: bool) -> None:
        """Eq. 12 takes all resources to overlap. A micro-batch whose work alternates between GPU and CPU leaves both
        idle in turn unless others run meanwhile: the look-ahead's and one more."""
        self.size, self.count = self.all_sizes, self.all_counts
        overlaps = self.count > self.limits.lookahead
        if not on_gpu_alone and overlaps.any():
            self.size, self.count = self.size[overlaps], self.count[overlaps]

    def block(
        self, attention_on_gpu: bool, ffn_on_gpu: bool, resident_bounds: tuple[int, int], max_disk: int
    ) -> PlanTable:
        """Rows of all sizes and counts. The lines hold for R within the bounds, which are inclusive."""
        min_resident, max_resident = resident_bounds
        limits = self.limits
        least_kv_ratio = float(limits.kv_on_device)
        has_kv_choice = attention_on_gpu and not limits.kv_on_host and not limits.kv_on_device
        self._keep_what_overlaps(attention_on_gpu and (ffn_on_gpu or min_resident == self.spec.num_moe_layers))
        corner = _PolicyArrays(
            self.size,
            self.count,
            attention_on_gpu,
            ffn_on_gpu,
            limits.prefill_tokens_per_sweep,
            limits.lookahead,
            prompts_on_gpu=attention_on_gpu or limits.prompts_on_gpu,
            context_query_tokens=limits.context_query_tokens,
            num_resident_layers=min_resident,
            kv_gpu_ratio=least_kv_ratio,
        )

        def figures(arrays: _PolicyArrays) -> dict[_Key, Floats]:
            return _figures(self.spec, self.profile, self.workload, limits.batching, arrays)

        base = figures(corner)
        more_resident = more_kv = more_disk = base
        if max_resident > min_resident:
            more_resident = figures(replace(corner, num_resident_layers=min_resident + 1))
        if attention_on_gpu and not limits.kv_on_device:
            more_kv = figures(replace(corner, kv_gpu_ratio=1.0))
        if max_disk:
            more_disk = figures(replace(corner, num_disk_layers=1.0))
        lines = {}
        for key, value in base.items():
            resident = more_resident[key] - value
            lines[key] = Line(value - resident * min_resident, resident, more_kv[key] - value, more_disk[key] - value)
        ones = np.ones_like(self.size)
        phases = [phase for phase in ("prefill", "decode") if (phase, HrmResource.GPU) in lines]
        return PlanTable(
            micro_batch_size=self.size,
            num_micro_batches=self.count,
            attention_on_gpu=ones * attention_on_gpu > 0,
            ffn_on_gpu=ones * ffn_on_gpu > 0,
            min_resident=ones * min_resident,
            max_resident=ones * max_resident,
            max_kv_ratio=ones * has_kv_choice,
            min_disk=np.zeros_like(ones),
            max_disk=ones * max_disk,
            times_ms={phase: {resource: lines[phase, resource] for resource in HrmResource} for phase in phases},
            overhead_ms=base[_OVERHEAD],
            gpu_gb=lines[_GPU_GB],
            host_gb=lines[_HOST_GB],
            gpu_budget_gb=self.profile.gpu_memory_budget_bytes / GB,
            host_budget_gb=self.profile.host_memory_budget_bytes / GB,
            num_moe_layers=self.spec.num_moe_layers,
            prefill_tokens_per_sweep=limits.prefill_tokens_per_sweep,
            lookahead=limits.lookahead,
            prompts_on_gpu=limits.prompts_on_gpu,
            context_query_tokens=limits.context_query_tokens,
            least_kv_ratio=least_kv_ratio,
        )


def tabulate(spec: MoeModelSpec, profile: HardwareProfile, workload: Workload, limits: PlanLimits) -> PlanTable:
    """All rows that the limits allow, feasible or not."""
    tabulator = _Tabulator(spec, profile, workload, limits)
    layers = spec.num_moe_layers
    max_disk = 0
    if profile.disk is not None:
        max_disk = int(min(layers, profile.disk.capacity_bytes // spec.expert_layer_bytes))
    fixed = limits.num_resident_layers
    if fixed is not None and not 0 <= fixed <= layers:
        raise ValueError(f"num_resident_layers: {fixed} of the {layers} MoE layers of {spec.name}; give 0..{layers}")
    some = (0, layers - 1) if fixed is None else (fixed, fixed)
    blocks = []
    for attention_on_gpu in _allowed(limits.attention_on_gpu):
        if fixed != layers:
            for ffn_on_gpu in _allowed(limits.ffn_on_gpu):
                blocks.append(tabulator.block(attention_on_gpu, ffn_on_gpu, some, max_disk))
        if fixed is None or fixed == layers:
            # Once every layer is resident the place of the others' experts means nothing.
            ffn_on_gpu = limits.ffn_on_gpu is not False
            blocks.append(tabulator.block(attention_on_gpu, ffn_on_gpu, (layers, layers), 0))
    return _joined(blocks)


def _allowed(fixed: bool | None) -> tuple[bool, ...]:
    return (False, True) if fixed is None else (fixed,)


def _joined(blocks: list[PlanTable]) -> PlanTable:
    def join(parts: list[Any]) -> Any:
        match parts[0]:
            case np.ndarray():
                return np.concatenate(parts)
            case Line():
                names = ("constant", "per_resident_layer", "per_kv_gpu_ratio", "per_disk_layer")
                return Line(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
            case Mapping():
                return {key: join([part[key] for part in parts]) for key in parts[0]}
            case same:
                return same

    return PlanTable(
        **{name: join([getattr(block, name) for block in blocks]) for name in PlanTable.__dataclass_fields__}
    )
