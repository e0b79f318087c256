"""The solver's plans against the oracle, and what happens when the solver is missing, wrong or out of time."""

import subprocess
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.plan_draws import GIB, Draw, draw, with_memory
from vllm_moe_lightning.errors import PolicyInfeasibleError
from vllm_moe_lightning.hardware import CpuLevel, GpuLevel, HardwareProfile, HostLink
from vllm_moe_lightning.model_spec import AttentionSpec, MoeModelSpec
from vllm_moe_lightning.policy import milp, search
from vllm_moe_lightning.policy.brute_force import brute_force
from vllm_moe_lightning.policy.grid import tabulate
from vllm_moe_lightning.policy.limits import PlanLimits
from vllm_moe_lightning.policy.screening import screen
from vllm_moe_lightning.policy.search import find_policy
from vllm_moe_lightning.workload import Workload

NUM_DRAWS = 200
FEW_DRAWS = 40


def assert_as_good_as_brute_force(drawn: Draw) -> None:
    best = brute_force(tabulate(*drawn.all))
    if best is None:
        with pytest.raises(PolicyInfeasibleError, match="smallest change that fits"):
            find_policy(*drawn.all)
        return
    planned = find_policy(*drawn.all)
    assert planned.found_by == "highs" or any("not believed" in warning for warning in planned.warnings)
    assert planned.tokens_per_s >= (1 - 1e-3) * 1e3 / best.ms_per_token


@pytest.mark.parametrize("seed", range(FEW_DRAWS))
def test_the_plan_is_as_good_as_brute_force(seed: int) -> None:
    assert_as_good_as_brute_force(draw(seed))


@pytest.mark.parametrize("seed", range(FEW_DRAWS, NUM_DRAWS))
def test_the_plan_is_as_good_as_brute_force_on_more_draws(seed: int) -> None:
    assert_as_good_as_brute_force(draw(seed))


@pytest.mark.parametrize("seed", range(FEW_DRAWS))
def test_the_solver_alone_agrees_with_brute_force_on_the_rows_it_sees(seed: int) -> None:
    """Without screening's plan in hand and without the search around it."""
    screened = screen(tabulate(*draw(seed).all))
    best = brute_force(screened.table) if screened.num_feasible else None
    if best is None:
        return
    plan = milp.solve_milp(screened.table, 10.0)
    assert plan.status == "optimal"
    assert plan.ms_per_token == pytest.approx(best.ms_per_token, rel=1e-3)


def test_most_draws_have_a_plan() -> None:
    """Else the tests above would show little."""
    found = [screen(tabulate(*draw(seed).all)).incumbent is not None for seed in range(FEW_DRAWS)]
    assert 0.5 < np.mean(found) < 1.0


@pytest.mark.parametrize("seed", range(10))
def test_the_bound_never_drops_the_best_row(seed: int) -> None:
    """What the solver may choose from holds the best plan of the whole table, ties apart."""
    table = tabulate(*draw(seed, small=True).all)
    best = brute_force(table)
    if best is None:
        return
    kept = brute_force(screen(table).table)
    assert kept is not None
    assert kept.ms_per_token <= best.ms_per_token * (1 + 5e-4)


# B28: a feasible plan called infeasible, or a worse optimum


def b28_machine(host_gib: int) -> HardwareProfile:
    """Coefficients far apart: terabytes of memory, 2 KiB of KV per token."""
    return HardwareProfile(
        name="b28",
        gpu=GpuLevel(name="b28", memory_bytes=24 * GIB, bandwidth_bytes_per_s=1e12, flops_per_s=3e14),
        cpu=CpuLevel(name="b28", memory_bytes=host_gib * GIB, bandwidth_bytes_per_s=2e11, flops_per_s=2e12),
        link=HostLink(h2d_bytes_per_s=25e9, d2h_bytes_per_s=25e9),
    )


B28_MODEL = MoeModelSpec(
    name="b28",
    model_type="b28",
    num_layers=4,
    num_dense_layers=0,
    hidden=4096,
    vocab=32000,
    num_experts=64,
    top_k=2,
    expert_intermediate=14336,
    attention=AttentionSpec.grouped_query(4096, 32, 1, 128),
)


@pytest.mark.parametrize("presolve", ["on", "off"])
def test_b28_throughput_never_falls_as_memory_grows_and_equals_brute_force(
    monkeypatch: pytest.MonkeyPatch, presolve: str
) -> None:
    assert B28_MODEL.kv_bytes_per_token == 2048
    monkeypatch.setattr(milp, "SOLVER_OPTIONS", {**milp.SOLVER_OPTIONS, "presolve": presolve})
    workload, limits = Workload(512, 128), PlanLimits(max_num_seqs=4096)
    before = 0.0
    for exponent in range(13):
        hardware = b28_machine(2**exponent)
        best = brute_force(tabulate(B28_MODEL, hardware, workload, limits))
        if best is None:
            with pytest.raises(PolicyInfeasibleError):
                find_policy(B28_MODEL, hardware, workload, limits)
            assert before == 0.0
            continue
        planned = find_policy(B28_MODEL, hardware, workload, limits)
        assert planned.found_by == "highs"
        assert planned.tokens_per_s >= (1 - 1e-3) * 1e3 / best.ms_per_token
        assert planned.tokens_per_s >= (1 - 1e-3) * before
        before = planned.tokens_per_s
    assert before > 0.0


def feasible_draw() -> Draw:
    drawn = draw(1, small=True)
    hardware = with_memory(drawn.hardware, gpu_bytes=200 * GIB, host_bytes=2000 * GIB)
    return replace(drawn, hardware=hardware, limits=replace(drawn.limits, max_num_seqs=256))


def test_b28_a_solver_that_says_infeasible_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = feasible_draw()
    expected = find_policy(*drawn.all)

    def lie(table: object, time_limit_s: float) -> None:
        raise PolicyInfeasibleError("HiGHS: infeasible")

    monkeypatch.setattr(milp, "solve_milp", lie)
    planned = find_policy(*drawn.all)
    assert planned.tokens_per_s >= expected.tokens_per_s * (1 - 1e-2)
    assert [w for w in planned.warnings if "infeasible" in w and "not believed" in w]


def test_b28_without_any_plan_in_hand_every_choice_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = feasible_draw()
    expected = find_policy(*drawn.all)
    monkeypatch.setattr(search, "screen", lambda table: replace(screen(table), incumbent=None, num_feasible=0))
    planned = find_policy(*drawn.all)
    assert planned.found_by == "brute_force"
    assert planned.tokens_per_s >= expected.tokens_per_s * (1 - 1e-6)
    assert planned.warnings


@pytest.mark.parametrize("broken", ["too many layers", "too slow"])
def test_b28_a_wrong_plan_of_the_solver_is_not_used(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    drawn = feasible_draw()
    if broken == "too many layers":
        needed = drawn.model.always_resident_bytes + 3.5 * drawn.model.expert_layer_bytes + GIB
        drawn = replace(drawn, hardware=with_memory(drawn.hardware, gpu_bytes=int(needed / 0.9)))
    expected = find_policy(*drawn.all)
    solve = milp.solve_milp

    def lie(table, time_limit_s):
        plan = solve(table, time_limit_s)
        if broken == "too many layers":
            return replace(plan, choice=(float(drawn.model.num_moe_layers), 0.0, 0.0))
        worst = int(np.argmax(table.ms_per_token(table.min_resident, 0.0, table.min_disk)))
        return replace(plan, row=worst, choice=(float(table.min_resident[worst]), 0.0, 0.0))

    if broken == "too slow":
        # Screening passes on near-ties only; let it pass on everything that fits.
        monkeypatch.setattr("vllm_moe_lightning.policy.screening.MIN_ROWS", 2000)
        monkeypatch.setattr("vllm_moe_lightning.policy.screening.MAX_ROWS", 2000)
        monkeypatch.setattr(milp, "solve_milp", lambda table, limit: lie_slow(table))

        def lie_slow(table):
            worst = int(np.argmax(table.ms_per_token(table.min_resident, 0.0, table.min_disk)))
            return milp.MilpPlan(worst, (float(table.min_resident[worst]), 0.0, 0.0), 1.0, (), "optimal")
    else:
        monkeypatch.setattr(milp, "solve_milp", lie)
    planned = find_policy(*drawn.all)
    assert planned.fits
    assert planned.found_by == "screening"
    assert planned.warnings
    assert planned.tokens_per_s >= expected.tokens_per_s * (1 - 1e-2)


def test_a_time_limit_still_gives_a_plan_that_fits() -> None:
    drawn = feasible_draw()
    planned = find_policy(drawn.model, drawn.hardware, drawn.workload, replace(drawn.limits, time_limit_s=1e-9))
    assert planned.fits
    assert planned.tokens_per_s >= find_policy(*drawn.all).tokens_per_s * (1 - 1e-2)


def test_the_constraints_that_hold_a_plan_back_are_named() -> None:
    drawn = feasible_draw()
    small = with_memory(drawn.hardware, host_bytes=int(drawn.model.expert_bytes_total / 0.9 * 1.02))
    limits = replace(drawn.limits, max_num_seqs=None, attention_on_gpu=False)
    needed = drawn.model.always_resident_bytes + 3.5 * drawn.model.expert_layer_bytes + GIB
    planned = find_policy(drawn.model, with_memory(small, gpu_bytes=int(needed / 0.9)), drawn.workload, limits)
    assert any(name.endswith("_time") for name in planned.tight_constraints)
    assert {"gpu_memory", "host_memory"} & set(planned.tight_constraints)


# B29: HiGHS missing or clashing


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


LOAD = "from vllm_moe_lightning.policy.milp import load_solver; load_solver(); print('loaded')"


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("import sys; sys.modules['cvxpy'] = None", "pip install cvxpy highspy"),
        ("import sys; sys.modules['highspy'] = None", "pip install --force-reinstall --no-deps highspy"),
        (
            "import sys, types; sys.modules['highspy'] = types.ModuleType('highspy')",
            "pip install --force-reinstall --no-deps highspy",
        ),
    ],
    ids=["no cvxpy", "no highspy", "broken highspy"],
)
def test_b29_a_missing_solver_is_named_with_its_package(before: str, expected: str) -> None:
    result = run_python(f"{before}; {LOAD}")
    last = result.stderr.strip().splitlines()[-1]
    assert result.returncode == 1
    assert "MoeLightningError" in last
    assert expected in last


@pytest.mark.parametrize("order", ["import scipy.optimize; {}", "{}; import scipy.optimize"], ids=["first", "last"])
def test_b29_scipys_own_copy_of_highs_does_not_clash(order: str) -> None:
    solve = "import cvxpy as cp; x = cp.Variable(integer=True); p = cp.Problem(cp.Minimize(x), [x >= 0.5])"
    use_scipy = "scipy.optimize.milp([1.0], integrality=[1], bounds=scipy.optimize.Bounds(0.5, 9))"
    code = order.format(LOAD) + f"; {solve}; p.solve(solver=cp.HIGHS); assert x.value == 1; {use_scipy}"
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_b29_the_plugin_loads_without_the_solver() -> None:
    code = "import sys; sys.modules['cvxpy'] = sys.modules['highspy'] = None; import vllm_moe_lightning, "
    code += "vllm_moe_lightning.config, vllm_moe_lightning.policy.policy, vllm_moe_lightning.policy.milp"
    assert run_python(code).returncode == 0


def test_the_planner_loads_neither_torch_nor_vllm() -> None:
    code = f"{LOAD}; import sys; import vllm_moe_lightning.policy.sensitivity; "
    code += "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_the_solver_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    code = f"{LOAD}; from tests.helpers.plan_draws import draw; "
    code += "from vllm_moe_lightning.policy.search import find_policy; "
    code += "from tests.unit.policy.test_milp import feasible_draw; find_policy(*feasible_draw().all)"
    result = run_python(code)
    assert result.stdout == "loaded\n", result.stderr


def test_no_warning_escapes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_policy(*feasible_draw().all)
