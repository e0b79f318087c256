"""The policy search as a mixed-integer linear program over the rows that screening left.

Given:      rows g (micro-batch size, count, places of attention and FFN), each with lines in R, k and D
            for milliseconds per token of every phase and resource, and for GB of both memories.
Decide:     x_g in {0, 1}  the row that is used,
            R_g integer    MoE layers resident on the GPU      (0 unless x_g),
            k_g in [0, 1]  share of the KV cache on the GPU    (0 unless x_g),
            D_g integer    MoE layers read from disk           (0 unless x_g),
            T_pg           milliseconds per token of phase p   (0 unless x_g).
Minimise:   sum_g (sum_p T_pg + overhead_g x_g)
Subject to: sum_g x_g = 1,  T_pg >= every resource's line,  memory lines <= budget x_g,  R_g + D_g <= layers x_g.

Every line is multiplied by its own row's x_g, so no big-M is needed and the relaxation is tight: it's the convex hull
of the rows' polyhedra. GB and ms throughout: in bytes and seconds HiGHS drops coefficients as if they were zero.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np

from vllm_moe_lightning.errors import MoeLightningError, PolicyInfeasibleError
from vllm_moe_lightning.policy.grid import Choice, Line, PlanTable
from vllm_moe_lightning.policy.screening import FEASIBILITY_GB

SOLVER_OPTIONS: dict[str, Any] = {"mip_rel_gap": 1e-5}
LARGEST_VIOLATION = 1e-5
TRIAL_TIME_LIMIT_S = 10.0
# What cvxpy uses of highspy.
HIGHSPY_NAMES = ("Highs", "HighsModel", "HighsVarType", "MatrixFormat")
# Between plans of equal speed: keep more layers on the GPU, and touch the disk and the GPU's KV less.
PREFERENCE = 1e-6
# A constraint with less slack than this share of its right-hand side is called tight.
TIGHT = 0.01


@dataclass(frozen=True)
class MilpPlan:
    row: int
    choice: Choice
    """R and D whole; k as solved, clipped to its range."""
    ms_per_token: float
    """The solver's objective; for a cross-check only."""
    tight: tuple[str, ...]
    """Names of the constraints that hold the plan back."""
    status: str


def load_solver() -> Any:
    """The module cvxpy, sure to have HiGHS. Raises MoeLightningError with the pip package that is missing or broken."""
    try:
        cp = importlib.import_module("cvxpy")
    except ImportError as error:
        raise MoeLightningError(f"planning needs cvxpy ({error}); pip install cvxpy highspy") from error
    fault = _highspy_fault()
    if fault is None and cp.HIGHS not in cp.installed_solvers():
        fault = "it imports, but cvxpy refuses it"
    if fault is not None:
        raise MoeLightningError(
            f"planning needs HiGHS through cvxpy, and highspy is missing, too old or broken ({fault}); "
            "pip install --force-reinstall --no-deps highspy"
        )
    return cp


def _highspy_fault() -> str | None:
    """cvxpy lists HiGHS as soon as `import highspy` succeeds, and would fail in the middle of a solve."""
    try:
        highspy = importlib.import_module("highspy")
    except ImportError as error:
        return f"import highspy: {error}"
    missing = [name for name in HIGHSPY_NAMES if not hasattr(highspy, name)]
    return f"it has no {', '.join(missing)}" if missing else None


def try_solver() -> str:
    """Versions of cvxpy and HiGHS, once they have solved a problem of two variables. Raises MoeLightningError."""
    cp = load_solver()
    whole, part = cp.Variable(integer=True, name="whole"), cp.Variable(name="part")
    problem = cp.Problem(cp.Maximize(whole + part), [whole <= 2.5, whole + 2 * part <= 5, part >= 0])
    answer, status = 3.5, _solve(cp, problem, TRIAL_TIME_LIMIT_S)
    if status != "optimal" or abs(problem.value - answer) > LARGEST_VIOLATION:
        raise MoeLightningError(
            f"HiGHS gives {status}, {problem.value} for a problem whose answer is {answer}; "
            "pip install --force-reinstall --no-deps highspy"
        )
    return f"cvxpy {cp.__version__}, highspy {metadata.version('highspy')}"


def solve_milp(table: PlanTable, time_limit_s: float) -> MilpPlan:
    """Raises PolicyInfeasibleError if the solver finds no plan; the caller checks whether to believe it."""
    cp = load_solver()
    rows = table.num_rows
    x = cp.Variable(rows, boolean=True, name="row")
    resident = cp.Variable(rows, integer=True, name="resident_layers")
    # A variable that is zero in every row would only cost time.
    kv_ratio = cp.Variable(rows, name="kv_gpu_ratio") if table.max_kv_ratio.any() else np.zeros(rows)
    disk = cp.Variable(rows, integer=True, name="disk_layers") if table.max_disk.any() else np.zeros(rows)
    phase_ms = {phase: cp.Variable(rows, name=f"{phase}_ms") for phase in table.times_ms}

    def of_chosen_row(line: Line) -> Any:
        return (
            cp.multiply(line.constant, x)
            + cp.multiply(line.per_resident_layer, resident)
            + cp.multiply(line.per_kv_gpu_ratio, kv_ratio)
            + cp.multiply(line.per_disk_layer, disk)
        )

    constraints = {
        "one_row": cp.sum(x) == 1,
        "gpu_memory": of_chosen_row(table.gpu_gb) <= (table.gpu_budget_gb - FEASIBILITY_GB) * x,
        "host_memory": of_chosen_row(table.host_gb) <= (table.host_budget_gb - FEASIBILITY_GB) * x,
        "fewest_resident_layers": resident >= cp.multiply(table.min_resident, x),
        "resident_layers": resident <= cp.multiply(table.max_resident, x),
        "kv_ratio_at_least_0": kv_ratio >= np.zeros(rows),
        "kv_ratio": kv_ratio <= cp.multiply(table.max_kv_ratio, x),
        "fewest_disk_layers": disk >= cp.multiply(table.min_disk, x),
        "disk_layers": disk <= cp.multiply(table.max_disk, x),
        "all_layers": resident + disk <= table.num_moe_layers * x,
    }
    # Eq. 12, phase by phase: a sweep is as slow as its busiest resource.
    for phase, lines in table.times_ms.items():
        for resource, line in lines.items():
            constraints[f"{phase}_{resource}_time"] = phase_ms[phase] >= of_chosen_row(line)
    # What holds for constants only (k or D absent) is no constraint.
    constraints = {name: c for name, c in constraints.items() if isinstance(c, cp.constraints.constraint.Constraint)}

    total_ms = sum(cp.sum(ms) for ms in phase_ms.values()) + table.overhead_ms @ x
    scale = PREFERENCE * float(table.ms_per_token(table.min_resident, 0.0, table.min_disk).min())
    preference = scale * cp.sum(disk + kv_ratio - resident) / table.num_moe_layers
    problem = cp.Problem(cp.Minimize(total_ms + preference), list(constraints.values()))
    status = _solve(cp, problem, time_limit_s)
    if status not in ("optimal", "user_limit") or x.value is None:
        raise PolicyInfeasibleError(f"HiGHS: {status}")
    # A time limit without a feasible point still returns numbers.
    broken = [name for name, c in constraints.items() if np.max(c.violation()) > LARGEST_VIOLATION]
    if broken:
        raise PolicyInfeasibleError(f"HiGHS: {status}, with violated {', '.join(broken)}")

    row = int(np.argmax(x.value))
    values = [getattr(v, "value", v)[row] for v in (resident, kv_ratio, disk)]
    choice = (float(round(values[0])), float(np.clip(values[1], 0.0, 1.0)), float(round(values[2])))
    tight = _tight(constraints, table, row, choice)
    return MilpPlan(row, choice, float(total_ms.value), tight, status)


def _solve(cp: Any, problem: Any, time_limit_s: float) -> str:
    """Solver status; trouble inside the solver is a status too, since the caller has another way to a plan."""
    with warnings.catch_warnings(), _silent_stdout():
        warnings.simplefilter("ignore")  # "may be inaccurate": the violations are checked
        try:
            problem.solve(solver=cp.HIGHS, time_limit=time_limit_s, **SOLVER_OPTIONS)
        except cp.error.SolverError as error:
            return f"solver error: {error}"
    return str(problem.status)


@contextlib.contextmanager
def _silent_stdout() -> Iterator[None]:
    """highspy 1.16 prints a banner from C when its first solver is made, whatever its options say, which would spoil
    JSON on stdout. Remove when it honours `output_flag`."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # no stdout at all
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _tight(constraints: Mapping[str, Any], table: PlanTable, row: int, choice: Choice) -> tuple[str, ...]:
    """Constraints of the chosen row with less than TIGHT slack, or too little for one more layer."""
    rows = table.rows(np.array([row]))
    lines = {"gpu_memory": (rows.gpu_gb, table.gpu_budget_gb), "host_memory": (rows.host_gb, table.host_budget_gb)}
    tight = []
    for name, (line, budget_gb) in lines.items():
        slack = budget_gb - float(line.at(*choice)[0])
        one_more = float(line.per_resident_layer[0]) if choice[0] < table.num_moe_layers else 0.0
        if slack <= max(TIGHT * budget_gb, one_more):
            tight.append(name)
    if choice[0] >= table.num_moe_layers:
        tight.append("all_layers")
    for phase, times in rows.times_ms.items():
        busy_ms = {resource: float(line.at(*choice)[0]) for resource, line in times.items()}
        longest_ms = max(busy_ms.values())
        tight += [f"{phase}_{resource}_time" for resource, ms in busy_ms.items() if ms >= (1 - TIGHT) * longest_ms]
    assert set(tight) <= set(constraints), "a tight constraint that the model does not have"
    return tuple(tight)
