# SPDX-License-Identifier: Apache-2.0
"""What a worker writes is what Prometheus reads."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from vllm_moe_lightning.integration.metrics_file import (
    DIRECTORY_PREFIX,
    METRICS,
    PREFIX,
    MetricsCollector,
    MetricsFile,
    read_metrics,
)

LABELS = {"model_name": "tiny", "engine": "0"}


def exposed(directory: Path) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Sample name -> labels and value, as a Prometheus server would read them."""
    registry = CollectorRegistry()
    registry.register(MetricsCollector(directory))
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_counters_and_gauges_of_two_ranks_are_exposed_with_their_labels(tmp_path: Path) -> None:
    for rank in (0, 1):
        file = MetricsFile(tmp_path, LABELS, rank)
        file.set("bytes_paged", 1000.0 + rank)
        file.set("link_busy_ratio", 0.25, "h2d")
        file.set("link_busy_ratio", 0.5 + rank, "h2d")  # overwrites
        if rank == 0:
            file.set("num_micro_batches", 4.0)
    found = exposed(tmp_path)
    by_rank = {labels["rank"]: value for labels, value in found["moe_lightning:bytes_paged_total"]}
    assert by_rank == {"0": 1000.0, "1": 1001.0}
    (first, _) = sorted(found["moe_lightning:link_busy_ratio"], key=lambda sample: sample[0]["rank"])
    assert first == ({**LABELS, "rank": "0", "direction": "h2d"}, 0.5)
    assert found["moe_lightning:num_micro_batches"] == [(LABELS, 4.0)]


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_worker_that_leaves_takes_its_values_with_it_and_the_last_one_the_folder(
    is_ours: bool, tmp_path: Path
) -> None:
    directory = tmp_path / (f"{DIRECTORY_PREFIX}1" if is_ours else "of somebody else")
    assert exposed(directory) == {}
    first, second = (MetricsFile(directory, LABELS, rank) for rank in (0, 1))
    first.set("sweeps", 3.0)
    second.set("sweeps", 4.0)
    assert read_metrics(directory) == {("sweeps",): 3.0}
    first.remove()
    assert read_metrics(directory) == {("sweeps",): 4.0}
    second.remove()
    assert exposed(directory) == {}
    assert directory.exists() != is_ours


def test_the_lowest_rank_speaks_where_one_value_is_asked_for(tmp_path: Path) -> None:
    for rank in (1, 0):
        MetricsFile(tmp_path, LABELS, rank).set("wait_seconds", 10.0 + rank, "hidden_load<-attention")
    assert read_metrics(tmp_path) == {("wait_seconds", "hidden_load<-attention"): 10.0}


def test_labels_must_be_those_of_the_metric(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path, LABELS, 0)
    with pytest.raises(ValueError, match="zip"):
        file.set("link_busy_ratio", 0.5)


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_every_metric_can_be_written_and_says_what_it_is(metric, tmp_path: Path) -> None:
    MetricsFile(tmp_path, LABELS, 0).set(metric.name, 1.5, *(f"some {label}" for label in metric.labels))
    ((name, [(labels, value)]),) = exposed(tmp_path).items()
    assert name == PREFIX + metric.name + ("_total" if metric.kind == "counter" else "")
    assert set(labels) == {*LABELS, *metric.labels, *(["rank"] if metric.is_per_rank else [])}
    assert value == 1.5
    assert metric.help.endswith(".")
