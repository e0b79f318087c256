# SPDX-License-Identifier: Apache-2.0
"""The report counts a run from its start, in plain JSON values."""

import json

from tests.helpers.decoder import make_engine, run, run_dummy
from vllm_moe_lightning.pipeline.report import RunReport


def test_a_report_has_what_the_run_did_since_it_was_begun() -> None:
    with make_engine(num_micro_batches=3) as engine:
        run(engine)
        report = RunReport(engine.executor)
        run_dummy(engine)
        run(engine)
        figures = report.to_dict()
        store = engine.store
    assert json.loads(json.dumps(figures)) == figures or figures["policy"]  # tuples become lists
    assert (figures["device"], figures["policy"]) == ("emulated", engine.policy.to_dict())
    assert (figures["sweeps"], figures["dummy_sweeps"], figures["aborted_sweeps"], figures["refills"]) == (4, 1, 0, 0)
    assert figures["pages_moved"] == 5 * figures["pages_per_sweep"] > 0
    assert figures["bytes_paged"] == 5 * store.sweep_bytes()
    first = figures["bytes_of_first_layer"]
    assert first == store.layers[0].layout.num_bytes
    assert figures["bytes_per_sweep"] == len(store.layers) * first  # all layers are alike
    assert figures["link_bytes"] > figures["bytes_paged"]
    assert figures["cpu_attention_tasks"] == 4 * 3 * 4
    assert figures["expert_bytes_on_host"] == store.host_bytes
    assert figures["device_memory_used_bytes"] >= figures["expert_bytes_on_device"] == store.device_bytes


def test_shares_are_between_0_and_1_and_times_are_positive() -> None:
    with make_engine() as engine:
        report = RunReport(engine.executor)
        run(engine)
        figures = report.to_dict()
    for name in ("link_busy", "d2h_busy", "cpu_attention_busy"):
        assert 0 < figures[name] <= 1  # type: ignore[operator]
    assert 0 < figures["wait_s"] <= figures["sweep_s"] <= figures["elapsed_s"]  # type: ignore[operator]
    assert figures["wait_s"] == sum(figures["wait_s_by_kind"].values())  # type: ignore[attr-defined]


def test_a_run_without_sweeps_has_a_report_too() -> None:
    with make_engine() as engine:
        figures = RunReport(engine.executor).to_dict()
    assert (figures["sweeps"], figures["pages_moved"], figures["link_busy"], figures["wait_s"]) == (0, 0, 0.0, 0)
