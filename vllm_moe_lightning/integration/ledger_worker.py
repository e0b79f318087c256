"""Names of vLLM touched in a worker: runner, attention, experts, memory."""

from __future__ import annotations

from vllm_moe_lightning.integration.touched_name import TouchedName

WORKER: tuple[TouchedName, ...] = (
    TouchedName(
        "vllm.forward_context:_forward_context",
        "patch",
        "each micro-batch runs under its own forward context; the context manager cannot be held across a switch",
        "vLLM offers a setter",
    ),
    TouchedName(
        "vllm.forward_context:create_forward_context",
        "use",
        "one context per micro-batch",
        "never",
        ("attn_metadata", "vllm_config", "dp_metadata"),
    ),
    TouchedName("vllm.forward_context:get_forward_context", "use", "the step's metadata", "never"),
    TouchedName(
        "vllm.v1.attention.backends.registry:register_backend",
        "use",
        "our attention backend takes CPU_ATTN's place",
        "the CPU platform honours --attention-backend",
        ("backend", "class_path"),
    ),
    TouchedName("vllm.v1.attention.backends.registry:AttentionBackendEnum.CPU_ATTN", "use", "as above", "as above"),
    TouchedName(
        "vllm.v1.attention.backends.registry:AttentionBackendEnum.CUSTOM", "use", "our backend's name on CUDA", "never"
    ),
    TouchedName(
        "vllm.v1.attention.backends.registry:AttentionBackendEnum.clear_override",
        "use",
        "vLLM's own backend again, where attention is on the device",
        "as above",
        ("self",),
    ),
    TouchedName(
        "vllm.v1.attention.backend:AttentionBackend.get_preferred_block_size",
        "patch",
        "overridden in our backend: long blocks suit the CPU kernel",
        "never",
        ("default_block_size",),
    ),
    TouchedName("vllm.v1.attention.backend:AttentionBackend", "subclass", "host attention", "never"),
    TouchedName(
        "vllm.v1.attention.backend:AttentionBackend.customize_spec",
        "patch",
        "overridden in our backend: the page of an 8-bit KV cache counts its scales",
        "the backend builds the spec (vLLM calls this hook temporary)",
        ("spec",),
    ),
    TouchedName(
        "vllm.v1.kv_cache_interface:AttentionSpec.state_content_size_bytes",
        "use",
        "`state_content_bytes` of the spec is set to what a token and head take with their scales",
        "as above",
    ),
    TouchedName("vllm.v1.attention.backend:AttentionImpl", "subclass", "host attention", "never"),
    TouchedName("vllm.v1.attention.backend:AttentionMetadataBuilder", "subclass", "host attention", "never"),
    TouchedName("vllm.v1.attention.backend:CommonAttentionMetadata", "use", "rows of a step", "never"),
    TouchedName(
        "vllm.model_executor.layers.attention:Attention",
        "use",
        "`use_direct_call` is set on instances: a greenlet cannot switch under a torch.ops frame",
        "micro-batches run as threads under torch.compile",
    ),
    TouchedName(
        "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts",
        "subclass",
        "expert parameters are made on the host, and every use of them is checked against the ring of slots",
        "never",
    ),
    TouchedName(
        "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts.forward_modular",
        "patch",
        "overridden in our subclass",
        "never",
        ("self", "x", "topk_weights", "topk_ids"),
    ),
    TouchedName(
        "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts.forward_monolithic",
        "patch",
        "overridden in our subclass",
        "never",
        ("self", "x", "router_logits"),
    ),
    TouchedName(
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.process_weights_after_loading",
        "patch",
        "left out while weights load, where the CPU is to compute experts in place: its kernel's packing is not ours",
        "vLLM's CPU kernel may be called from a second thread",
        ("self", "layer"),
    ),
    TouchedName(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        "use",
        "only unquantised experts are computed on the CPU",
        "never",
    ),
    *(
        TouchedName(
            f"vllm.model_executor.layers.fused_moe.{name}",
            "use",
            "asked which kernels the CPU build would try for quantised experts, and whether they run on this machine",
            "vLLM says so before it loads a model",
        )
        for name in (
            "oracle.fp8:backend_to_kernel_cls",
            "oracle.fp8:Fp8MoeBackend.CPU",
            "oracle.fp8:Fp8MoeBackend.CPU_W8A8",
            "oracle.int8:backend_to_kernel_cls",
            "oracle.int8:Int8MoeBackend.CPU",
            "oracle.int_wna16:backend_to_kernel_cls",
            "oracle.int_wna16:WNA16MoEBackend.CPU",
            "oracle.int_wna16:WNA16MoEBackend.ZEN_CPU",
            "oracle.mxfp4:backend_to_kernel_cls",
            "oracle.mxfp4:Mxfp4MoeBackend.CPU",
            "modular_kernel:FusedMoEExperts._supports_current_device",
        )
    ),
    TouchedName(
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._select_forward",
        "use",
        "`_forward_entry` of instances is set to the functions below, where experts need not be streamed under CUDA",
        "micro-batches run as threads",
    ),
    TouchedName(
        "vllm.model_executor.layers.fused_moe.runner.shared_experts:SharedExperts.output",
        "use",
        "what it hands out, `_output` of the instance, is put aside while a micro-batch waits for its routed experts",
        "shared experts' output is a local variable",
    ),
    TouchedName(
        "vllm.config.kernel:KernelConfig.moe_backend",
        "use",
        "set to triton on CUDA where experts need not be streamed: other backends reorder the weights",
        "never",
    ),
    TouchedName(
        "vllm.model_executor.layers.fused_moe.oracle.unquantized:UnquantizedMoeBackend.TRITON",
        "use",
        "whether the weights lie as they were loaded, by `unquantized_backend` of the method",
        "never",
    ),
    TouchedName(
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:_moe_forward",
        "use",
        "as above",
        "as above",
        ("hidden_states", "router_logits"),
    ),
    TouchedName(
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:_moe_forward_shared",
        "use",
        "as above",
        "as above",
        ("hidden_states", "router_logits"),
    ),
    TouchedName(
        "vllm.model_executor.custom_op:op_registry_oot",
        "use",
        "register each class once per process",
        "never",
    ),
    TouchedName(
        "vllm.model_executor.offloader.base:BaseOffloader",
        "subclass",
        "tells us the decoder layers as they are made, and when the model is loaded",
        "never",
    ),
    TouchedName(
        "vllm.model_executor.offloader.base:set_offloader",
        "use",
        "the runner installs vLLM's own in its constructor; ours replaces it before the model is built",
        "vLLM takes an offloader by name",
    ),
    TouchedName("vllm.v1.attention.backend:AttentionType", "use", "only decoder attention is taken", "never"),
    TouchedName("vllm.v1.attention.backend:MultipleOf", "use", "block sizes that we take", "never"),
    TouchedName("vllm.v1.kv_cache_interface:KVCacheLayout", "use", "a contiguous piece of memory per layer", "never"),
    TouchedName("vllm.logger:init_logger", "use", "our lines go where vLLM's go", "never"),
    TouchedName(
        "vllm._custom_ops:cpu_fused_moe",
        "use",
        "timed for the planner's profile of the emulated device",
        "never",
        ("out", "input", "w13", "w2"),
        "cpu",
    ),
    TouchedName(
        "vllm._custom_ops:cpu_prepack_moe_weight",
        "use",
        "as above",
        "never",
        ("weight", "isa"),
        "cpu",
    ),
    TouchedName("vllm.v1.worker.cpu_worker:CPUWorker", "subclass", "our worker", "never", platform="cpu"),
    TouchedName(
        "vllm.v1.worker.cpu_worker:CPUWorker.init_device", "patch", "overridden in our worker", "never", platform="cpu"
    ),
    TouchedName(
        "vllm.v1.worker.cpu_worker:CPUWorker.initialize_from_config", "patch", "as above", "never", platform="cpu"
    ),
    TouchedName("vllm.v1.worker.cpu_worker:CPUWorker.shutdown", "patch", "as above", "never", platform="cpu"),
    TouchedName(
        "vllm.v1.worker.cpu_worker:CPUWorker.sample_tokens",
        "patch",
        "overridden in our worker: the generators of seeded requests are put aside while their prompt is partial "
        "(integration/partial_prompts.py; `discard_request_mask` and `input_batch.generators` of the V1 runner)",
        "vLLM's V1 runner no longer calls `get_offset` on CPU generators",
        platform="cpu",
    ),
    TouchedName("vllm.v1.worker.gpu_worker:Worker", "subclass", "our worker on CUDA", "never", platform="cuda"),
    *(
        TouchedName(
            f"vllm.v1.worker.gpu_worker:Worker.{name}", "patch", "overridden in our worker", "never", parameters, "cuda"
        )
        for name, parameters in (
            ("init_device", ("self",)),
            ("load_model", ("self",)),
            ("determine_available_memory", ("self",)),
            ("initialize_from_config", ("self", "kv_cache_config")),
            ("execute_model", ("self", "scheduler_output")),
            ("sample_tokens", ("self", "grammar_output")),
            ("shutdown", ("self",)),
        )
    ),
    TouchedName(
        "vllm.v1.attention.backends.fa_utils:flash_attn_varlen_func",
        "use",
        "attention of prompts on the device; at start it is tried against torch's kernels (flash_attention.py)",
        "never",
        (
            "q",
            "k",
            "v",
            "max_seqlen_q",
            "cu_seqlens_q",
            "max_seqlen_k",
            "cu_seqlens_k",
            "seqused_k",
            "softmax_scale",
            "causal",
            "window_size",
            "block_table",
            "out",
            "num_splits",
            "fa_version",
        ),
        "cuda",
    ),
    TouchedName(
        "vllm.v1.attention.backends.fa_utils:is_fa_version_supported",
        "use",
        "whether this build has FlashAttention 2 for this GPU",
        "never",
        ("fa_version",),
        "cuda",
    ),
    TouchedName(
        "vllm.v1.worker.utils:allocate_kv_cache",
        "use",
        "makes the KV cache in host memory, whatever the runner's device is",
        "vLLM lets an attention backend say where its cache lies",
        ("kv_cache_config", "device"),
    ),
    TouchedName(
        "vllm.v1.worker.gpu_model_runner:allocate_kv_cache",
        "patch",
        "as above, while the V1 runner makes it",
        "as above",
    ),
    TouchedName(
        "vllm.v1.worker.gpu.attn_utils:allocate_kv_cache", "patch", "as above, while the V2 runner makes it", "as above"
    ),
    TouchedName(
        "vllm.envs:VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY",
        "use",
        "set while the weights load, so that packed experts come back to memory that can be given back",
        "vLLM asks an offloader where packed weights belong",
    ),
    TouchedName("vllm.v1.worker.worker_base:WorkerBase.load_model", "patch", "overridden in our worker", "never"),
    TouchedName(
        "vllm.v1.worker.worker_base:WorkerBase.execute_model",
        "patch",
        "overridden in our worker: a rank whose failure nobody hears ends, and tokens are counted",
        "vLLM reports the failure of any rank",
        ("self", "scheduler_output"),
    ),
    TouchedName(
        "vllm.distributed.parallel_state:get_world_group", "use", "process ids of the ranks, to watch them", "never"
    ),
    TouchedName(
        "vllm.distributed.parallel_state:get_tp_group",
        "use",
        "`device_communicator.dist_module.group_name` names the shared memory of the CPU collectives, which stays "
        "behind in /dev/shm when `vllm serve` stops",
        "vLLM unlinks it once it is mapped",
    ),
    TouchedName(
        "vllm.v1.executor.ray_executor_v2:RayExecutorV2._init_executor",
        "subclass",
        "ranks as Ray actors on the CPU build (integration/ray_on_cpu.py)",
        "CpuPlatform names a resource of Ray's",
        ("self",),
        platform="cpu",
        package="ray",
    ),
    TouchedName(
        "vllm.v1.executor.ray_executor_v2:RayExecutorV2._get_actor_resource_kwargs",
        "patch",
        "a rank on the CPU build takes the CPU of its bundle and no device",
        "as above",
        platform="cpu",
        package="ray",
    ),
    TouchedName(
        "vllm.v1.executor.ray_executor_v2:RayWorkerProc.get_node_and_physical_gpu_ids",
        "patch",
        "a rank on the CPU build has no device numbers",
        "as above",
        ("self",),
        platform="cpu",
        package="ray",
    ),
    TouchedName(
        "vllm.model_executor.models.dbrx:DbrxModel.load_weights",
        "patch",
        "checkpoint names of the experts moved under `routed_experts` (integration/dbrx.py)",
        "vllm#49004 is fixed",
    ),
)
