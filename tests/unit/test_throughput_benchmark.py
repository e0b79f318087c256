"""The arithmetic and the guards of benchmarks/throughput.py, without an engine."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks.arm_engine import ArmRun, ArmStarted
from benchmarks.competition import order_of_round, summary_of, unequal_conditions
from benchmarks.job_checkpoint import CheckpointShape
from benchmarks.paper_fit import spec_of
from benchmarks.stock_offload import (
    PREFETCH,
    UVA,
    ModelBytes,
    StockSetting,
    bytes_to_offload,
    fits_without_offload,
    prefetch_settings,
    uva_settings,
)
from benchmarks.throughput import merged
from benchmarks.throughput_arms import (
    OURS,
    STOCK,
    STOCK_CPU,
    Arm,
    EmulatedBudget,
    NotComparableError,
    best_settings,
    check_run,
    cuda_field,
    emulated_field,
)
from benchmarks.workloads import WORKLOADS

GIB = 1 << 30
MODEL = ModelBytes(num_layers=32, layer=3 * GIB, layer_experts=2 * GIB + GIB // 2, other=GIB)
STARTED = ArmStarted(conditions={}, stock_offloaded_bytes=None)
RUN = ArmRun(
    elapsed_s=2.0,
    num_generated=320,
    prefix_hits=0,
    num_preemptions=0,
    others_cpu_share=0.0,
    bytes_paged=1000,
    bytes_paged_expected=1000,
    num_sweeps=10,
)
PAGING = Arm("ours", "ours", must_page=True)


def test_every_arm_is_first_and_every_other_round_runs_backwards() -> None:
    names = ["a", "b", "c"]
    orders = [order_of_round(names, index) for index in range(6)]
    assert all(sorted(order) == names for order in orders)
    assert {order[0] for order in orders} == set(names)
    followers = {(first, second) for order in orders for first, second in pairwise(order)}
    assert ("a", "b") in followers
    assert ("b", "a") in followers


def test_two_arms_swap_places_each_round() -> None:
    assert [order_of_round(["a", "b"], index)[0] for index in range(4)] == ["a", "b", "a", "b"]


def test_a_run_that_pages_all_streamed_layers_in_each_sweep_counts() -> None:
    check_run(PAGING, STARTED, RUN, 320)
    check_run(PAGING, STARTED, replace(RUN, bytes_paged=1100), 320)  # sent ahead for the next run


@pytest.mark.parametrize(
    ("run", "started", "reason"),
    [
        (replace(RUN, num_generated=319), STARTED, "319 tokens of 320"),
        (replace(RUN, prefix_hits=32), STARTED, "32 prompt tokens in its prefix cache"),
        (replace(RUN, bytes_paged=0), STARTED, "moved no page"),
        (replace(RUN, bytes_paged=None, bytes_paged_expected=None), STARTED, "moved no page"),
        (replace(RUN, bytes_paged=500), STARTED, "500 bytes in 10 sweeps"),
        (replace(RUN, bytes_paged=None), replace(STARTED, stock_offloaded_bytes=0), "offloaded nothing"),
    ],
)
def test_a_run_that_measured_something_else_is_refused(run: ArmRun, started: ArmStarted, reason: str) -> None:
    with pytest.raises(NotComparableError, match=reason):
        check_run(PAGING, started, run, 320)


def test_stock_offload_counts_by_what_its_offloader_holds() -> None:
    check_run(PAGING, replace(STARTED, stock_offloaded_bytes=GIB), replace(RUN, bytes_paged=None), 320)


def test_offload_starts_where_the_budget_ends() -> None:
    assert MODEL.total == 97 * GIB
    assert fits_without_offload(MODEL, 100 * GIB, least_kv_bytes=GIB, reserve_bytes=2 * GIB)
    assert bytes_to_offload(MODEL, 100 * GIB, GIB, 2 * GIB) == 0
    assert not fits_without_offload(MODEL, 99 * GIB, GIB, 2 * GIB)
    assert bytes_to_offload(MODEL, 24 * GIB, GIB, 2 * GIB) == 76 * GIB


def test_settings_of_stock_offload_free_what_has_to_go_and_no_more_than_there_is() -> None:
    least = 60 * GIB
    uva, prefetch = list(uva_settings(MODEL, least)), list(prefetch_settings(MODEL, least))
    assert {setting.arm for setting in uva} == {UVA}
    assert {setting.arm for setting in prefetch} == {PREFETCH}
    assert all(setting.offloaded_bytes >= least for setting in uva + prefetch)
    assert all(least <= setting.engine_args["cpu_offload_gb"] * GIB <= 96 * GIB for setting in uva)
    for setting in prefetch:
        args = setting.engine_args
        assert args["offload_num_in_group"] <= args["offload_group_size"]
        layer = MODEL.layer_experts if "offload_params" in args else MODEL.layer
        assert setting.offloaded_bytes - args["offload_prefetch_step"] * layer >= least
    assert len(uva) + len(prefetch) <= 14


def test_what_cannot_be_freed_has_no_setting() -> None:
    assert not list(uva_settings(MODEL, 97 * GIB))
    assert not list(prefetch_settings(MODEL, 97 * GIB))


def test_the_fastest_setting_of_each_arm_is_taken_and_refusals_are_recorded() -> None:
    settings = [StockSetting(arm, {"size": size}, size) for arm in ("x", "y") for size in (1, 2, 3)]

    def rate_of(setting: StockSetting) -> float:
        if setting.offloaded_bytes == 3:
            raise RuntimeError("out of memory")
        return float(setting.offloaded_bytes)

    best, tried = best_settings(settings, rate_of)
    assert {arm: setting.offloaded_bytes for arm, setting in best.items()} == {"x": 2, "y": 2}
    assert [record.get("refused") for record in tried] == [None, None, "out of memory"] * 2


def row(arm: str, rate: float, over: float | None = None, workload: str = "w", **conditions: Any) -> dict[str, Any]:
    more = {} if over is None else {"cgopipe_is_faster_by": {"median": over, "spread": [over, over]}}
    return {
        "workload": workload,
        "padded": False,
        "arm": arm,
        "tokens_per_s": rate,
        "elapsed_s_rounds": [1.0, 1.0, 1.0],
        "others_cpu_share_rounds": [0.1, 0.2, 0.3],
        "prefix_hits": 0,
        "conditions": {"max_num_seqs": 8, **conditions},
        **more,
    }


def test_the_summary_has_medians_over_the_workloads() -> None:
    rows = [row("serial", 1.0, over, workload=f"w{over}") for over in (1.5, 2.0, 4.0)]
    ours = [{**row("cgopipe", rate), "modelled_tokens_per_s": 10.0} for rate in (5.0, 8.0, 9.0)]
    summary = summary_of([*rows, *ours])
    assert summary["cgopipe_is_faster_by"] == {"serial": {"median": 2.0, "spread": [1.5, 4.0]}}
    assert summary["cgopipe_share_of_modelled_bound"]["median"] == pytest.approx(0.8)
    assert summary["num_rounds"] == 3
    assert summary["others_cpu_share"] == pytest.approx(0.2)


def test_settings_that_differ_between_arms_are_named() -> None:
    rows = [row("cgopipe", 2.0, threads=1), row("vLLM in RAM", 1.0, 2.0, threads=2)]
    assert unequal_conditions(rows) == {"threads": {"cgopipe": 1, "vLLM in RAM": 2}}


def test_a_run_replaces_its_workloads_rows_in_the_file_and_keeps_the_others(tmp_path: Path) -> None:
    def result(*workloads: str, rate: float) -> dict[str, Any]:
        rows = [row("cgopipe", rate, workload=name) for name in workloads]
        remarks = [{"workload": name, "padded": False, "rate": rate} for name in workloads]
        return {"rows": rows, "remarks": remarks, "machines": dict.fromkeys(workloads, rate)}

    file = tmp_path / "throughput.json"
    file.write_text(json.dumps(result("a", "b", rate=1.0)))
    both = merged(file, result("b", "c", rate=2.0))
    rates = [(entry["workload"], entry["tokens_per_s"]) for entry in both["rows"]]
    assert rates == [
        ("a", 1.0),
        ("b", 2.0),
        ("c", 2.0),
    ]
    assert [(entry["workload"], entry["rate"]) for entry in both["remarks"]] == [("a", 1.0), ("b", 2.0), ("c", 2.0)]
    assert both["machines"] == {"a": 1.0, "b": 2.0, "c": 2.0}
    assert both["summary"]["num_rounds"] == 3


def test_all_arms_of_the_emulated_device_have_one_budget_one_cache_and_no_prefix_caching() -> None:
    field = emulated_field(WORKLOADS["mtbench-64"], CheckpointShape(), EmulatedBudget(), padded=False)
    assert [arm.name for arm in field.arms] == ["cgopipe", "s2", "s3", "serial", "s4", STOCK_CPU]
    assert {arm.name for arm in field.arms if not arm.must_page} == {STOCK_CPU}
    first, *others = (settings.engine_args for settings in field.engines.values())
    assert all(args == first for args in others)
    assert first["enable_prefix_caching"] is False
    ours = [dict(settings.moe_lightning or {}) for settings in field.engines.values() if settings.moe_lightning]
    for options in ours:
        options.pop("schedule")
    assert ours[0] == ours[1]


def test_only_named_arms_take_part_and_unknown_names_are_refused() -> None:
    field = emulated_field(WORKLOADS["mtbench-64"], CheckpointShape(), EmulatedBudget(), padded=False)
    assert [arm.name for arm in field.only(["s4", "cgopipe"]).arms] == ["cgopipe", "s4"]
    with pytest.raises(ValueError, match="no arms \\['s5'\\]"):
        field.only(["s5"])


@pytest.mark.parametrize(("budget_gib", "fits"), [(24, False), (120, True)])
def test_on_a_gpu_every_arm_has_the_same_budget_and_stock_offloads_what_does_not_fit(
    budget_gib: int, fits: bool
) -> None:
    spec, work = spec_of("mixtral-8x7b"), WORKLOADS["mtbench-128"]
    field = cuda_field(work, spec, budget_gib * GIB, 141 * GIB, padded=False)
    assert field.engines[OURS].moe_lightning is not None
    assert field.engines[OURS].moe_lightning["device_memory_mib"] == budget_gib * 1024
    assert (STOCK in field.engines) == fits
    stock = [settings.engine_args for name, settings in field.engines.items() if name != OURS]
    stock += [setting.engine_args for setting in field.searched]
    assert stock
    assert all(args["gpu_memory_utilization"] == pytest.approx(budget_gib / 141) for args in stock)
    assert {setting.arm for setting in field.searched} == (set() if fits else {UVA, PREFETCH})
    assert all(setting.offloaded_bytes > (spec.total_bytes - budget_gib * GIB) for setting in field.searched)
    assert field.alive_at_once == (not fits)  # three engines of 24 GiB, but not two of 120
