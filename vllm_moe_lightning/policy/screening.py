"""Drops the rows that can't win before the solver sees them: a MILP over 100 000 one-hot rows takes minutes.

A row stays only if a lower bound of its time is below the time of some plan already in hand. The bound gives every
resource the best (R, k) for itself alone, so no row that could win is dropped. Nothing here is needed for
correctness: brute_force shares none of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vllm_moe_lightning.policy.grid import Bools, Choice, Floats, Line, PlanTable
from vllm_moe_lightning.policy.limits import LARGEST_NUM_MICRO_BATCHES

# What a solver may overstep a constraint by; kept free, so that plain arithmetic agrees afterwards.
FEASIBILITY_GB = 2e-6
# Rows closer than this are a tie, and the simpler plan wins: far below what the cost model can tell apart.
TIE = 2e-4
MAX_ROWS = 128
# Rows that the solver gets though their bound says no: it shall choose, and show that the bound was right.
MIN_ROWS = 24


@dataclass(frozen=True)
class Screened:
    table: PlanTable
    """The rows that stayed, best bound first; their R and k bounded by what memory allows, their times stretched by
    up to TIE for complexity."""
    index: NDArray[np.intp]
    """Of these rows in the full table."""
    incumbent: tuple[int, Choice] | None
    """The plan in hand: row of `table` and choice."""
    num_feasible: int
    """Rows that may have a feasible choice."""
    gap: float
    """Share of time per token that rows cut off at MAX_ROWS could save at most; 0 as a rule."""


def screen(table: PlanTable) -> Screened:
    possible, bounded = _bounded_by_memory(table)
    index = np.flatnonzero(possible)
    rows = bounded.rows(index)
    if not len(index):
        return Screened(rows, index, None, 0, 0.0)
    rows = _stretched(rows)
    lower_ms = _lower_bound_ms(rows)
    best_ms, choices = _plans_in_hand(rows)
    open_rows = np.flatnonzero(lower_ms <= best_ms.min())
    if len(open_rows) > MAX_ROWS:
        _split_by_resident_layers(rows, open_rows, lower_ms, best_ms, choices)
    leader = int(np.argmin(best_ms))
    has_plan = bool(np.isfinite(best_ms[leader]))
    order = np.argsort(lower_ms, kind="stable")
    num_open = int((lower_ms <= best_ms[leader]).sum())
    kept = order[: min(max(num_open, MIN_ROWS), MAX_ROWS)]
    gap = 0.0
    if num_open > MAX_ROWS:
        gap = max(0.0, 1.0 - float(lower_ms[order[MAX_ROWS]] / best_ms[leader])) if has_plan else 1.0
    kept = np.concatenate([[leader], kept[kept != leader]]).astype(np.intp)
    resident, kv_ratio, disk = (float(array[leader]) for array in choices)
    incumbent = (0, (resident, kv_ratio, disk)) if has_plan else None
    return Screened(rows.rows(kept), index[kept], incumbent, len(index), gap)


def _bounded_by_memory(table: PlanTable) -> tuple[Bools, PlanTable]:
    """(rows that may be feasible, the table with R, k and D bounded by what memory allows one at a time)."""
    room = table.gpu_budget_gb - FEASIBILITY_GB - table.gpu_gb.at(table.min_resident, 0.0, table.min_disk)
    least_room = room - np.minimum(table.gpu_gb.per_kv_gpu_ratio, 0.0) * table.max_kv_ratio
    max_resident = np.minimum(
        table.max_resident, table.min_resident + np.floor(_shares(least_room, table.gpu_gb.per_resident_layer))
    )
    max_kv_ratio = np.clip(_shares(room, table.gpu_gb.per_kv_gpu_ratio), 0.0, table.max_kv_ratio)
    max_disk = np.minimum(table.max_disk, table.num_moe_layers - table.min_resident)
    # Host memory only ever gains from more of the three.
    excess = table.host_gb.at(max_resident, max_kv_ratio, 0.0) - table.host_budget_gb + FEASIBILITY_GB
    needed_disk = np.maximum(np.ceil(_shares(excess, -table.host_gb.per_disk_layer)), table.min_disk)
    needed_disk = np.where(table.max_disk > 0, needed_disk, np.where(excess > 0, np.inf, 0.0))
    possible = (least_room >= 0.0) & (max_resident >= table.min_resident) & (needed_disk <= max_disk)
    bounded = replace(
        table,
        max_resident=max_resident,
        max_kv_ratio=max_kv_ratio,
        min_disk=np.where(possible, needed_disk, table.min_disk),
        max_disk=max_disk,
    )
    return possible, bounded


def _shares(room: Floats, per_unit: Floats) -> Floats:
    """room / per_unit; without end where a unit takes nothing, and below zero where there is no room."""
    without_end = np.where(room >= 0.0, np.inf, -1.0)
    shares: Floats = np.divide(room, per_unit, out=without_end, where=per_unit > 1e-12)
    return shares


def _stretched(rows: PlanTable) -> PlanTable:
    """Times raised by up to TIE: fewer micro-batches and sequences are simpler, and leave memory and latency free."""
    complexity = 0.5 * rows.num_micro_batches / LARGEST_NUM_MICRO_BATCHES + 0.5 * np.log2(rows.batch_size) / 18
    factor = 1.0 + TIE * complexity
    return replace(
        rows,
        times_ms={
            phase: {resource: line.times(factor) for resource, line in lines.items()}
            for phase, lines in rows.times_ms.items()
        },
        overhead_ms=rows.overhead_ms * factor,
    )


def _lower_bound_ms(rows: PlanTable) -> Floats:
    """Each resource's least time over all (R, k) that fit the GPU: a knapsack with two items, solved by filling it with
    the item that saves more per GB first, which is whichever of the two orders saves more."""
    gpu = rows.gpu_gb
    room = rows.gpu_budget_gb - gpu.at(rows.min_resident, 0.0, rows.min_disk)
    layers = rows.max_resident - rows.min_resident
    kv_beside_layers = np.clip(
        _shares(room - gpu.per_resident_layer * layers, gpu.per_kv_gpu_ratio), 0.0, rows.max_kv_ratio
    )
    kv_used = np.maximum(gpu.per_kv_gpu_ratio, 0.0) * rows.max_kv_ratio
    layers_beside_kv = np.clip(_shares(room - kv_used, gpu.per_resident_layer), 0.0, layers)

    def least_ms(line: Line) -> Floats:
        per_layer, per_kv = np.maximum(-line.per_resident_layer, 0.0), np.maximum(-line.per_kv_gpu_ratio, 0.0)
        saved = np.maximum(
            per_layer * layers + per_kv * kv_beside_layers, per_layer * layers_beside_kv + per_kv * rows.max_kv_ratio
        )
        disk = np.where(line.per_disk_layer >= 0.0, rows.min_disk, rows.max_disk)
        least: Floats = line.at(rows.min_resident, 0.0, disk) - saved
        return least

    total = rows.overhead_ms
    for lines in rows.times_ms.values():
        total = total + np.max([least_ms(line) for line in lines.values()], axis=0)
    return total


def _split_by_resident_layers(
    rows: PlanTable, index: NDArray[np.intp], lower_ms: Floats, best_ms: Floats, choices: tuple[Floats, Floats, Floats]
) -> None:
    """Sharper bounds and plans of some rows, in place: R and k compete for GPU memory, and with R fixed the bound no
    longer gives each resource its own share of both."""
    sharper_ms = np.full(len(index), np.inf)
    part = rows.rows(index)
    for resident in range(int(part.min_resident.min()), int(part.max_resident.max()) + 1):
        inside = np.flatnonzero((part.min_resident <= resident) & (resident <= part.max_resident))
        fixed = part.rows(inside)
        ones = np.ones(len(inside))
        possible, fixed = _bounded_by_memory(replace(fixed, min_resident=ones * resident, max_resident=ones * resident))
        inside, fixed = inside[possible], fixed.rows(np.flatnonzero(possible))
        sharper_ms[inside] = np.minimum(sharper_ms[inside], _lower_bound_ms(fixed))
        plans_ms, plans = _plans_in_hand(fixed)
        better = plans_ms < best_ms[index[inside]]
        best_ms[index[inside[better]]] = plans_ms[better]
        for array, new in zip(choices, plans, strict=True):
            array[index[inside[better]]] = new[better]
    lower_ms[index] = np.maximum(lower_ms[index], sharper_ms)


def _plans_in_hand(rows: PlanTable) -> tuple[Floats, tuple[Floats, Floats, Floats]]:
    """(milliseconds, (R, k, D)) of the best of a few obvious choices per row; infinite where none of them fits."""
    best_ms = np.full(rows.num_rows, np.inf)
    best = tuple(np.zeros(rows.num_rows) for _ in range(3))
    gpu = rows.gpu_gb
    room = rows.gpu_budget_gb - FEASIBILITY_GB - gpu.at(0.0, 0.0, rows.min_disk)

    def kv_beside(resident: Floats) -> Floats:
        return np.clip(_shares(room - gpu.per_resident_layer * resident, gpu.per_kv_gpu_ratio), 0.0, rows.max_kv_ratio)

    after_kv = _shares(room - gpu.per_kv_gpu_ratio * rows.max_kv_ratio, gpu.per_resident_layer)
    layers_beside_kv = np.clip(np.floor(after_kv), rows.min_resident, rows.max_resident)
    none = np.zeros(rows.num_rows)
    for resident, kv_ratio in (
        (rows.max_resident, none),
        (rows.max_resident, kv_beside(rows.max_resident)),
        (layers_beside_kv, kv_beside(layers_beside_kv)),
        (rows.min_resident, none),
    ):
        excess = rows.host_gb.at(resident, kv_ratio, 0.0) - rows.host_budget_gb + FEASIBILITY_GB
        needed = np.where(rows.max_disk > 0, np.ceil(_shares(excess, -rows.host_gb.per_disk_layer)), 0.0)
        disk = np.clip(needed, rows.min_disk, np.maximum(rows.max_disk, rows.min_disk))
        fits = rows.gpu_gb.at(resident, kv_ratio, disk) <= rows.gpu_budget_gb - FEASIBILITY_GB / 2
        fits &= rows.host_gb.at(resident, kv_ratio, disk) <= rows.host_budget_gb - FEASIBILITY_GB / 2
        fits &= resident + disk <= rows.num_moe_layers
        ms = np.where(fits, rows.ms_per_token(resident, kv_ratio, disk), np.inf)
        better = ms < best_ms
        best_ms = np.where(better, ms, best_ms)
        best = tuple(np.where(better, new, old) for new, old in zip((resident, kv_ratio, disk), best, strict=True))
    return best_ms, (best[0], best[1], best[2])
