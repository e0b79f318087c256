"""The oracle: tries every row, every number of resident and disk layers, and the best KV ratio of each.

Slow and plain on purpose. It checks the MILP in the tests, and a solver's "infeasible" before the user is told so.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_moe_lightning.policy.grid import Choice, Floats, Line, PlanTable

# A third of the interval goes with each step: 40 leave 1e-7 of it.
TERNARY_STEPS = 40


@dataclass(frozen=True)
class BruteForcePlan:
    row: int
    choice: Choice
    ms_per_token: float


def brute_force(table: PlanTable) -> BruteForcePlan | None:
    """The fastest plan of the table; None if nothing fits."""
    best: BruteForcePlan | None = None
    for disk in np.unique(np.concatenate([[0.0], np.arange(table.max_disk.max() + 1)])):
        for resident in range(table.num_moe_layers - int(disk) + 1):
            lowest, highest = _kv_ratios_that_fit(table, resident, disk)
            fits = lowest <= highest
            fits &= (table.min_resident <= resident) & (resident <= table.max_resident)
            fits &= (table.min_disk <= disk) & (disk <= table.max_disk)
            index = np.flatnonzero(fits)
            if not len(index):
                continue
            rows, lowest, highest = table.rows(index), lowest[index], highest[index]
            kv_ratio, ms = _best_kv_ratio(rows, resident, disk, lowest, highest)
            winner = int(np.argmin(ms))
            if best is None or ms[winner] < best.ms_per_token:
                choice = (float(resident), float(kv_ratio[winner]), float(disk))
                best = BruteForcePlan(int(index[winner]), choice, float(ms[winner]))
    return best


def _kv_ratios_that_fit(rows: PlanTable, resident: float, disk: float) -> tuple[Floats, Floats]:
    """(lowest, highest); lowest > highest where none fits."""
    lowest, highest = np.zeros(rows.num_rows), rows.max_kv_ratio.copy()
    budgets: tuple[tuple[Line, float], ...] = (
        (rows.gpu_gb, rows.gpu_budget_gb),
        (rows.host_gb, rows.host_budget_gb),
    )
    for line, budget_gb in budgets:
        room, slope = budget_gb - line.at(resident, 0.0, disk), line.per_kv_gpu_ratio
        with np.errstate(divide="ignore", invalid="ignore"):
            crossing = room / slope
        highest = np.where(slope > 0.0, np.minimum(highest, crossing), highest)
        lowest = np.where(slope < 0.0, np.maximum(lowest, crossing), lowest)
        lowest = np.where((slope == 0.0) & (room < 0.0), np.inf, lowest)
    return lowest, highest


def _best_kv_ratio(
    rows: PlanTable, resident: float, disk: float, lowest: Floats, highest: Floats
) -> tuple[Floats, Floats]:
    """(KV ratio, ms per token): the time is convex in the ratio, a sum of maxima of straight lines."""
    if (highest > lowest).any():
        for _ in range(TERNARY_STEPS):
            third = (highest - lowest) / 3
            left, right = lowest + third, highest - third
            go_right = rows.ms_per_token(resident, left, disk) > rows.ms_per_token(resident, right, disk)
            lowest, highest = np.where(go_right, left, lowest), np.where(go_right, highest, right)
    ends = [(ratio, rows.ms_per_token(resident, ratio, disk)) for ratio in (lowest, highest)]
    first_wins = ends[0][1] <= ends[1][1]
    return np.where(first_wins, ends[0][0], ends[1][0]), np.minimum(ends[0][1], ends[1][1])
