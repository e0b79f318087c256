# SPDX-License-Identifier: Apache-2.0
"""What the worker publishes: counters that never fall, gauges that do, and tokens counted to the last one."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.decoder_engine import DecoderEngine
from tests.helpers.decoder import make_engine, run
from vllm_moe_lightning.engine_plan import PredictedFigures
from vllm_moe_lightning.integration.figures import SampledTokens, WorkerFigures
from vllm_moe_lightning.integration.metrics_file import METRICS, read_metrics
from vllm_moe_lightning.pipeline.report import RunReport

WINDOW_S = 0.2
PREDICTED = PredictedFigures(
    generated_tokens_per_s=60.0, total_tokens_per_s=120.0, sweep_s=0.07, bottleneck="h2d", busy={"h2d": 1.0}
)


def figures_of(engine: DecoderEngine, directory: Path, rank: int = 0) -> WorkerFigures:
    labels = {"model_name": "tiny", "engine": "0"}
    return WorkerFigures(engine.executor, directory, labels, rank, WINDOW_S, 4096, PREDICTED)


def step(new: list[tuple[str, int, int, int]], cached: list[tuple[str, int, int, int]], finished: tuple[str, ...] = ()):
    """new: name, prompt length, computed, scheduled; cached: name, computed, output tokens, scheduled."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, prompt_len=length, prefill_token_ids=None, num_computed_tokens=computed)
            for name, length, computed, _ in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, *_ in cached],
            num_computed_tokens=[computed for _, computed, _, _ in cached],
            num_output_tokens=[output for _, _, output, _ in cached],
        ),
        num_scheduled_tokens={name: scheduled for name, *_, scheduled in [*new, *cached]},
        finished_req_ids=set(finished),
    )


def test_a_request_gets_a_token_once_its_prompt_is_read() -> None:
    sampled = SampledTokens()
    assert sampled.count(step([("whole", 10, 0, 10), ("chunked", 100, 0, 60), ("cached", 40, 32, 8)], [])) == 2
    assert sampled.count(step([], [("whole", 10, 1, 1), ("chunked", 60, 0, 30), ("cached", 40, 1, 1)])) == 2
    assert sampled.count(step([], [("chunked", 90, 0, 10)], finished=("whole", "cached"))) == 1
    # Taken back after 5 tokens, and computed again: prompt and tokens.
    assert sampled.count(step([], [("chunked", 0, 5, 80)])) == 0
    assert sampled.count(step([], [("chunked", 80, 5, 25)])) == 1


def test_a_request_that_comes_back_as_a_new_one_has_its_tokens_to_read_too() -> None:
    """As model runner V2 is told."""
    sampled, again = SampledTokens(), step([("a", 10, 0, 12)], [])
    again.scheduled_new_reqs[0].prefill_token_ids = list(range(15))
    assert sampled.count(again) == 0
    assert sampled.count(step([], [("a", 12, 5, 3)])) == 1


def test_counters_grow_over_a_reset_and_gauges_fall_to_zero(tmp_path: Path) -> None:
    with make_engine(num_micro_batches=3) as engine:
        figures = figures_of(engine, tmp_path)
        run(engine)
        figures.after_step(8)
        figures.publish()
        busy = read_metrics(tmp_path)
        RunReport(engine.executor)
        run(engine)
        figures.publish()
        after_reset = read_metrics(tmp_path)
        time.sleep(1.5 * WINDOW_S)
        figures.publish()
        idle = read_metrics(tmp_path)
        pages = engine.executor.ring.pages_moved
        assert figures.close() is not None
    of_workers = {name for name, metric in METRICS.items() if not metric.is_of_scheduler}
    assert {key[0] for key in busy} == of_workers - {"device_memory_budget_bytes"}
    counters = [key for key in busy if METRICS[key[0]].kind == "counter"]
    assert all(busy[key] <= after_reset[key] == idle[key] for key in counters)
    assert (busy[("sweeps",)], after_reset[("sweeps",)], idle[("generated_tokens",)]) == (4, 8, 8)
    assert idle[("pages_moved",)] == pages > 0
    assert busy[("num_micro_batches",)] == pytest.approx(3)
    assert busy[("achieved_tokens_per_second", "generated")] > 0
    for key in busy:
        if key[0].endswith("_ratio") and not key[0].startswith("predicted"):
            assert 0 < busy[key] <= 1
            assert idle[key] == 0
    bottlenecks = [value for key, value in busy.items() if key[0] == "bottleneck"]
    assert sorted(bottlenecks) == [0, 0, 0, 1]
    assert not any(value for key, value in idle.items() if key[0] in ("bottleneck", "num_micro_batches"))
    assert not any(value for key, value in idle.items() if key[0] == "achieved_tokens_per_second")
    assert idle[("predicted_tokens_per_second", "generated")] == 60.0


def test_only_the_first_rank_speaks_for_the_engine(tmp_path: Path) -> None:
    with make_engine() as engine:
        figures = figures_of(engine, tmp_path, rank=1)
        names = {key[0] for key in read_metrics(tmp_path)}
        assert figures.close() is None
    assert names
    assert all(METRICS[name].is_per_rank for name in names)


def test_figures_are_published_without_anybody_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_moe_lightning.integration.figures.TICK_S", 0.01)
    with make_engine() as engine:
        figures = figures_of(engine, tmp_path)
        run(engine)
        deadline_s = time.monotonic() + 30
        while read_metrics(tmp_path)[("sweeps",)] == 0:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        figures.close()
        assert read_metrics(tmp_path) == {}
