"""One arm's engine: vLLM with our worker, or stock, that answers sets of prompts and says what it moved for them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.cpu_clock import CpuClock
from benchmarks.engine_process import EngineProcess, serve_orders
from vllm_moe_lightning.hardware import HardwareProfile
from vllm_moe_lightning.model_spec import MoeModelSpec

WORKER_CLS = "vllm_moe_lightning.worker.MoELightningWorker"
BUSY_KEYS = {"gpu": "gpu_busy", "cpu": "cpu_attention_busy", "h2d": "link_busy", "d2h": "d2h_busy"}


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is started with. `moe_lightning`: our options, None for stock vLLM."""

    engine_args: Mapping[str, Any]
    moe_lightning: Mapping[str, Any] | None
    environment: Mapping[str, str] | None = None
    """Of an interpreter of its own; None: one thread computes (engine_process)."""


@dataclass(frozen=True)
class ArmStarted:
    conditions: dict[str, Any]
    """What a comparison must name: batch limits, micro-batches, type, threads, caching."""
    stock_offloaded_bytes: int | None
    """By vLLM's own offloader; None where it has none."""
    spec: MoeModelSpec | None = None
    machine: HardwareProfile | None = None
    plan: Any = None


@dataclass(frozen=True)
class Order:
    prompts: tuple[tuple[int, ...], ...]
    gen_len: int
    schedule: str | None = None


@dataclass(frozen=True)
class ArmRun:
    elapsed_s: float
    num_generated: int
    prefix_hits: int
    """Prompt tokens that a cache spared."""
    num_preemptions: int | None
    """None: stock vLLM's scheduler does not count them."""
    others_cpu_share: float
    bytes_paged: int | None
    """To the device, of expert weights; None: stock, which does not count."""
    bytes_paged_expected: int | None
    """Sweeps over the layers times the streamed layers' bytes."""
    num_sweeps: int | None
    busy: dict[str, float] = field(default_factory=dict)
    """Resource -> share of the time from the first sweep to the last."""


class ArmEngine(EngineProcess):
    """Raises RuntimeError with the engine's own words if it does not start."""

    started: ArmStarted

    def __init__(self, model: Path, settings: EngineSettings) -> None:
        super().__init__(_serve, str(model), settings, environment=settings.environment)

    def run(self, prompts: Sequence[Sequence[int]], gen_len: int, schedule: str | None = None) -> ArmRun:
        """Greedy, all requests at once, every answer exactly gen_len tokens long."""
        run: ArmRun = self.ask(Order(tuple(map(tuple, prompts)), gen_len, schedule))
        return run


def _serve(connection: Connection, model: str, settings: EngineSettings) -> None:
    """In the engine's process."""
    from vllm import LLM

    from vllm_moe_lightning.errors import MoeLightningError

    failures = (MoeLightningError, ValueError, RuntimeError)
    ours: dict[str, Any] = {}
    if settings.moe_lightning is not None:
        ours = {"worker_cls": WORKER_CLS, "additional_config": {"moe_lightning": dict(settings.moe_lightning)}}
    try:
        llm = LLM(model=model, skip_tokenizer_init=True, seed=0, **ours, **settings.engine_args)
        connection.send(_started(llm, settings))
    except failures as error:
        connection.send(f"{type(error).__name__}: {error}")
        os._exit(1)
    serve_orders(connection, lambda order: _run(llm, order, is_ours=bool(ours)), failures)


def _started(llm: Any, settings: EngineSettings) -> ArmStarted:
    import torch
    from vllm.platforms import current_platform

    config = llm.llm_engine.vllm_config
    scheduler, cache = config.scheduler_config, config.cache_config
    conditions = {
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "block_size": cache.block_size,
        "num_kv_blocks": cache.num_gpu_blocks,
        "prefix_caching": bool(cache.enable_prefix_caching),
        "dtype": str(config.model_config.dtype),
        "enforce_eager": bool(config.model_config.enforce_eager),
        "torch_threads": torch.get_num_threads(),
        "num_micro_batches": 1,
        "num_resident_layers": None,
        "device": "cpu" if current_platform.is_cpu() else torch.cuda.get_device_name(),
    }
    if settings.moe_lightning is None:
        return ArmStarted(conditions, _stock_offloaded_bytes())
    from vllm_moe_lightning.config import parse_options
    from vllm_moe_lightning.engine_plan import plan_of
    from vllm_moe_lightning.engine_request import machine_under_options
    from vllm_moe_lightning.integration.planning import model_spec_of, this_machine

    stats = _stats(llm)
    policy = stats["policy"]
    conditions |= {
        "num_micro_batches": policy["num_micro_batches"],
        "num_resident_layers": len(policy["resident_layers"]),
        "device": stats["device"] if stats["device"] == "emulated" else conditions["device"],
        "device_memory_budget_bytes": stats["device_memory_budget_bytes"],
    }
    return ArmStarted(
        conditions,
        stock_offloaded_bytes=None,
        spec=model_spec_of(config.model_config),
        machine=machine_under_options(this_machine(), parse_options(dict(settings.moe_lightning))),
        plan=plan_of(config),
    )


def _stock_offloaded_bytes() -> int | None:
    """Of vLLM's two offloaders, which live in this very process. Their names for it differ (vLLM 0.32)."""
    from vllm.model_executor.offloader.base import NoopOffloader, get_offloader

    offloader = get_offloader()
    if isinstance(offloader, NoopOffloader):
        return None
    counted = (getattr(offloader, name, 0) for name in ("cpu_offload_bytes", "total_offloaded_bytes"))
    return max(counted)


def _stats(llm: Any) -> dict[str, Any]:
    (stats,) = llm.collective_rpc("moe_lightning_stats")
    return dict(stats)


def _run(llm: Any, order: Order, *, is_ours: bool) -> ArmRun:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": list(prompt)} for prompt in order.prompts]
    sampling = SamplingParams(temperature=0.0, max_tokens=order.gen_len, ignore_eos=True, detokenize=False)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    llm.reset_prefix_cache()
    if is_ours:
        if order.schedule is not None:
            llm.collective_rpc("moe_lightning_reconfigure", kwargs={"schedule": order.schedule})
        llm.collective_rpc("moe_lightning_reset")
    preempted = scheduler.num_preemptions if is_ours else 0
    cpus = sorted(os.sched_getaffinity(0))
    clock, started_s = CpuClock.read(cpus), time.monotonic()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    elapsed_s, others = time.monotonic() - started_s, clock.others_share(CpuClock.read(cpus), len(cpus))
    stats = _stats(llm) if is_ours else {}
    return ArmRun(
        elapsed_s=elapsed_s,
        num_generated=sum(len(output.outputs[0].token_ids) for output in outputs),
        prefix_hits=sum(output.num_cached_tokens or 0 for output in outputs),
        num_preemptions=scheduler.num_preemptions - preempted if is_ours else None,
        others_cpu_share=others,
        bytes_paged=stats.get("bytes_paged"),
        bytes_paged_expected=stats["sweeps"] * stats["bytes_per_sweep"] if is_ours else None,
        num_sweeps=stats.get("sweeps"),
        busy={resource: stats[key] for resource, key in BUSY_KEYS.items()} if is_ours else {},
    )
