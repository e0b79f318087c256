"""Who competes in benchmarks/throughput.py, and with which settings: on the emulated device, and on a GPU.

Stock vLLM's offload does nothing on the CPU build, so the arms there are our engine under each schedule, at one memory
budget and one link; stock vLLM without offload runs beside them as what plain CPU code does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.arm_engine import ArmRun, ArmStarted, EngineSettings
from benchmarks.job_checkpoint import CheckpointShape
from benchmarks.stock_offload import (
    ModelBytes,
    StockSetting,
    bytes_to_offload,
    fits_without_offload,
    prefetch_settings,
    uva_settings,
)
from benchmarks.workloads import PaperWorkload
from vllm_moe_lightning.model_spec import MoeModelSpec

BLOCK_SIZE = 32  # tokens: short sequences waste less of the last block than with the planner's 128
OURS, OURS_S4, STOCK_CPU, STOCK = "cgopipe", "s4", "vLLM in RAM", "stock without offload"
OTHER_SCHEDULES = ("s2", "s3", "serial")
MIB, GIB = 1 << 20, 1 << 30
RESERVED_SHARE = 0.1
"""Of the budget, for activations, CUDA's context and fragmentation, when stock's offload is sized."""


class NotComparableError(Exception):
    """A run whose figure would be of something else than its row says."""


@dataclass(frozen=True)
class Arm:
    """`engine`: the process that runs it; `schedule`: what that is told first. `must_page`: fails if nothing moved."""

    name: str
    engine: str
    schedule: str | None = None
    must_page: bool = False


@dataclass(frozen=True)
class Field:
    """All arms of one workload."""

    engines: Mapping[str, EngineSettings]
    arms: tuple[Arm, ...]
    searched: tuple[StockSetting, ...] = ()
    """Settings that compete for being their arm's."""
    alive_at_once: bool = True

    def only(self, names: Sequence[str]) -> Field:
        """These arms alone; ValueError for a name that there is not."""
        known = {arm.name for arm in self.arms} | {setting.arm for setting in self.searched}
        unknown = sorted(set(names) - known)
        if unknown:
            raise ValueError(f"no arms {unknown}; there are {sorted(known)}")
        arms = tuple(arm for arm in self.arms if arm.name in names)
        return replace(self, arms=arms, searched=tuple(s for s in self.searched if s.arm in names))


@dataclass(frozen=True)
class EmulatedBudget:
    device_memory_mib: float = 100.0
    link_gb_per_s: float = 2.0
    slots: int = 32
    """Sequences that the KV cache of all arms holds."""


def kv_bytes(workload: PaperWorkload, checkpoint: CheckpointShape, slots: int) -> int:
    """Of `slots` sequences of the mean length and one of the longest; and vLLM's null block."""
    mean = workload.prompt_mean + workload.gen_len
    blocks = slots * -(-mean // BLOCK_SIZE) + -(-workload.longest // BLOCK_SIZE) + 1
    return blocks * BLOCK_SIZE * checkpoint.kv_bytes_per_token


def emulated_field(
    workload: PaperWorkload, checkpoint: CheckpointShape, budget: EmulatedBudget, *, padded: bool, with_s4: bool = True
) -> Field:
    engine_args = {
        "block_size": BLOCK_SIZE,
        "kv_cache_memory_bytes": kv_bytes(_as_run(workload, padded=padded), checkpoint, budget.slots),
        "max_model_len": workload.longest,
        "enable_prefix_caching": False,
        "enforce_eager": True,
    }
    options = {
        "expected_prompt_tokens": workload.prompt_max if padded else workload.prompt_mean,
        "expected_generation_tokens": workload.gen_len,
        "device_memory_mib": budget.device_memory_mib,
        "h2d_gb_per_s": budget.link_gb_per_s,
        "d2h_gb_per_s": budget.link_gb_per_s,
    }
    engines = {
        OURS: EngineSettings(engine_args, {**options, "schedule": "cgopipe"}),
        STOCK_CPU: EngineSettings(
            engine_args, None, environment={"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
        ),
    }
    arms = [Arm(OURS, OURS, OURS, must_page=True)]
    arms += [Arm(name, OURS, name, must_page=True) for name in OTHER_SCHEDULES]
    if with_s4:  # plans its own frames for the context, so it has an engine of its own
        engines[OURS_S4] = EngineSettings(engine_args, {**options, "schedule": "s4"})
        arms.append(Arm(OURS_S4, OURS_S4, must_page=True))
    arms.append(Arm(STOCK_CPU, STOCK_CPU))
    return Field(engines, tuple(arms))


def _as_run(workload: PaperWorkload, *, padded: bool) -> PaperWorkload:
    if not padded:
        return workload
    return PaperWorkload(workload.name, workload.prompt_max, workload.prompt_max, workload.gen_len)


def model_bytes(spec: MoeModelSpec) -> ModelBytes:
    other = int(spec.embedding_params * spec.widths.other_bytes)
    return ModelBytes(
        num_layers=spec.num_layers,
        layer=int((spec.total_bytes - other) / spec.num_layers),
        layer_experts=int(spec.expert_layer_bytes),
        other=other,
    )


def cuda_field(
    workload: PaperWorkload, spec: MoeModelSpec, budget_bytes: int, gpu_bytes: int, *, padded: bool
) -> Field:
    """Never run: no GPU was at hand. Stock's budget is the share of the GPU that vLLM may use; ours is an option."""
    model, share = model_bytes(spec), budget_bytes / gpu_bytes
    engine_args: dict[str, Any] = {"max_model_len": workload.longest, "enable_prefix_caching": False}
    stock_args = {**engine_args, "gpu_memory_utilization": share}
    options = {
        "expected_prompt_tokens": workload.prompt_max if padded else workload.prompt_mean,
        "expected_generation_tokens": workload.gen_len,
        "device_memory_mib": budget_bytes / MIB,
        "schedule": "cgopipe",
    }
    environment = {"TORCHDYNAMO_DISABLE": "0", "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
    engines = {OURS: EngineSettings(engine_args, options, environment)}
    arms = [Arm(OURS, OURS, must_page=True)]
    least_kv = int(workload.longest * spec.kv_bytes_per_token)
    reserve = int(budget_bytes * RESERVED_SHARE)
    if fits_without_offload(model, budget_bytes, least_kv, reserve):
        engines[STOCK] = EngineSettings(stock_args, None, environment)
        arms.append(Arm(STOCK, STOCK))
    least = bytes_to_offload(model, budget_bytes, least_kv, reserve)
    searched = tuple(
        StockSetting(setting.arm, {**stock_args, **setting.engine_args}, setting.offloaded_bytes)
        for settings in (uva_settings(model, least), prefetch_settings(model, least))
        for setting in settings
    )
    # The searched arms have one engine each at a time.
    num_engines = len(engines) + len({setting.arm for setting in searched})
    return Field(engines, tuple(arms), searched, alive_at_once=num_engines * share <= 1.0)


def best_settings(
    searched: Iterable[StockSetting], rate_of: Callable[[StockSetting], float]
) -> tuple[dict[str, StockSetting], list[dict[str, Any]]]:
    """The fastest setting of each arm, and a record of all that were tried. `rate_of` raises RuntimeError with the
    engine's words where one does not start."""
    best: dict[str, tuple[float, StockSetting]] = {}
    tried = []
    for setting in searched:
        record: dict[str, Any] = {"arm": setting.arm, "setting": setting.label}
        try:
            rate = rate_of(setting)
        except RuntimeError as error:
            tried.append(record | {"refused": str(error)})
            continue
        tried.append(record | {"tokens_per_s": rate})
        if setting.arm not in best or rate > best[setting.arm][0]:
            best[setting.arm] = rate, setting
    return {arm: setting for arm, (_, setting) in best.items()}, tried


def check_run(arm: Arm, started: ArmStarted, run: ArmRun, num_expected: int) -> None:
    """NotComparableError where tokens are missing, a cache spared prompts, or an offload moved nothing."""
    if run.num_generated != num_expected:
        raise NotComparableError(f"{arm.name} generated {run.num_generated} tokens of {num_expected}")
    if run.prefix_hits:
        raise NotComparableError(
            f"{arm.name} found {run.prefix_hits} prompt tokens in its prefix cache; it must be off"
        )
    if not arm.must_page:
        return
    if started.stock_offloaded_bytes is not None:  # by vLLM's own offloader, which counts no transfers
        if started.stock_offloaded_bytes <= 0:
            raise NotComparableError(
                f"{arm.name} offloaded nothing: the offload of this vLLM does nothing on this device"
            )
        return
    if not run.bytes_paged or run.bytes_paged_expected is None or not run.num_sweeps:
        raise NotComparableError(f"{arm.name} moved no page to the device, so it offloaded nothing")
    a_sweep = run.bytes_paged_expected / run.num_sweeps  # what is sent ahead may fall to the neighbouring run
    if abs(run.bytes_paged - run.bytes_paged_expected) > a_sweep:
        raise NotComparableError(
            f"{arm.name} moved {run.bytes_paged} bytes in {run.num_sweeps} sweeps, and {run.bytes_paged_expected} "
            f"would be all streamed layers in each"
        )
