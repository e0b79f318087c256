"""The oracle against the cost model itself, evaluated for one policy at a time."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.plan_draws import draw, with_memory
from vllm_moe_lightning.policy.brute_force import brute_force
from vllm_moe_lightning.policy.grid import tabulate
from vllm_moe_lightning.policy.search import explain


def tiny_draw(seed: int):
    """Few enough choices that the cost model can be asked for each."""
    drawn = draw(seed, small=True)
    model = replace(drawn.model, num_layers=drawn.model.num_dense_layers + 4)
    return replace(drawn, model=model, limits=replace(drawn.limits, max_num_seqs=4))


@pytest.mark.parametrize("seed", range(6))
def test_rows_are_exactly_what_the_cost_model_says(seed: int) -> None:
    drawn = draw(seed, small=True)
    table = tabulate(*drawn.all)
    rng = np.random.default_rng(seed)
    for row in rng.integers(0, table.num_rows, 40):
        resident = rng.integers(table.min_resident[row], table.max_resident[row] + 1)
        disk = min(rng.integers(table.min_disk[row], table.max_disk[row] + 1), table.num_moe_layers - resident)
        if disk < table.min_disk[row]:
            continue
        choice = (resident, rng.random() * table.max_kv_ratio[row], disk)
        planned = explain(drawn.model, drawn.hardware, drawn.workload, drawn.limits.batching, table.policy(row, choice))
        one = table.rows([row])
        assert 1e3 / one.ms_per_token(*choice)[0] == pytest.approx(planned.tokens_per_s, rel=1e-9)
        assert one.gpu_gb.at(*choice)[0] == pytest.approx(planned.gpu_memory.total_bytes / 1e9, rel=1e-9)
        assert one.host_gb.at(*choice)[0] == pytest.approx(planned.host_memory.total_bytes / 1e9, rel=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_no_policy_that_fits_is_faster(seed: int) -> None:
    """Asks the cost model for every policy, with KV ratios in steps of a twentieth."""
    drawn = tiny_draw(seed)
    table = tabulate(*drawn.all)
    fastest = 0.0
    for row in range(table.num_rows):
        residents = range(int(table.min_resident[row]), int(table.max_resident[row]) + 1)
        disks = range(int(table.min_disk[row]), int(table.max_disk[row]) + 1)
        ratios = np.linspace(0.0, 1.0, 21) if table.max_kv_ratio[row] else [0.0]
        for choice in itertools.product(residents, ratios, disks):
            if choice[0] + choice[2] > table.num_moe_layers:
                continue
            policy = table.policy(row, choice)
            planned = explain(drawn.model, drawn.hardware, drawn.workload, drawn.limits.batching, policy)
            if planned.fits:
                fastest = max(fastest, planned.tokens_per_s)
    best = brute_force(table)
    if best is None:
        assert fastest == 0.0
    else:
        assert 1e3 / best.ms_per_token >= fastest * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_its_plan_is_a_plan(seed: int) -> None:
    drawn = draw(seed, small=True)
    table = tabulate(*drawn.all)
    best = brute_force(table)
    if best is None:
        return
    policy = table.policy(best.row, best.choice)
    planned = explain(drawn.model, drawn.hardware, drawn.workload, drawn.limits.batching, policy)
    for need in (planned.gpu_memory, planned.host_memory):
        assert need.total_bytes <= need.budget_bytes * (1 + 1e-9)
    assert planned.tokens_per_s == pytest.approx(1e3 / best.ms_per_token, rel=1e-6)


def test_nothing_fits_in_nothing() -> None:
    drawn = draw(0, small=True)
    hardware = with_memory(drawn.hardware, gpu_bytes=1 << 20, host_bytes=1 << 20)
    assert brute_force(tabulate(drawn.model, hardware, drawn.workload, drawn.limits)) is None
