"""Finds the policy for a model on a machine: grid, screening, MILP, and a check by plain arithmetic before use.

Never trusts a solver: a plan that breaks a constraint is not used, "infeasible" is told only after every choice has
been tried (brute_force), and a plan that screening had in hand replaces a worse one. Each such step is a warning in
the plan. Nothing fits: PolicyInfeasibleError with what is short (shortage).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from vllm_moe_lightning.cost_model import JobCost, SweepCost
from vllm_moe_lightning.errors import PolicyInfeasibleError
from vllm_moe_lightning.hardware import HardwareProfile
from vllm_moe_lightning.memory_model import MemoryNeed
from vllm_moe_lightning.model_spec import MoeModelSpec
from vllm_moe_lightning.policy import milp
from vllm_moe_lightning.policy.brute_force import brute_force
from vllm_moe_lightning.policy.grid import GB, MS, Choice, job_cost, memory_needs, tabulate
from vllm_moe_lightning.policy.limits import Batching, PlanLimits
from vllm_moe_lightning.policy.screening import Screened, screen
from vllm_moe_lightning.policy.shortage import find_shortage
from vllm_moe_lightning.resources import HrmResource
from vllm_moe_lightning.workload import HrmPolicy, Workload

# What a solver's plan may be slower than one already in hand, and its objective off the arithmetic.
TOLERANCE = 1e-3
# KV ratios are planned in steps of this; the engine moves whole blocks anyway.
KV_RATIO_STEP = 1e-4


@dataclass(frozen=True)
class PlannedPolicy:
    """A policy that fits, and what it is expected to do."""

    policy: HrmPolicy
    batching: Batching
    cost: JobCost
    gpu_memory: MemoryNeed
    host_memory: MemoryNeed
    tight_constraints: tuple[str, ...] = ()
    found_by: str = "given"
    """`highs`, or what stood in for it: `screening`, `brute_force`. `given`: the user's own policy, explained."""
    solve_time_s: float = 0.0
    num_choices: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        return self.cost.tokens_per_s

    @property
    def phases(self) -> Mapping[str, tuple[SweepCost, float]]:
        """Phase -> (one sweep, number of sweeps)."""
        phases = {
            "decode" if self.batching is Batching.STATIC else "sweep": (self.cost.decode, self.cost.num_decode_sweeps)
        }
        if self.cost.prefill is not None:
            phases = {"prefill": (self.cost.prefill, self.cost.num_prefill_sweeps), **phases}
        return phases

    @property
    def bottleneck(self) -> HrmResource:
        """The busiest resource of the phase that takes longest."""
        longest, _ = max(self.phases.values(), key=lambda phase: phase[0].time_s * phase[1])
        return longest.bottleneck

    @property
    def fits(self) -> bool:
        return self.gpu_memory.fits and self.host_memory.fits

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        return {
            "policy": {**asdict(self.policy), "batch_size": self.policy.batch_size, "batching": str(self.batching)},
            "predicted": {
                "tokens_per_s": self.tokens_per_s,
                **{
                    phase: {
                        "num_sweeps": num_sweeps,
                        "sweep_s": sweep.time_s,
                        "bottleneck": str(sweep.bottleneck),
                        "busy_s": {str(resource): float(busy_s) for resource, busy_s in sweep.busy_s.items()},
                        "overhead_s": sweep.overhead_s,
                    }
                    for phase, (sweep, num_sweeps) in self.phases.items()
                },
            },
            "bottleneck": str(self.bottleneck),
            "memory": {
                name: {
                    "items_bytes": {item: int(num_bytes) for item, num_bytes in need.items.items()},
                    "need_bytes": int(need.total_bytes),
                    "have_bytes": need.budget_bytes,
                    "fits": bool(need.fits),
                }
                for name, need in (("gpu", self.gpu_memory), ("host", self.host_memory))
            },
            "tight_constraints": list(self.tight_constraints),
            "found_by": self.found_by,
            "num_choices": self.num_choices,
            "solve_time_s": self.solve_time_s,
            "warnings": list(self.warnings),
        }


def find_policy(
    model: MoeModelSpec, hardware: HardwareProfile, workload: Workload, limits: PlanLimits | None = None
) -> PlannedPolicy:
    """The plan with most tokens per second. `solve_time_s` leaves out the import of cvxpy.

    Raises PolicyInfeasibleError if nothing fits, MoeLightningError if cvxpy or HiGHS is missing or broken.
    """
    limits = limits or PlanLimits()
    milp.load_solver()
    started_s = time.perf_counter()
    search = _Search(model, hardware, workload, limits)
    planned = search.run()
    return replace(
        planned,
        solve_time_s=time.perf_counter() - started_s,
        num_choices=search.table.num_rows,
        warnings=tuple(search.warnings),
    )


def explain(
    model: MoeModelSpec, hardware: HardwareProfile, workload: Workload, batching: Batching, policy: HrmPolicy
) -> PlannedPolicy:
    """Time and memory of a policy, whether it fits or not, by plain evaluation of the model."""
    cost = job_cost(model, hardware, workload, batching, policy)
    gpu, host = memory_needs(model, hardware, workload, batching, policy)
    return PlannedPolicy(policy, batching, cost, gpu, host)


class _Search:
    """One search; collects warnings on its way."""

    def __init__(self, model: MoeModelSpec, hardware: HardwareProfile, workload: Workload, limits: PlanLimits) -> None:
        self.model, self.hardware, self.workload, self.limits = model, hardware, workload, limits
        self.table = tabulate(model, hardware, workload, limits)
        self.warnings: list[str] = []

    def run(self) -> PlannedPolicy:
        screened = screen(self.table)
        if screened.gap > TOLERANCE:
            self.warnings.append(f"too many near-equal choices: a plan may be up to {screened.gap:.1%} faster")
        in_hand: PlannedPolicy | None = None
        if screened.incumbent is not None:
            row, choice = screened.incumbent
            in_hand = self._valid(self._planned(int(screened.index[row]), choice, "screening"))
        solved = self._solved(screened) if screened.num_feasible else None
        if solved is not None and in_hand is not None:
            # A time limit leaves whatever the solver had by then.
            if solved.tokens_per_s >= in_hand.tokens_per_s * (1.0 - TOLERANCE):
                return solved
            self.warnings.append("HiGHS's plan is slower than the one that screening found; the latter is used")
        best = in_hand or solved or self._by_brute_force()
        if best is None:
            shortage = find_shortage(self.table)
            raise PolicyInfeasibleError(
                shortage.report(self.model, self.hardware, self.workload, self.limits, self.table)
            )
        return best

    def _solved(self, screened: Screened) -> PlannedPolicy | None:
        """HiGHS's plan; None with a warning if there is none that holds."""
        try:
            plan = milp.solve_milp(screened.table, self.limits.time_limit_s)
        except PolicyInfeasibleError as error:
            self.warnings.append(f"{error}: not believed, every choice is tried instead")
            return None
        planned = self._valid(self._planned(int(screened.index[plan.row]), plan.choice, "highs", plan.tight))
        if planned is not None and 1.0 / planned.tokens_per_s > plan.ms_per_token * MS * (1.0 + TOLERANCE):
            self.warnings.append(
                f"HiGHS says {plan.ms_per_token:.4g} ms per token, the cost model {1.0 / planned.tokens_per_s / MS:.4g}"
            )
        return planned

    def _by_brute_force(self) -> PlannedPolicy | None:
        best = brute_force(self.table)
        if best is None:
            return None
        self.warnings.append("plan found by trying every choice")
        return self._valid(self._planned(best.row, best.choice, "brute_force"))

    def _planned(
        self, row: int, choice: Choice, found_by: str, tight_constraints: tuple[str, ...] = ()
    ) -> PlannedPolicy:
        policy = self.table.policy(row, self._rounded(row, choice))
        planned = explain(self.model, self.hardware, self.workload, self.limits.batching, policy)
        return replace(planned, found_by=found_by, tight_constraints=tight_constraints)

    def _rounded(self, row: int, choice: Choice) -> Choice:
        """R and D whole, and k at the nearest step that fits and is fastest."""
        resident, kv_ratio, disk = float(round(choice[0])), choice[1], float(round(choice[2]))
        if kv_ratio <= 0.0:
            return resident, 0.0, disk
        rows = self.table.rows([row])

        def badness(ratio: float) -> tuple[bool, float]:
            fits = bool(rows.gpu_gb.at(resident, ratio, disk)[0] <= rows.gpu_budget_gb - 1.0 / GB)
            fits &= bool(rows.host_gb.at(resident, ratio, disk)[0] <= rows.host_budget_gb - 1.0 / GB)
            return not fits, float(rows.ms_per_token(resident, ratio, disk)[0])

        steps = math.floor(kv_ratio / KV_RATIO_STEP)
        nearby = [min(round((steps + more) * KV_RATIO_STEP, 6), 1.0) for more in (0, 1)]
        return resident, min([*nearby, kv_ratio], key=badness), disk

    def _valid(self, planned: PlannedPolicy) -> PlannedPolicy | None:
        wrong = self.violations(planned)
        if wrong:
            self.warnings.append(f"the plan of {planned.found_by} breaks {', '.join(wrong)}, and is not used")
        return None if wrong else planned

    def violations(self, planned: PlannedPolicy) -> list[str]:
        """Names of the constraints that a plan breaks, by plain arithmetic on the cost model alone."""
        policy, limits, model, disk = planned.policy, self.limits, self.model, self.hardware.disk
        layers = (policy.num_resident_layers, policy.num_disk_layers)
        disk_bytes = policy.num_disk_layers * model.expert_layer_bytes
        given = {
            "micro_batch_size": limits.micro_batch_size,
            "num_micro_batches": limits.num_micro_batches,
            "num_resident_layers": limits.num_resident_layers,
            "attention_on_gpu": limits.attention_on_gpu,
            "ffn_on_gpu": limits.ffn_on_gpu,
        }
        holds = {
            "gpu_memory": planned.gpu_memory.fits,
            "host_memory": planned.host_memory.fits,
            "all_layers": sum(layers) <= model.num_moe_layers,
            "whole_layers": all(float(count).is_integer() for count in layers),
            "disk": not disk_bytes or (disk is not None and disk_bytes <= disk.capacity_bytes),
            "max_num_seqs": policy.batch_size <= (limits.max_num_seqs or policy.batch_size),
            "fill_max_num_seqs": not limits.fill_max_num_seqs
            or policy.batch_size > (limits.max_num_seqs or 0) - policy.num_micro_batches,
            **{name: value is None or getattr(policy, name) == value for name, value in given.items()},
            "kv_on_host": not limits.kv_on_host or policy.kv_gpu_ratio == 0.0,
            "kv_on_device": not limits.kv_on_device or policy.kv_gpu_ratio == 1.0,
            "finite_throughput": math.isfinite(planned.tokens_per_s) and planned.tokens_per_s > 0.0,
        }
        return [name for name, held in holds.items() if not held]
