"""The front end's side of the metrics: where workers leave their files, and how /metrics comes to show them.

With several API servers vLLM has made the folder itself (PROMETHEUS_MULTIPROC_DIR) and reads all that lies in it; with
one, we name it and add a collector to the registry that vLLM serves.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from vllm.logger import init_logger

from vllm_moe_lightning.engine_plan import PredictedFigures
from vllm_moe_lightning.integration.metrics_file import DIRECTORY_PREFIX, MetricsCollector, read_metrics
from vllm_moe_lightning.integration.peers import node_identity
from vllm_moe_lightning.pipeline.comparison import AchievedFigures, achieved_figures, as_text, comparison

logger = init_logger("vllm.vllm_moe_lightning.metrics")

DIRECTORY_KEY = "moe_lightning_metrics"
NODE_KEY = "moe_lightning_metrics_node"
"""Keys of `additional_config`: the folder, and the machine it is on. Written by us, not by users."""

_collector: MetricsCollector | None = None


def open_metrics(vllm_config: Any) -> None:
    """Give the engine of this configuration a folder for its metrics, and show what is in it. Once per configuration:
    again, or in another process, it does nothing."""
    if DIRECTORY_KEY in vllm_config.additional_config:
        return
    shared = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    # Workers make the folder, and take it away when they leave: if this process is killed, nothing of it stays.
    directory = Path(shared or f"{tempfile.gettempdir()}/{DIRECTORY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}")
    vllm_config.additional_config.update({DIRECTORY_KEY: str(directory), NODE_KEY: node_identity()})
    if shared is None:
        _show(directory)
    if multiprocessing.parent_process() is None:  # an API server beside others leaves the end to who started it
        # At the end of the process, and not by atexit: finalizers run newest first, so the engine, made after its
        # configuration, has been shut down by then and has said itself what it did.
        weakref.finalize(open_metrics, _close, directory, is_ours=shared is None)


def _show(directory: Path) -> None:
    """The newest engine of this process is the one on /metrics, as with vLLM's own metrics."""
    global _collector
    if _collector is not None:
        REGISTRY.unregister(_collector)
    _collector = MetricsCollector(directory)
    REGISTRY.register(_collector)


def metrics_directory(vllm_config: Any) -> Path | None:
    """None on another machine than the front end's, which would not see what is written there, and where no front end
    has asked for metrics."""
    additional = vllm_config.additional_config
    return Path(additional[DIRECTORY_KEY]) if additional.get(NODE_KEY) == node_identity() else None


def metrics_labels(vllm_config: Any) -> dict[str, str]:
    """As vLLM labels its own."""
    return {"model_name": vllm_config.model_config.served_model_name, "engine": "0"}


def log_run(device: str, predicted: PredictedFigures | None, achieved: AchievedFigures) -> None:
    """The last word on a run: what was predicted beside what came of it."""
    logger.info(
        "moe_lightning: the run in figures (device: %s; predicted is the steady state with all slots taken)\n%s",
        device,
        as_text(comparison(predicted, achieved)),
    )


def _close(directory: Path, *, is_ours: bool) -> None:
    """Speaks for a worker that was killed before it could, as `vllm serve` does when it stops."""
    values = read_metrics(directory)
    device = next((key[1] for key in values if key[0] == "engine_info"), None)
    achieved = None if device is None else _achieved(values)
    if device is not None and achieved is not None:
        log_run(device, _predicted(values), achieved)
    if is_ours:
        shutil.rmtree(directory, ignore_errors=True)


def _of(values: dict[tuple[str, ...], float], name: str) -> dict[str, float]:
    """By the value of the metric's one own label."""
    return {key[1]: value for key, value in values.items() if key[0] == name}


def _achieved(values: dict[tuple[str, ...], float]) -> AchievedFigures | None:
    return achieved_figures(
        generated_tokens=values[("generated_tokens",)],
        computed_tokens=values[("computed_tokens",)],
        sweeps=values[("sweeps",)],
        sweep_s=values[("sweep_seconds",)],
        working_s=values[("working_seconds",)],
        busy_s=_of(values, "busy_seconds"),
    )


def _predicted(values: dict[tuple[str, ...], float]) -> PredictedFigures | None:
    tokens = _of(values, "predicted_tokens_per_second")
    if not tokens:
        return None
    return PredictedFigures(
        generated_tokens_per_s=tokens["generated"],
        total_tokens_per_s=tokens["total"],
        sweep_s=values[("predicted_sweep_seconds",)],
        bottleneck=next(iter(_of(values, "predicted_bottleneck"))),
        busy=_of(values, "predicted_busy_ratio"),
    )
