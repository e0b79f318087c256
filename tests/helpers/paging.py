# SPDX-License-Identifier: Apache-2.0
"""Runs engines on test models, ours so that it really pages, and checks its counters against sums made by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.helpers import amx_gate
from tests.helpers.engine import EngineResult, Job, JobResult, Rpc, run_engine
from tests.helpers.engine_call import PRELOAD

# About 100 KiB: several pages per layer even in the smallest of the test models.
PAGE_MIB = 0.1
CPU_INTERMEDIATE_ALIGNMENT = 32  # vLLM's CPU build pads the experts to this with zeros (cpu_moe.py)
MIB = 1 << 20


def run_paged(
    model: Path,
    jobs: Sequence[Job],
    *,
    runner: str = "v1",
    options: Mapping[str, Any] | None = None,
    debug: Mapping[str, Any] | None = None,
    engine_args: Mapping[str, Any] | None = None,
    preload: Sequence[str] = (),
    **more: Any,
) -> EngineResult:
    """`options`: under additional_config["moe_lightning"], `debug` under its key of that name."""
    moe_lightning: dict[str, Any] = {"page_mib": PAGE_MIB, **(options or {})}
    if debug is not None:
        moe_lightning["debug"] = dict(debug)
    return run_engine(
        model,
        jobs,
        plugin=True,
        runner=runner,
        moe_lightning=moe_lightning,
        engine_args=engine_args,
        preload=[PRELOAD, *preload],
        **more,
    )


def run_stock(model: Path, jobs: Sequence[Job], *, open_gate: bool = False, **more: Any) -> EngineResult:
    """Without the plugin, but with the calls of tests/helpers/engine_call.py. `open_gate`: see
    tests/helpers/amx_gate.py."""
    is_dbrx = json.loads((model / "config.json").read_text())["model_type"] == "dbrx"
    names = ["vllm_moe_lightning.integration.dbrx:apply"] if is_dbrx else []  # stock vLLM cannot load it
    names += [amx_gate.OPEN] if open_gate else []
    return run_engine(model, jobs, plugin=False, preload=[PRELOAD, *names], **more)


def reconfigured(*more: Rpc, **policy: Any) -> list[Rpc]:
    """For `Job.before`: change the policy, count from zero, then `more`."""
    return [
        Rpc("moe_lightning_reconfigure", kwargs=policy),
        Rpc("moe_lightning_reset"),
        *more,
    ]


def experts_per_layer(model: Path) -> int:
    config = json.loads((model / "config.json").read_text())
    num_experts = config.get("num_experts") or config.get("num_local_experts")
    return int(num_experts or config["ffn_config"]["moe_num_experts"])


def expert_bytes_per_layer(model: Path, *, packed: bool = True) -> list[int]:
    """Of each decoder layer, from config.json: the three matrices of each expert; 0 for a dense layer. packed: as
    vLLM's CPU kernel has them."""
    config = json.loads((model / "config.json").read_text())
    ffn = config.get("ffn_config", {})
    num_layers = config.get("num_hidden_layers") or config["n_layers"]
    num_experts = experts_per_layer(model)
    intermediate = config.get("moe_intermediate_size") or config.get("intermediate_size") or ffn["ffn_hidden_size"]
    hidden = config.get("hidden_size") or config["d_model"]
    element_bytes = 4 if config["torch_dtype"] == "float32" else 2
    dense = config.get("mlp_only_layers", [])
    alignment = CPU_INTERMEDIATE_ALIGNMENT if packed else 1
    padded = math.ceil(intermediate / alignment) * alignment
    layer_bytes = num_experts * 3 * padded * hidden * element_bytes
    return [0 if layer in dense else layer_bytes for layer in range(num_layers)]


def page_bytes(page_mib: float = PAGE_MIB) -> int:
    return math.ceil(int(page_mib * MIB) / 4096) * 4096


def assert_pages_are_exact(
    job: JobResult, model: Path, *, resident: Sequence[int] = (), layer_bytes: Sequence[int] | None = None
) -> None:
    """Pages moved: every page of every streamed layer once per sweep, and the first layer's again per refill.

    `resident`: decoder layers whose experts stay on the device. `layer_bytes`: of each decoder layer's experts, where
    they are quantised.
    """
    (stats,) = job.stats
    whole = expert_bytes_per_layer(model) if layer_bytes is None else layer_bytes
    layer_bytes = [0 if i in resident else n for i, n in enumerate(whole)]
    pages = [math.ceil(num_bytes / page_bytes()) for num_bytes in layer_bytes]
    first = next((layer for layer, count in enumerate(pages) if count), None)
    sweeps, refills = stats["sweeps"] + stats["dummy_sweeps"], stats["refills"]
    assert stats["pages_per_sweep"] == sum(pages), (stats, pages)
    assert stats["pages_of_first_layer"] == (0 if first is None else pages[first])
    assert stats["pages_moved"] == sum(pages) * sweeps + (0 if first is None else refills * pages[first])
    assert stats["bytes_paged"] == sum(layer_bytes) * sweeps + (0 if first is None else refills * layer_bytes[first])
    assert stats["sweeps"] > 0
    assert stats["aborted_sweeps"] == 0
    assert stats["device"] == "emulated"
    if sum(layer_bytes):
        assert stats["pages_moved"] > 0


def assert_micro_batches(job: JobResult, asked: int, num_rows: int) -> None:
    """Every step was cut into as many micro-batches as asked for, or one per row where there are fewer rows."""
    (stats,) = job.stats
    counts = {int(step.rpartition("x")[2]) for step in stats["steps"]}
    assert counts, "no step was counted"
    assert max(counts) == min(asked, num_rows), stats["steps"]
    assert all(count <= asked for count in counts), stats["steps"]
    assert sum(stats["steps"].values()) == stats["sweeps"]
