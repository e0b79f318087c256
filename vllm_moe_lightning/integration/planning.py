"""Plans the engine in the front end: reads model and machine, solves, writes the limits into vLLM's configuration.

What is decided, and how, is engine_planning's business. Here is what only vLLM knows: the model's configuration, which
limits are the user's, and where the values go.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_moe_lightning.config import OPTIONS_KEY, MoeLightningConfig
from vllm_moe_lightning.engine_plan import store_plan
from vllm_moe_lightning.engine_planning import EnginePlanning, PlannedEngine
from vllm_moe_lightning.engine_request import (
    EngineRequest,
    machine_as_it_is_used,
    machine_under_options,
    machine_within,
)
from vllm_moe_lightning.errors import PolicyInfeasibleError, UnsupportedError
from vllm_moe_lightning.hardware import GIB, HardwareProfile, read_profile
from vllm_moe_lightning.hardware_presets import GPU_PRESETS, preset_profile
from vllm_moe_lightning.host_limits import available_memory_bytes
from vllm_moe_lightning.integration.given_limits import given_limits
from vllm_moe_lightning.integration.register import STEPPED_ASIDE_KEY
from vllm_moe_lightning.kv_cache import PREFERRED_BLOCK_SIZE
from vllm_moe_lightning.kv_cache_type import QUANTISED_TYPES
from vllm_moe_lightning.model_config import spec_from_config
from vllm_moe_lightning.model_spec import MoeModelSpec
from vllm_moe_lightning.plan_table import plan_table
from vllm_moe_lightning.profile_cache import cache_folder, fingerprint, load_cached
from vllm_moe_lightning.stock_vllm import StockRun
from vllm_moe_lightning.tensor_parallel import machine_of_rank, model_of_rank
from vllm_moe_lightning.weight_quantisation import cpu_build_bytes, expert_format

logger = init_logger("vllm.vllm_moe_lightning.planning")

# A model that fits is paged only if that is predicted to be so much faster: compiled graphs, which stock vLLM has and
# we do not, are in no cost model.
WORTH_PAGING = 1.5
WORTH_DEVICE_ATTENTION = 1.05  # what it must gain: its batch is bounded by device memory, whatever lengths come
STOCK_KV_SHARE = 0.8  # of the memory that is free, for the cache of a stock run on the CPU build

DESCRIBE_ONLY = frozenset(
    {
        "planner", "hardware", "expected_prompt_tokens", "expected_generation_tokens",
        "device", "device_memory_mib", "h2d_gb_per_s", "d2h_gb_per_s",
    }
)  # fmt: skip
"""Options that say what there is and what is wanted; any other fixes a part of the policy."""


def request_of(vllm_config: Any, options: MoeLightningConfig) -> EngineRequest:
    """Measures this machine if nobody says what to plan for and nothing is cached."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    spec = model_spec_of(model).with_kv_cache_dtype(cache.cache_dtype)
    num_ranks = parallel.tensor_parallel_size
    block_size = cache.block_size if cache.user_specified_block_size else PREFERRED_BLOCK_SIZE
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
    """With the type that vLLM computes in, which need not be the checkpoint's; experts as large as it packs them."""
    raw = {**model_config.hf_config.to_dict(), "dtype": str(model_config.dtype).removeprefix("torch.")}
    try:
        spec = spec_from_config(raw, Path(model_config.model).name)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{error}; to run it unplanned set moe_lightning.planner to 'off', and num_micro_batches, "
            f"num_resident_layers and --max-num-seqs yourself"
        ) from error
    packed = cpu_build_bytes(expert_format(raw)) if current_platform.is_cpu() else None
    return spec if packed is None else replace(spec, widths=replace(spec.widths, expert_bytes=packed))


def profile_of(hardware: str | None, num_ranks: int) -> HardwareProfile:
    """A preset, a profile from a file, or this machine; with as much host memory as is free here and now, for here the
    engine starts. Raises ValueError for a name that is none of these."""
    # vLLM's CPU build binds each rank to the memory of one node.
    available = available_memory_bytes(num_ranks if current_platform.is_cpu() else None)
    if hardware is None:
        profile = this_machine()
        now = machine_as_it_is_used(profile, available)
    elif hardware in GPU_PRESETS or Path(hardware).is_file():
        is_preset = hardware in GPU_PRESETS
        profile = preset_profile(hardware, num_gpus=num_ranks) if is_preset else read_profile(Path(hardware))
        now = machine_within(profile, available)
    else:
        raise ValueError(
            f"moe_lightning.hardware: {hardware!r} is neither a preset ({', '.join(GPU_PRESETS)}) nor a file; "
            f"`vllm-moe-lightning profile --output FILE` measures this machine"
        )
    if now != profile:
        logger.warning(
            "moe_lightning: %.2f GiB of host memory are left out of the plan: other processes hold them, they are on "
            "another NUMA node, or this machine does not have them",
            (profile.cpu.memory_bytes - now.cpu.memory_bytes) / GIB,
        )
    return now


def rank_of_plan(vllm_config: Any, options: MoeLightningConfig) -> tuple[MoeModelSpec, HardwareProfile]:
    """(model, machine) of one rank, as an engine is planned for them."""
    num_ranks = vllm_config.parallel_config.tensor_parallel_size
    spec = model_spec_of(vllm_config.model_config).with_kv_cache_dtype(vllm_config.cache_config.cache_dtype)
    machine = machine_of_rank(profile_of(options.hardware, num_ranks), num_ranks)
    return model_of_rank(spec, num_ranks), machine_under_options(machine, options)


def this_machine() -> HardwareProfile:
    cached, warnings = load_cached(cache_folder(), fingerprint(), quick=True)
    if cached is None:
        from vllm_moe_lightning.integration.experts_probe import device_experts
        from vllm_moe_lightning.profiling import machine_profile  # torch, and the kernels

        logger.info(
            "moe_lightning: measuring this machine for the planner, once, in a few seconds; kept in %s "
            "(`vllm-moe-lightning profile` measures longer and better)",
            cache_folder(),
        )
        started_s = time.monotonic()
        cached, more = machine_profile(quick=True, disk_folder=cache_folder(), experts_probe=device_experts)
        warnings = [*warnings, *more]
        logger.info("moe_lightning: measured in %.1f s", time.monotonic() - started_s)
    for warning in [*warnings, *cached.warnings]:
        logger.warning("moe_lightning: %s", warning)
    return cached.profile


def measured_threads(hardware: str | None, planned: PlannedEngine) -> int:
    """As in EnginePlan.attention_threads. hardware: the option."""
    if hardware is not None or planned.plan.attention_on_device:
        return 0
    from vllm_moe_lightning.profiling import attention_threads  # torch, and the kernels

    return attention_threads(planned.machine.cpu.num_threads)


def write_plan(vllm_config: Any, planned: PlannedEngine) -> None:
    """The plan's limits, exactly, into vLLM's configuration, and the plan into `additional_config`."""
    plan, scheduler, cache = planned.plan, vllm_config.scheduler_config, vllm_config.cache_config
    scheduler.max_num_seqs = plan.max_num_seqs
    scheduler.max_num_batched_tokens = plan.max_num_batched_tokens
    cache.block_size = plan.block_size
    cache.user_specified_block_size = True  # else a backend's preference would replace it where the worker starts
    # One figure for all ranks, so that they agree on the number of blocks.
    cache.kv_cache_memory_bytes = plan.kv_bytes
    if plan.max_model_len < vllm_config.model_config.max_model_len:
        vllm_config.model_config.max_model_len = plan.max_model_len
    scheduler.verify_max_model_len(vllm_config.model_config.max_model_len)
    store_plan(vllm_config, plan)


def plan(vllm_config: Any, options: MoeLightningConfig) -> bool:
    """Plan, and write the plan down. False: stock vLLM is to run, and the configuration says so."""
    started_s = time.monotonic()
    request = request_of(vllm_config, options)
    planning = EnginePlanning(request, attention_on_device=options.attention == "device")
    stock = planning.stock_runs()
    on_device = None if _fixed_by_user(vllm_config) else stock.on_device
    try:
        planned = _fastest_place(request, cache_dtype=vllm_config.cache_config.cache_dtype)
    except PolicyInfeasibleError:
        if on_device is None:
            raise
        planned = None
    paged_tokens_per_s = 0.0 if planned is None else planned.policy.tokens_per_s
    if on_device is not None and paged_tokens_per_s < on_device.tokens_per_s * WORTH_PAGING:
        _step_aside(vllm_config, planning, on_device, paged_tokens_per_s)
        return False
    assert planned is not None, "nothing fits, and that was not raised"
    num_threads = measured_threads(options.hardware, planned)
    planned = replace(planned, plan=structs.replace(planned.plan, attention_threads=num_threads))
    write_plan(vllm_config, planned)
    logger.info("moe_lightning: %s", plan_table(planned.plan, planning.spec.name, planning.request.num_ranks))
    logger.info(
        "moe_lightning: planned in %.1f s, of %d choices", time.monotonic() - started_s, planned.policy.num_choices
    )
    for warning in planned.policy.warnings:
        logger.warning("moe_lightning: %s", warning)
    if stock.offload is not None and stock.offload.tokens_per_s > paged_tokens_per_s:
        logger.warning(
            "moe_lightning: stock vLLM with %d of %d layers offloaded and %d sequences is predicted to be faster: %.1f "
            "against %.1f tokens/s; see --offload-group-size, or allow a larger batch",
            planning.spec.num_moe_layers - stock.offload.num_resident_layers,
            planning.spec.num_moe_layers,
            stock.offload.num_seqs,
            stock.offload.tokens_per_s,
            paged_tokens_per_s,
        )
    return True


def _fastest_place(request: EngineRequest, cache_dtype: str) -> PlannedEngine:
    """With attention where it is asked for, or where the job is predicted to be faster.

    Raises PolicyInfeasibleError, of attention on the CPU unless the device was asked for, where nothing fits.
    """
    options = request.options
    if options.attention == "device":
        return EnginePlanning(request, attention_on_device=True).plan()
    # A cache in 8 bits with scales is ours alone, and so are the other schedules and several micro-batches. Where
    # prompts are attended to is a question only where decode attention is on the CPU.
    is_ours = cache_dtype in QUANTISED_TYPES or options.schedule != "cgopipe"
    is_of_prompts = options.prefill_attention == "cpu" or options.prefill_context != "auto"
    if options.attention == "cpu" or is_ours or is_of_prompts or options.num_micro_batches not in (None, 1):
        return EnginePlanning(request).plan()
    try:
        on_device = EnginePlanning(request, attention_on_device=True).plan()
    except PolicyInfeasibleError:
        return EnginePlanning(request).plan()
    try:
        on_cpu = EnginePlanning(request).plan()
    except PolicyInfeasibleError:
        return on_device
    gain = on_device.policy.tokens_per_s / on_cpu.policy.tokens_per_s
    return on_device if gain > WORTH_DEVICE_ATTENTION else on_cpu


def _fixed_by_user(vllm_config: Any) -> bool:
    """Whether the user asks for paging in particular, and not only for what is fastest."""
    options = vllm_config.additional_config.get(OPTIONS_KEY) or {}
    # Stock vLLM's CPU build has no KV cache in 8 bits with scales.
    is_ours = vllm_config.cache_config.cache_dtype in QUANTISED_TYPES
    return is_ours or vllm_config.scheduler_config.scheduler_cls is not None or bool(set(options) - DESCRIBE_ONLY)


def _step_aside(vllm_config: Any, planning: EnginePlanning, stock: StockRun, paged_tokens_per_s: float) -> None:
    gpu, budget_gib = planning.machine.gpu.name, planning.machine.gpu_memory_budget_bytes / GIB
    reason = (
        f"the weights of {planning.spec.name} ({stock.weight_bytes / GIB:.2f} GiB) and the KV cache of "
        f"{stock.num_seqs} sequences ({stock.kv_bytes / GIB:.2f} GiB) fit the {budget_gib:.2f} GiB of {gpu}"
    )
    logger.info(
        "moe_lightning: %s, so this engine runs stock vLLM and pages nothing (predicted %.1f tokens/s against %.1f; "
        "set moe_lightning.num_resident_layers to page all the same)",
        reason,
        stock.tokens_per_s,
        paged_tokens_per_s,
    )
    cache = vllm_config.cache_config
    if current_platform.is_cpu() and planning.request.given.kv_bytes is None:
        # By itself the CPU build takes nearly all of the host's memory, or does not start.
        free = available_memory_bytes(planning.request.num_ranks) - planning.request.num_ranks * stock.weight_bytes
        cache.kv_cache_memory_bytes = int(min(stock.kv_bytes, STOCK_KV_SHARE * free / planning.request.num_ranks))
    vllm_config.parallel_config.worker_cls = "auto"
    vllm_config.scheduler_config.scheduler_cls = None
    vllm_config.additional_config = {**vllm_config.additional_config, STEPPED_ASIDE_KEY: reason}
