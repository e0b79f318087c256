"""Completes a vLLM configuration that asks for us, and refuses what does not go together with us.

Runs in the front end while the configuration is still open, before any weight is read. Every refusal is one sentence
that names the flag to drop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import vllm.envs as envs
from msgspec.structs import replace
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_moe_lightning.checkpoint import check_checkpoint
from vllm_moe_lightning.config import OPTIONS_KEY, MoeLightningConfig, parse_options
from vllm_moe_lightning.device.factory import refuse_unheeded
from vllm_moe_lightning.engine_plan import plan_of
from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.integration.attention import register_host_attention
from vllm_moe_lightning.integration.compat import require_ledger
from vllm_moe_lightning.integration.exposition import open_metrics
from vllm_moe_lightning.integration.plain_experts import LAYOUT_BACKEND
from vllm_moe_lightning.integration.planning import model_spec_of, plan
from vllm_moe_lightning.integration.platform import attention_backend, is_cuda, worker_base
from vllm_moe_lightning.integration.quantised_experts import has_quantised_experts, refuse_experts_without_kernel
from vllm_moe_lightning.integration.register import SCHEDULER_MODULE, WORKER_CLS
from vllm_moe_lightning.kernels.attention import resolve_isa, supported_head_dims
from vllm_moe_lightning.kv_cache_type import QUANTISED_TYPES
from vllm_moe_lightning.model_config import FAMILIES
from vllm_moe_lightning.tensor_parallel import model_of_rank

logger = init_logger("vllm.vllm_moe_lightning.configure")


def options_of(vllm_config: Any) -> MoeLightningConfig:
    """Our options inside a vLLM configuration. Raises ValueError for a bad one."""
    additional = vllm_config.additional_config
    return parse_options(additional.get(OPTIONS_KEY) if isinstance(additional, dict) else None)


def options_in_force(vllm_config: Any) -> MoeLightningConfig:
    """The options, with the planner's choices in place of what was left to it."""
    options, planned = options_of(vllm_config), plan_of(vllm_config)
    if planned is None:
        return options
    return replace(
        options,
        num_micro_batches=planned.num_micro_batches,
        num_resident_layers=planned.num_resident_layers,
        expert_slots=planned.expert_slots or None,
        fetched_up_to_tokens=planned.fetched_up_to_tokens if options.experts == "fetched" else None,
        attention="device" if planned.attention_on_device else "cpu",
    )


def configure(vllm_config: Any) -> None:
    """Amend `vllm_config` in place: the planned limits, worker and scheduler class, eager mode."""
    require_ledger()
    options = options_of(vllm_config)
    _refuse_conflicts(vllm_config, options)
    refuse_device(options)
    refuse_experts_without_kernel(vllm_config.model_config)
    resolve_isa("auto")  # attention needs AVX2 or AVX-512, and the native library
    _check_checkpoint(vllm_config)
    scheduler_cls = _scheduler_cls(vllm_config)
    _refuse_other_classes(vllm_config, scheduler_cls)
    refuse_uneven_ranks(vllm_config)

    # vLLM runs this again on every copy of the configuration: then there is a plan, and it stays.
    if options.planner == "auto" and plan_of(vllm_config) is None and not plan(vllm_config, options):
        return

    vllm_config.parallel_config.worker_cls = WORKER_CLS
    if vllm_config.parallel_config.distributed_executor_backend == "ray" and current_platform.is_cpu():
        from vllm_moe_lightning.integration.ray_on_cpu import CpuRayExecutor  # imports Ray

        vllm_config.parallel_config.distributed_executor_backend = CpuRayExecutor
    vllm_config.scheduler_config.scheduler_cls = scheduler_cls
    if not vllm_config.model_config.enforce_eager:
        logger.info("moe_lightning: running eagerly (torch.compile and CUDA graphs cannot pause at attention)")
        vllm_config.model_config.enforce_eager = True
    if is_cuda() and options_in_force(vllm_config).attention != "device":
        vllm_config.attention_config.backend = attention_backend()
        register_host_attention(is_used=True)  # vLLM asks the backend for its block sizes in this process too
    if is_cuda() and needs_plain_experts(options):  # what our kernels read must lie as it was loaded
        vllm_config.kernel_config.moe_backend = LAYOUT_BACKEND.lower()
    vllm_config.compilation_config.mode = CompilationMode.NONE
    vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    open_metrics(vllm_config)


def _scheduler_cls(vllm_config: Any) -> str:
    asynchronous = bool(vllm_config.scheduler_config.async_scheduling) and not current_platform.is_cpu()
    return f"{SCHEDULER_MODULE}.{'AsyncMoELightningScheduler' if asynchronous else 'MoELightningScheduler'}"


def _refuse_other_classes(vllm_config: Any, scheduler_cls: str) -> None:
    worker_cls = vllm_config.parallel_config.worker_cls
    if worker_cls not in ("auto", WORKER_CLS):
        raise UnsupportedError(
            f"--worker-cls {worker_cls} together with additional_config[{OPTIONS_KEY!r}]; "
            f"use --worker-cls {WORKER_CLS}, or drop the options"
        )
    given = vllm_config.scheduler_config.scheduler_cls
    if given not in (None, scheduler_cls):
        raise UnsupportedError(f"--scheduler-cls {given} replaces ours; drop it (ours is {scheduler_cls})")


def refuse_uneven_ranks(vllm_config: Any) -> None:
    """Families that we have no sizes of are left to vLLM's own checks, where a plan does not need the sizes anyway."""
    num_ranks = vllm_config.parallel_config.tensor_parallel_size
    if num_ranks > 1 and vllm_config.model_config.hf_config.model_type in FAMILIES:
        model_of_rank(model_spec_of(vllm_config.model_config), num_ranks)


def _check_checkpoint(vllm_config: Any) -> None:
    """A model on the hub is vLLM's to fetch: what lies in its cache is not looked at."""
    model, load_format = vllm_config.model_config, vllm_config.load_config.load_format
    folder = Path(model.model)
    if folder.is_dir():
        check_checkpoint(folder, model.hf_config.to_dict(), str(load_format))


def refuse_device(options: MoeLightningConfig) -> None:
    wanted = options.device
    worker_base()  # names a platform that we do not run on
    if current_platform.is_cpu() and wanted == "cuda":
        raise UnsupportedError("moe_lightning.device is 'cuda', but this vLLM is a CPU build; drop the option")
    refuse_unheeded("cuda" if is_cuda() else "emulated", options)
    if is_cuda():
        if options.device == "emulated":
            raise UnsupportedError("moe_lightning.device is 'emulated', but this vLLM is a CUDA build; drop the option")
        logger.warning(
            "moe_lightning: the CUDA path has passed every check that needs no GPU, and has not been run on one by its "
            "developers; run benchmarks/gpu_check.py, and `vllm-moe-lightning check` with your model, before you rely "
            "on it"
        )


def _refuse_conflicts(vllm_config: Any, options: MoeLightningConfig) -> None:
    for what, cure in conflicts(vllm_config, options):
        raise UnsupportedError(f"moe_lightning does not support {what}; {cure}")


def conflicts(vllm_config: Any, options: MoeLightningConfig) -> list[tuple[str, str]]:
    """(what, cure) of all that is asked for and not supported."""
    return [(what, cure) for is_asked_for, what, cure in _conflicts(vllm_config, options) if is_asked_for]


def needs_plain_experts(options: MoeLightningConfig) -> bool:
    """Whether the options ask for kernels of ours for experts, which read them as they were loaded."""
    return options.experts != "device" or options.expert_kernel == "torch"


def _has_experts(model_config: Any) -> bool:
    """vLLM's `is_moe` does not know where DBRX keeps its number of experts."""
    ffn_config = getattr(model_config.hf_config, "ffn_config", None)
    return bool(model_config.is_moe or getattr(ffn_config, "moe_num_experts", 0))


def _conflicts(vllm_config: Any, options: MoeLightningConfig) -> list[tuple[bool, str, str]]:
    """(refused, what, cure) for each feature outside the first version."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    offload, on_device = vllm_config.offload_config, options.attention == "device"
    moe_backend = vllm_config.kernel_config.moe_backend
    return [
        (
            offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0,
            "vLLM's own weight offloading at the same time",
            "drop --cpu-offload-gb and --offload-*",
        ),
        (not _has_experts(model), f"{model.architectures}: it has no experts to page", "drop --worker-cls"),
        (
            model.quantization is not None and not getattr(model.hf_config, "quantization_config", None),
            f"--quantization {model.quantization} on a checkpoint that is not quantised (its config.json has no "
            "quantization_config)",
            "drop --quantization",
        ),
        (
            needs_plain_experts(options) and has_quantised_experts(model),
            f"quantised experts with moe_lightning.experts {options.experts!r} and expert_kernel "
            f"{options.expert_kernel!r}",
            "drop those options",
        ),
        (
            options.experts != "device" and options.expert_kernel == "vllm" and not is_cuda(),
            f"moe_lightning.expert_kernel 'vllm' with experts {options.experts!r} on the CPU build, whose kernel packs "
            "the weights for itself",
            "drop one of the two",
        ),
        (
            options.experts == "fetched" and is_cuda() and model.dtype is torch.float32,
            "moe_lightning.experts 'fetched' in float32, which its kernel does not compute",
            "pass --dtype bfloat16 or float16, or drop that option",
        ),
        (
            needs_plain_experts(options) and is_cuda() and moe_backend not in ("auto", LAYOUT_BACKEND.lower()),
            f"--moe-backend {moe_backend}, as it reorders the weights, with our kernels for experts",
            "drop it, or moe_lightning.experts and expert_kernel",
        ),
        (vllm_config.speculative_config is not None, "speculative decoding", "drop --speculative-config"),
        (vllm_config.lora_config is not None, "LoRA", "drop --enable-lora"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism", "drop --pipeline-parallel-size"),
        (
            parallel.decode_context_parallel_size > 1,
            "decode context parallelism",
            "drop --decode-context-parallel-size",
        ),
        (
            getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "prefill context parallelism",
            "drop --prefill-context-parallel-size",
        ),
        (
            parallel.data_parallel_size > 1,
            "data parallelism inside one engine",
            "start one engine per replica",
        ),
        (
            options.planner == "auto" and parallel._api_process_count > 1,
            "planning with several API servers, each of which would plan for itself",
            "drop --api-server-count, or set moe_lightning.planner to 'off'",
        ),
        (
            parallel.use_ray and not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True),  # gone in 0.33
            "vLLM's older Ray executor, which steps past the worker",
            "unset VLLM_USE_RAY_V2_EXECUTOR_BACKEND",
        ),
        (parallel.enable_expert_parallel, "expert parallelism", "drop --enable-expert-parallel"),
        (parallel.enable_eplb, "expert load balancing", "drop --enable-eplb"),
        (parallel.enable_dbo, "dual batch overlap", "drop --enable-dbo"),
        (vllm_config.kv_transfer_config is not None, "KV connectors", "drop --kv-transfer-config"),
        (
            model.use_mla and not on_device,
            "multi-head latent attention on the CPU",
            "set moe_lightning.attention to 'device', or run this model without --worker-cls",
        ),
        (model.is_encoder_decoder, "encoder-decoder models", "run this model without --worker-cls"),
        (model.is_multimodal_model, "multimodal models", "run this model without --worker-cls"),
        (
            model.is_hybrid or model.is_attention_free,
            "models with state-space layers",
            "run without --worker-cls",
        ),
        (
            on_device and cache.cache_dtype in QUANTISED_TYPES,
            f"a KV cache of type {cache.cache_dtype} with attention on the device",
            "drop moe_lightning.attention, or --kv-cache-dtype",
        ),
        (
            not on_device
            and cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch."), *QUANTISED_TYPES),
            f"a KV cache of type {cache.cache_dtype} with a model of type {model.dtype}",
            f"leave --kv-cache-dtype at the model's own type, or give {' or '.join(QUANTISED_TYPES)}",
        ),
        (
            bool(cache.kv_cache_dtype_skip_layers),
            "KV caches of several types in one model",
            "drop --kv-cache-dtype-skip-layers",
        ),
        (
            not on_device and model.get_head_size() not in supported_head_dims(),
            f"attention heads of size {model.get_head_size()} (multiples of 8 up to 256 are)",
            "run this model without --worker-cls",
        ),
        (
            getattr(vllm_config.aux_output_config, "enabled", False),
            "returning routed experts",
            "drop --enable-return-routed-experts",
        ),
        (vllm_config.weight_transfer_config is not None, "weight transfer", "drop --weight-transfer-config"),
    ]
