# SPDX-License-Identifier: Apache-2.0
"""What the scheduler counts of a step, and how long requests waited for KV blocks."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_moe_lightning.integration import scheduler_figures
from vllm_moe_lightning.integration.metrics_file import METRICS, MetricsFile, read_metrics
from vllm_moe_lightning.integration.scheduler_figures import KvWaits, SchedulerFigures


def step(scheduled: dict[str, int], new: tuple[str, ...] = (), resumed: tuple[str, ...] = (), preempted=None):
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed)),
        preempted_req_ids=preempted,
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(scheduler_figures.time, "monotonic", lambda: now.s)
    return now


def test_a_wait_is_counted_once_and_lasts_from_the_first_refusal_to_the_start(clock: SimpleNamespace) -> None:
    waits = KvWaits()
    waits.refused("a")
    clock.s += 2
    waits.refused("a")
    waits.refused("b")
    clock.s += 1
    assert (waits.num_requests, waits.num_waiting, waits.total_s) == (2, 2, 4.0)
    waits.ended("a")
    waits.ended("never refused")
    clock.s += 5
    assert (waits.num_requests, waits.num_waiting, waits.total_s) == (2, 1, 9.0)
    waits.ended("b")
    clock.s += 5
    assert (waits.num_waiting, waits.total_s) == (0, 9.0)


def test_prompts_are_told_from_decoded_tokens_to_the_last_one() -> None:
    """A prompt's last chunk may be one token, and a request that comes back reads its answer again."""
    figures = SchedulerFigures(None, KvWaits())
    figures.count_step(
        step({"new": 30, "started": 1, "decoding": 1, "resumed": 44}, ("new",), ("resumed",)), ["started"]
    )
    assert (figures.prefill_tokens, figures.decode_tokens, figures.num_admitted) == (75, 1, 2)
    figures.count_step(step({"new": 1, "decoding": 1}, preempted={"resumed"}), ["not in this step"])
    assert (figures.prefill_tokens, figures.decode_tokens, figures.num_preemptions) == (75, 3, 1)


def test_all_metrics_of_the_scheduler_are_published_from_the_start_and_removed_at_the_end(tmp_path: Path) -> None:
    figures = SchedulerFigures(MetricsFile(tmp_path, {"model_name": "tiny", "engine": "0"}, None), KvWaits())
    published = read_metrics(tmp_path)
    assert {key[0] for key in published} == {name for name, metric in METRICS.items() if metric.is_of_scheduler}
    assert not any(published.values())
    figures.count_step(step({"a": 7}, ("a",)), [])
    figures.publish(kv_reserved_ratio=0.5, step_tokens=7)
    assert read_metrics(tmp_path)[("scheduled_tokens", "prefill")] == 7
    assert read_metrics(tmp_path)[("kv_reserved_ratio",)] == 0.5
    figures.close()
    assert read_metrics(tmp_path) == {}


def test_the_scheduler_cannot_write_a_metric_of_a_rank(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="of a rank"):
        MetricsFile(tmp_path, {}, None).set("bytes_paged", 1.0)
