"""Plans the engine in the front end: reads model and machine, solves, writes the limits into vLLM's configuration.

What is decided, and how, is engine_planning's business. Here is what only vLLM knows: the model's configuration, which
limits are the user's, and where the values go.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from vllm_moe_lightning.config import MoeLightningConfig
from vllm_moe_lightning.engine_plan import store_plan
from vllm_moe_lightning.engine_planning import PlannedEngine, plan_engine
from vllm_moe_lightning.engine_request import EngineRequest
from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.hardware import HardwareProfile, read_profile
from vllm_moe_lightning.hardware_presets import GPU_PRESETS, preset_profile
from vllm_moe_lightning.integration.given_limits import given_limits
from vllm_moe_lightning.model_config import spec_from_config
from vllm_moe_lightning.model_spec import MoeModelSpec
from vllm_moe_lightning.profile_cache import cache_folder, fingerprint, load_cached
from vllm_moe_lightning.tensor_parallel import model_of_rank

logger = init_logger("vllm.vllm_moe_lightning.planning")

BLOCK_SIZE = 128  # tokens: what vLLM's CPU platform takes too; long runs of K and V for the attention kernel


def request_of(vllm_config: Any, options: MoeLightningConfig) -> EngineRequest:
    """Measures this machine if nobody says what to plan for and nothing is cached."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    spec = model_spec_of(model)
    num_ranks = parallel.tensor_parallel_size
    block_size = cache.block_size if cache.user_specified_block_size else BLOCK_SIZE
    block_bytes = block_size * model_of_rank(spec, num_ranks).kv_bytes_per_token
    return EngineRequest(
        spec=spec,
        profile=profile_of(options.hardware, num_ranks),
        options=options,
        max_model_len=model.max_model_len,
        block_size=block_size,
        given=given_limits(vllm_config, options.kv_cache_gib, block_bytes),
        num_ranks=num_ranks,
        enable_chunked_prefill=bool(vllm_config.scheduler_config.enable_chunked_prefill),
    )


def model_spec_of(model_config: Any) -> MoeModelSpec:
    """With the type that vLLM computes in, which need not be the checkpoint's."""
    raw = {**model_config.hf_config.to_dict(), "dtype": str(model_config.dtype).removeprefix("torch.")}
    try:
        return spec_from_config(raw, Path(model_config.model).name)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{error}; to run it unplanned set moe_lightning.planner to 'off', and num_micro_batches, "
            f"num_resident_layers and --max-num-seqs yourself"
        ) from error


def profile_of(hardware: str | None, num_ranks: int) -> HardwareProfile:
    """A preset, a profile from a file, or this machine. Raises ValueError for a name that is neither."""
    if hardware is None:
        return this_machine()
    if hardware in GPU_PRESETS:
        return preset_profile(hardware, num_gpus=num_ranks)
    if Path(hardware).is_file():
        return read_profile(Path(hardware))
    raise ValueError(
        f"moe_lightning.hardware: {hardware!r} is neither a preset ({', '.join(GPU_PRESETS)}) nor a file; "
        f"`vllm-moe-lightning profile --output FILE` measures this machine"
    )


def this_machine() -> HardwareProfile:
    cached, warnings = load_cached(cache_folder(), fingerprint(), quick=True)
    if cached is None:
        from vllm_moe_lightning.profiling import machine_profile  # torch, and the kernels

        logger.info(
            "moe_lightning: measuring this machine for the planner, some ten seconds, once; kept in %s "
            "(`vllm-moe-lightning profile` measures longer and better)",
            cache_folder(),
        )
        started_s = time.monotonic()
        cached, more = machine_profile(quick=True, disk_folder=cache_folder())
        warnings = [*warnings, *more]
        logger.info("moe_lightning: measured in %.1f s", time.monotonic() - started_s)
    for warning in [*warnings, *cached.warnings]:
        logger.warning("moe_lightning: %s", warning)
    return cached.profile


def write_plan(vllm_config: Any, planned: PlannedEngine) -> None:
    """The plan's limits, exactly, into vLLM's configuration, and the plan into `additional_config`."""
    plan, scheduler, cache = planned.plan, vllm_config.scheduler_config, vllm_config.cache_config
    scheduler.max_num_seqs = plan.max_num_seqs
    scheduler.max_num_batched_tokens = plan.max_num_batched_tokens
    cache.block_size = plan.block_size
    # One figure for all ranks, so that they agree on the number of blocks.
    cache.kv_cache_memory_bytes = plan.kv_bytes
    if plan.max_model_len < vllm_config.model_config.max_model_len:
        vllm_config.model_config.max_model_len = plan.max_model_len
    scheduler.verify_max_model_len(vllm_config.model_config.max_model_len)
    store_plan(vllm_config, plan)


def plan(vllm_config: Any, options: MoeLightningConfig) -> PlannedEngine:
    started_s = time.monotonic()
    request = request_of(vllm_config, options)
    planned = plan_engine(request)
    write_plan(vllm_config, planned)
    logger.info("moe_lightning: planned in %.1f s: %s", time.monotonic() - started_s, planned.plan)
    return planned
