"""Our metrics by name, and the files through which workers and scheduler hand them to whoever serves /metrics.

The files are those of prometheus_client's multi-process mode: mapped memory, so that a value is published by writing
eight bytes and read without asking its writer, however busy or dead that is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector

PREFIX = "moe_lightning:"
DIRECTORY_PREFIX = "moe-lightning-metrics-"  # of a folder that is ours


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: tuple[str, ...] = ()
    """Besides model_name, engine and, unless it is the whole engine's, rank."""
    is_per_rank: bool = True
    is_of_scheduler: bool = False
    """Written by the engine core, and not by workers."""


def _of_scheduler(name: str, kind: Literal["counter", "gauge"], help: str, *labels: str) -> Metric:
    return Metric(name, kind, help, labels, is_per_rank=False, is_of_scheduler=True)


_WINDOW = "over the last seconds (moe_lightning.metrics_window_s, or three sweeps if they take longer), 0 when idle"

METRICS = {
    metric.name: metric
    for metric in (
        Metric("bytes_paged", "counter", "Bytes of expert weights brought to the device."),
        Metric("pages_moved", "counter", "Pages of expert weights brought to the device."),
        Metric("experts_fetched", "counter", "Experts that were asked for and brought up one by one."),
        Metric("experts_found", "counter", "Experts that were asked for one by one and were on the device already."),
        Metric("link_bytes", "counter", "All bytes over the link: weights, hidden states, KV.", ("direction",)),
        Metric("sweeps", "counter", "Passes over all layers that served requests."),
        Metric("dummy_sweeps", "counter", "Warm-up and profiling passes; they page weights too."),
        Metric("aborted_sweeps", "counter", "Sweeps that an error ended."),
        Metric("refills", "counter", "Times the first layer was brought up outside of a sweep."),
        Metric("sweep_seconds", "counter", "Time in sweeps."),
        Metric("working_seconds", "counter", "Time in sweeps and between them, idle time left out."),
        Metric("wait_seconds", "counter", "Time the launching thread waited, by kind of wait.", ("kind",)),
        Metric("busy_seconds", "counter", "Time that a resource worked: gpu, cpu, h2d, d2h.", ("resource",)),
        Metric("computed_tokens", "counter", "Tokens through the model, prompt tokens included.", is_per_rank=False),
        Metric("generated_tokens", "counter", "Tokens sampled.", is_per_rank=False),
        Metric("link_busy_ratio", "gauge", f"Share of time that the link is busy, {_WINDOW}.", ("direction",)),
        Metric("cpu_attention_busy_ratio", "gauge", f"Share of time that CPU attention is busy, {_WINDOW}."),
        Metric("compute_busy_ratio", "gauge", f"Share of time that the device computes, {_WINDOW}."),
        Metric("wait_ratio", "gauge", f"Share of time that the launching thread waits, {_WINDOW}."),
        Metric("bottleneck", "gauge", f"1 for the busiest resource, {_WINDOW}.", ("resource",)),
        Metric("num_micro_batches", "gauge", f"Micro-batches per step, on average {_WINDOW}.", is_per_rank=False),
        Metric(
            "achieved_tokens_per_second",
            "gauge",
            f"Tokens generated, and (total) prompt tokens too, {_WINDOW}.",
            ("tokens",),
            is_per_rank=False,
        ),
        Metric(
            "predicted_tokens_per_second",
            "gauge",
            "The plan's figure with all slots taken; does not change.",
            ("tokens",),
            is_per_rank=False,
        ),
        Metric("predicted_sweep_seconds", "gauge", "The plan's time of a sweep; does not change.", is_per_rank=False),
        Metric(
            "predicted_busy_ratio", "gauge", "The plan's figure; does not change.", ("resource",), is_per_rank=False
        ),
        Metric(
            "predicted_bottleneck",
            "gauge",
            "1 for the plan's busiest resource; does not change.",
            ("resource",),
            is_per_rank=False,
        ),
        Metric("device_memory_used_bytes", "gauge", "Device memory allocated and reserved."),
        Metric("device_memory_budget_bytes", "gauge", "What it may be at most; absent without a budget."),
        Metric("host_kv_bytes", "gauge", "Host memory of the KV cache; vllm:kv_cache_usage_perc is the share in use."),
        Metric("expert_bytes", "gauge", "Experts by where they are kept: host, device.", ("place",)),
        Metric("engine_info", "gauge", "Always 1.", ("device",), is_per_rank=False),
        _of_scheduler("requests_admitted", "counter", "Requests that began to run; again after each preemption."),
        _of_scheduler(
            "requests_kept_waiting_for_kv", "counter", "Times a request was next in turn and found no KV blocks."
        ),
        _of_scheduler("kv_wait_seconds", "counter", "Time that such requests waited, in all."),
        _of_scheduler("preemptions", "counter", "Times a running request lost its KV blocks, to be computed again."),
        _of_scheduler("scheduled_tokens", "counter", "Tokens given to steps: prefill, decode.", "kind"),
        _of_scheduler(
            "long_prompts_passed_over", "counter", "Times, once a step, that a long prompt was put behind short ones."
        ),
        _of_scheduler(
            "prefill_share_replans",
            "counter",
            "Times the prompt tokens of a sweep were planned anew, since requests were others.",
        ),
        _of_scheduler("requests_waiting_for_kv", "gauge", "Requests next in turn that wait for KV blocks."),
        _of_scheduler(
            "kv_reserved_ratio", "gauge", "Share of KV blocks that running requests hold or may still come to need."
        ),
        _of_scheduler("step_tokens", "gauge", "Tokens of the last step, 0 when idle."),
    )
}


class MetricsFile:
    """What one worker, or the scheduler, publishes. Not for several threads at once.

    directory: where the reader looks, made if need be; labels: model_name and engine, as in vLLM's own metrics; rank:
    None for the scheduler, which has no metric of a rank.
    """

    def __init__(self, directory: Path, labels: Mapping[str, str], rank: int | None) -> None:
        # prometheus_client reads type, mode and process from the parts between underscores.
        directory.mkdir(mode=0o700, exist_ok=True)
        self._directory = directory
        tag = f"moelightning{time.time_ns()}" + ("scheduler" if rank is None else f"rank{rank}")
        self._paths = {
            "counter": directory / f"counter_{tag}.db",
            "gauge": directory / f"gauge_mostrecent_{tag}.db",
        }
        self._files = {kind: MmapedDict(str(path)) for kind, path in self._paths.items()}
        for path in self._paths.values():
            with path.open("r+b") as file:  # a disk that fills up later must not end us with a bus error
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        self._labels = dict(labels)
        self._rank_labels = None if rank is None else {**labels, "rank": str(rank)}
        self._keys: dict[tuple[str, ...], str] = {}

    def set(self, name: str, value: float, *label_values: str) -> None:
        """`label_values` in the order of the metric's own labels. A counter's value must never fall."""
        metric = METRICS[name]
        key = self._keys.get((name, *label_values))
        if key is None:
            own = dict(zip(metric.labels, label_values, strict=True))
            whose = self._rank_labels if metric.is_per_rank else self._labels
            assert whose is not None, f"{name} is a metric of a rank"
            labels = {**whose, **own}
            sample = PREFIX + name + ("_total" if metric.kind == "counter" else "")
            key = mmap_key(PREFIX + name, sample, list(labels), list(labels.values()), metric.help)
            self._keys[(name, *label_values)] = key
        self._files[metric.kind].write_value(key, value, time.time())

    def remove(self) -> None:
        """Closes and deletes the files: what is read from now on lacks them."""
        for kind, file in self._files.items():
            file.close()
            self._paths[kind].unlink(missing_ok=True)
        if self._directory.name.startswith(DIRECTORY_PREFIX):
            with suppress(OSError):  # another rank's files are still there
                self._directory.rmdir()


class MetricsCollector(MultiProcessCollector):
    """For a registry: reads whatever files are in the directory at that moment, if there is one."""

    def __init__(self, directory: Path) -> None:
        self._path = str(directory)  # not by the base class, which wants it to be there already

    def collect(self) -> list[MetricFamily]:
        try:
            return list(super().collect())
        except FileNotFoundError:  # a worker removed its files between the listing and the reading
            return []


def read_metrics(directory: Path) -> dict[tuple[str, ...], float]:
    """(name, values of the metric's own labels) -> value, of the lowest rank."""
    found: dict[tuple[str, ...], tuple[int, float]] = {}
    for family in MetricsCollector(directory).collect():
        if not family.name.startswith(PREFIX):  # vLLM's own, in a folder of its making
            continue
        metric = METRICS[family.name.removeprefix(PREFIX)]
        for sample in family.samples:
            key = (metric.name, *(sample.labels[label] for label in metric.labels))
            rank = int(sample.labels.get("rank", 0))
            if key not in found or rank < found[key][0]:
                found[key] = (rank, sample.value)
    return {key: value for key, (_, value) in found.items()}
