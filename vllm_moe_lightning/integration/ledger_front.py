"""Names of vLLM touched in the front end and the engine core: configuration, scheduler, metrics."""

from __future__ import annotations

from vllm_moe_lightning.integration.touched_name import TouchedName

FRONT: tuple[TouchedName, ...] = (
    TouchedName(
        "vllm.platforms.interface:Platform.apply_config_platform_defaults",
        "patch",
        "the one hook that runs while the configuration is still open, so that --worker-cls alone is enough; the "
        "original runs first, and nothing else happens unless the plugin was asked for",
        "vLLM lets a worker class amend the configuration",
        ("vllm_config",),
    ),
    TouchedName(
        "vllm.engine.arg_utils:EngineArgs._set_default_max_num_seqs_and_batched_tokens_args",
        "patch",
        "notes which batch limits the user gave, before vLLM fills in its defaults, then calls the original; "
        "and does nothing unless the plugin was asked for",
        "vLLM's configuration says which of its values were given",
        ("self",),
    ),
    TouchedName(
        "vllm.config:SchedulerConfig.verify_max_model_len",
        "use",
        "vLLM's own check of the limits that the planner sets",
        "never",
        ("self", "max_model_len"),
    ),
    TouchedName(
        "vllm.config:CacheConfig",
        "use",
        "`user_specified_block_size` is set with the planned block size, or the backend's preference would replace it",
        "vLLM's configuration can be amended by a worker class",
    ),
    TouchedName("vllm.config:CompilationMode", "use", "eager mode", "never"),
    TouchedName("vllm.config:CUDAGraphMode", "use", "eager mode", "never"),
    TouchedName("vllm.platforms:current_platform", "use", "CPU build or another", "never"),
    TouchedName("vllm:LLM", "use", "the bulk runner", "never"),
    TouchedName("vllm:SamplingParams", "use", "the bulk runner", "never"),
    TouchedName("vllm.v1.core.sched.scheduler:Scheduler", "subclass", "our scheduler", "never"),
    TouchedName("vllm.v1.core.sched.async_scheduler:AsyncScheduler", "subclass", "our scheduler", "never"),
    TouchedName(
        "vllm.v1.core.sched.scheduler:Scheduler.schedule",
        "patch",
        "overridden in our scheduler: sets the token limits of the step, which vLLM reads from its own attributes and "
        "configuration, and puts them back",
        "vLLM takes limits per step",
    ),
    TouchedName(
        "vllm.v1.core.sched.scheduler:Scheduler._handle_blocked_waiting_request",
        "patch",
        "overridden in our scheduler: a long prompt is passed over while short ones wait",
        "vLLM limits how many long prompts it prefills at once",
        ("self", "request"),
    ),
    TouchedName(
        "vllm.v1.core.sched.scheduler:Scheduler._free_request",
        "patch",
        "overridden in our scheduler: learns the lengths of finished requests",
        "never",
        ("self", "request"),
    ),
    TouchedName(
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
        "patch",
        "replaced on the scheduler's instance: the moment of admission, with the prefix hits in hand",
        "vLLM reserves blocks for what running requests will still generate",
        ("self", "request", "new_computed_blocks", "has_scheduled_reqs"),
    ),
    TouchedName(
        "vllm.v1.core.kv_cache_manager:KVCacheManager.get_blocks",
        "use",
        "blocks that running requests hold",
        "as above",
        ("self", "request_id"),
    ),
    TouchedName(
        "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks", "use", "blocks to be had", "as above", ("self",)
    ),
    TouchedName(
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager",
        "use",
        "`block_size` and `max_admission_blocks_per_request` of each group of layers",
        "as above",
    ),
    TouchedName("vllm.v1.request:RequestStatus", "use", "waiting, preempted, finished", "never"),
    TouchedName("vllm.v1.core.sched.output:NewRequestData.prompt_len", "use", "tokens are counted", "never"),
    TouchedName(
        "vllm.v1.core.sched.output:CachedRequestData",
        "use",
        "tokens are counted",
        "never",
        ("req_ids", "num_computed_tokens", "num_output_tokens"),
    ),
    TouchedName(
        "vllm.v1.metrics.prometheus:get_prometheus_registry",
        "use",
        "not called: our metrics go where it looks, the global registry or the folder PROMETHEUS_MULTIPROC_DIR",
        "never",
    ),
    TouchedName(
        "vllm.platforms.interface:Platform.ray_device_key",
        "patch",
        "the CPU platform names no resource of Ray's, and is refused by vLLM for that (integration/ray_on_cpu.py)",
        "CpuPlatform names one",
    ),
)
