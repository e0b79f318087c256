"""A vLLM engine in a process of its own that runs jobs when told: the arms of benchmarks/job_throughput.py."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.cpu_clock import CpuClock
from benchmarks.engine_process import EngineProcess, serve_orders
from vllm_moe_lightning.engine_plan import EnginePlan
from vllm_moe_lightning.hardware import HardwareProfile
from vllm_moe_lightning.job_prediction import Job
from vllm_moe_lightning.model_spec import MoeModelSpec

WORKER_CLS = "vllm_moe_lightning.worker.MoELightningWorker"
BUSY_KEYS = {"gpu": "gpu_busy", "cpu": "cpu_attention_busy", "h2d": "link_busy", "d2h": "d2h_busy"}


@dataclass(frozen=True)
class Started:
    plan: EnginePlan | None
    spec: MoeModelSpec
    machine: HardwareProfile
    """As the planner sees it: this machine, with the memory and the link of the options."""
    max_num_seqs: int
    max_num_batched_tokens: int
    num_micro_batches: int
    num_resident_layers: int


@dataclass(frozen=True)
class JobRun:
    elapsed_s: float
    num_sweeps: int
    num_preemptions: int
    others_cpu_share: float
    """Of the CPUs' time during the job, what went to other processes."""
    busy_s: dict[str, float]
    """Of the engine's streams, by resource, during the job."""


class JobEngine(EngineProcess):
    """One engine. Raises RuntimeError with the engine's own words if it does not start."""

    started: Started

    def __init__(self, model: Path, options: Mapping[str, Any], engine_args: Mapping[str, Any]) -> None:
        super().__init__(_serve, str(model), dict(options), dict(engine_args))

    def run(self, job: Job, batch_size: int | None = None, seed: int = 0) -> JobRun:
        """Greedy, all requests at once, or in static batches. Raises RuntimeError if the engine fails."""
        run: JobRun = self.ask((job, batch_size, seed))
        return run


def _serve(connection: Connection, model: str, options: dict[str, Any], engine_args: dict[str, Any]) -> None:
    """In the engine's process: a `Started`, then a `JobRun` for each order; a sentence instead where it fails."""
    from vllm import LLM

    from vllm_moe_lightning.config import parse_options
    from vllm_moe_lightning.engine_plan import plan_of
    from vllm_moe_lightning.engine_request import machine_under_options
    from vllm_moe_lightning.errors import MoeLightningError
    from vllm_moe_lightning.integration.planning import model_spec_of, this_machine

    try:
        llm = LLM(
            model=model,
            worker_cls=WORKER_CLS,
            skip_tokenizer_init=True,
            additional_config={"moe_lightning": options},
            enforce_eager=True,
            seed=0,
            **engine_args,
        )
    except (MoeLightningError, ValueError, RuntimeError) as error:
        connection.send(f"{type(error).__name__}: {error}")
        os._exit(1)
    config = llm.llm_engine.vllm_config
    policy = _stats(llm)["policy"]
    connection.send(
        Started(
            plan=plan_of(config),
            spec=model_spec_of(config.model_config),
            machine=machine_under_options(this_machine(), parse_options(options)),
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            num_micro_batches=policy["num_micro_batches"],
            num_resident_layers=len(policy["resident_layers"]),
        )
    )
    vocab = config.model_config.get_vocab_size()
    failures = (MoeLightningError, ValueError, RuntimeError)
    serve_orders(connection, lambda order: _run(llm, *order, vocab), failures)


def _stats(llm: Any) -> dict[str, Any]:
    (stats,) = llm.collective_rpc("moe_lightning_stats")
    return dict(stats)


def _run(llm: Any, job: Job, batch_size: int | None, seed: int, vocab: int) -> JobRun:
    import random

    from vllm import SamplingParams

    draw = random.Random(seed)
    prompts = [
        {"prompt_token_ids": [draw.randrange(3, vocab) for _ in range(job.prompt_len)]} for _ in range(job.num_requests)
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=job.gen_len, ignore_eos=True, detokenize=False)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    llm.collective_rpc("moe_lightning_reset")
    preempted = scheduler.num_preemptions
    step = batch_size or job.num_requests
    cpus = sorted(os.sched_getaffinity(0))
    clock, started_s = CpuClock.read(cpus), time.monotonic()
    for first in range(0, len(prompts), step):
        outputs = llm.generate(prompts[first : first + step], sampling, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == job.gen_len for output in outputs), "short answers"
    elapsed_s, others = time.monotonic() - started_s, clock.others_share(CpuClock.read(cpus), len(cpus))
    stats = _stats(llm)
    return JobRun(
        elapsed_s=elapsed_s,
        num_sweeps=stats["sweeps"],
        others_cpu_share=others,
        num_preemptions=scheduler.num_preemptions - preempted,
        busy_s={resource: stats[key] * stats["active_s"] for resource, key in BUSY_KEYS.items()},
    )
