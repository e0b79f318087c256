"""Puts the engine together inside a vLLM worker: device, store, attention, executor; and reports what it did."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_moe_lightning.config import MoeLightningConfig, parse_options
from vllm_moe_lightning.device.factory import make_device
from vllm_moe_lightning.engine_plan import plan_of, weight_difference
from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.integration.attention import HostAttentionImpl
from vllm_moe_lightning.integration.cpu_experts import CpuExperts
from vllm_moe_lightning.integration.fetched_experts import FetchedExpertPlaces
from vllm_moe_lightning.integration.forward import PipelinedForward
from vllm_moe_lightning.integration.offloader import (
    expert_buffers,
    expert_layers,
    expert_parameters,
    paged_modules,
)
from vllm_moe_lightning.integration.peers import NodeRanks
from vllm_moe_lightning.integration.plain_experts import put_kernel_in_place
from vllm_moe_lightning.integration.platform import is_cuda
from vllm_moe_lightning.integration.prefill_place import context_limits_of, prefill_kernel, prefill_of
from vllm_moe_lightning.integration.thread_places import attention_threads, stream_cpus
from vllm_moe_lightning.integration.trace_requests import TraceRequests
from vllm_moe_lightning.integration.unstreamed_experts import prepare_modules
from vllm_moe_lightning.kernels.attention import AttentionPool
from vllm_moe_lightning.kv_cache import HostKvCache, kv_bytes_per_token
from vllm_moe_lightning.numa import interleave, nodes_of
from vllm_moe_lightning.pipeline.attention_path import AttentionInForward, AttentionPath, CpuAttentionPath
from vllm_moe_lightning.pipeline.context_frames import ContextFrames
from vllm_moe_lightning.pipeline.device_attention import DeviceAttentionPath
from vllm_moe_lightning.pipeline.device_prefill import DevicePrefill
from vllm_moe_lightning.pipeline.executor import PipelineExecutor
from vllm_moe_lightning.pipeline.expert_places import ALL_STREAMED, ExpertPlaces
from vllm_moe_lightning.pipeline.faults import attention_fault, zero_page
from vllm_moe_lightning.pipeline.host_attention import HostAttention
from vllm_moe_lightning.pipeline.report import RunReport
from vllm_moe_lightning.pipeline.schedule import SCHEDULE_NAMES
from vllm_moe_lightning.pipeline.trace import write_chrome_trace
from vllm_moe_lightning.pipeline.trace_ring import TraceRing
from vllm_moe_lightning.policy.policy import MIB, fixed_policy
from vllm_moe_lightning.weights.float16_cast import refuse_overflow
from vllm_moe_lightning.weights.store import ExpertLayer, PagedWeightStore

logger = init_logger("vllm.vllm_moe_lightning.runtime")

CHANGEABLE_WHILE_RUNNING = ("num_micro_batches", "lookahead", "schedule")


class Runtime:
    """Lives as long as the worker. `take_over` is called when the weights are loaded, `attach` when the model is
    complete."""

    def __init__(self, vllm_config: Any, options: MoeLightningConfig, ranks: NodeRanks) -> None:
        self._vllm_config = vllm_config
        self.options = options
        self._plan = plan_of(vllm_config)
        cpus = self._cpus = stream_cpus(ranks)
        self._gpu_node = ranks.gpu_node
        self.device = make_device("cuda" if is_cuda() else "emulated", options, cpus)
        measured = 0 if self._plan is None else self._plan.attention_threads
        self._pool = AttentionPool(attention_threads(options.attention_threads, measured, cpus, ranks), cpus)
        self._decoder_layers: list[torch.nn.Module] = []
        self._experts: list[ExpertLayer] = []
        self._attention_layers: list[Any] = []
        self._paths: dict[str, AttentionPath] = {}
        self._reads_context = False
        self._context_frames: ContextFrames | None = None
        self.executor: PipelineExecutor | None = None
        self._report: RunReport | None = None
        self._trace: TraceRing | None = None
        self._trace_requests: TraceRequests | None = None

    def take_over(self, decoder_layers: list[torch.nn.Module]) -> None:
        """Move the experts of all streamed layers into host pages."""
        self._decoder_layers = decoder_layers
        self._experts = expert_layers(decoder_layers)
        if not self._experts:
            raise UnsupportedError("this model has no experts to page; run it without --worker-cls")
        self._attention_layers = (
            [_only_attention_of(index, layer) for index, layer in enumerate(decoder_layers)]
            if not self._attends_on_device
            else [module for layer in decoder_layers for module in layer.modules() if hasattr(module, "kv_cache")]
        )
        if self._plan is not None:  # before anything is allocated, which may fail for that very reason
            largest = max(layer.num_bytes for layer in self._experts)
            _warn_of_difference("the experts of a layer", self._plan.expert_layer_bytes, largest)
        if self._was_cast:
            for experts in self._experts:
                for name, parameter in experts.parameters.items():
                    refuse_overflow(f"{experts.name} ({name})", parameter.data)
        policy = fixed_policy(self.options, [layer.num_bytes for layer in self._experts])
        store = PagedWeightStore(self._experts, policy, self.device)
        self._bring_the_rest_to_the_device()
        zero_page(self.options.debug, store)
        self.executor = PipelineExecutor(
            self.device, store, self._path_of, len(decoder_layers), policy, self.options.debug.remove_wait
        )
        put_kernel_in_place(decoder_layers, self.options.expert_kernel)
        for index, layer in enumerate(decoder_layers):
            layer.register_forward_pre_hook(lambda *_: self._running.layer_entry())
            if store.num_pages(index):
                for module in paged_modules(layer):
                    module.is_bound = lambda index=index: self._running.ring.is_bound(index)
        total = sum(layer.num_bytes for layer in self._experts)
        logger.info(
            "moe_lightning: %d MoE layers, %.1f MiB of experts; %d layers streamed from %.1f MiB of host pages through "
            "%d slots, %d resident; pages of %.2f MiB, %d per sweep; host memory is %s (device: %s)",
            len(self._experts),
            total / MIB,
            len(policy.streamed_layers),
            store.host_bytes / MIB,
            policy.num_slots,
            len(policy.resident_layers),
            policy.page_bytes / MIB,
            store.sweep_pages(),
            "pinned"
            if self.device.kind == "cuda" and self.options.host_memory != "pageable"
            else "pageable, not pinned",
            self.device.kind,
        )

    def _bring_the_rest_to_the_device(self) -> None:
        """Experts are made on the host (experts.py): what is not paged of them belongs beside the other weights."""
        paged = self._paged_ids
        for decoder_layer in self._decoder_layers:
            for tensor in (*expert_parameters(decoder_layer), *expert_buffers(decoder_layer)):
                if id(tensor) not in paged:
                    tensor.data = tensor.data.to(self.device.torch_device)

    @property
    def _was_cast(self) -> bool:
        """Whether the checkpoint says that it is of another type than float16, which it is loaded in."""
        model = self._vllm_config.model_config
        return model.dtype is torch.float16 and getattr(model.hf_config, "dtype", None) is not torch.float16

    @property
    def _paged_ids(self) -> set[int]:
        """Of the parameters that the store took over."""
        return {id(p) for layer in self._experts for p in layer.parameters.values()}

    def _path_of(self, schedule: str) -> AttentionPath:
        return self._paths[schedule]

    @property
    def _running(self) -> PipelineExecutor:
        assert self.executor is not None, "the experts were not taken over: vLLM did not call the offloader"
        return self.executor

    def attach(self, model: torch.nn.Module, other_bytes_in_layers: int) -> None:
        """Count what stays on the device, size the staging buffers, and put ourselves in place of `model.forward`.

        other_bytes_in_layers: of the decoder layers, everything but the experts.
        """
        paged = self._paged_ids
        if self._was_cast:
            for name, parameter in model.named_parameters():
                if id(parameter) not in paged:
                    refuse_overflow(name, parameter.data)
        of_experts = [p for layer in self._decoder_layers for p in expert_parameters(layer)]
        in_layers = {id(p) for layer in self._decoder_layers for p in layer.parameters()}
        other_bytes = other_bytes_in_layers + sum(p.nbytes for p in of_experts if id(p) not in paged)
        other_bytes += sum(p.nbytes for p in model.parameters() if id(p) not in in_layers)
        self.device.reserve(other_bytes, "other weights")
        if self._plan is not None:
            _warn_of_difference("weights other than experts", self._plan.other_weight_bytes, other_bytes)
        prefill = context = None
        self._paths = dict.fromkeys(SCHEDULE_NAMES, AttentionInForward())
        if not self._attends_on_device:
            for layer in self._attention_layers:
                layer.impl.bring_sinks_to_host()
            kernel = prefill_kernel(self.options, self.device, self._attention_layers, self._vllm_config)
            prefill = prefill_of(self.options, self.device.kind, self._attention_layers, kernel)
            context = context_limits_of(self.options, self.device.kind, self._attention_layers, self._vllm_config)
            if context is not None:
                self._context_frames = ContextFrames(self.device, self._cache_of, context.num_tokens, kernel)
            self._paths = self._host_attention_paths(prefill)
            self._reads_context = context is not None or self.options.schedule == "s4"
        PipelinedForward(
            model,
            self._vllm_config,
            self._running,
            prefill_on_device=prefill is not None,
            context_limits=context,
            expert_places=self._expert_places(),
        )
        if (trace_file := self._trace_file()) is not None:
            self._trace = TraceRing(self._running, self.options.trace_operations)
            self._trace_requests = TraceRequests(trace_file, self.write_trace)
            logger.info("moe_lightning: `vllm-moe-lightning trace %s --live` shows the last sweeps", trace_file)
        self.reset()

    def _expert_places(self) -> Callable[[int], ExpertPlaces]:
        """By the tokens of a sweep."""
        options = self.options
        if options.experts == "device" or not self._running.store.layers:
            return all_streamed
        if options.experts == "fetched" and options.fetched_up_to_tokens == 0:
            logger.warning("moe_lightning: no sweep fetches experts, all stream them (fetched_up_to_tokens is 0)")
            return all_streamed
        modules = prepare_modules(self._running, self._decoder_layers, options.experts)
        most_tokens = self._vllm_config.scheduler_config.max_num_batched_tokens
        if options.experts == "fetched":
            return FetchedExpertPlaces(
                self._running, modules, most_tokens, options.expert_slots, options.fetched_up_to_tokens
            ).places
        table = self._plan.cpu_expert_layers if options.experts == "auto" and self._plan is not None else None
        if table is not None:
            logger.info("moe_lightning: experts on the CPU, by a sweep's tokens: %s", _told(table))
        return CpuExperts(self._running, modules, self._pool, most_tokens, table).places

    def _host_attention_paths(self, prefill: DevicePrefill | None) -> dict[str, AttentionPath]:
        """By schedule."""
        for layer in self._attention_layers:
            layer.use_direct_call = True
        element_bytes = self._vllm_config.model_config.dtype.itemsize
        bytes_per_token = max(
            (impl.num_heads + 2 * impl.num_kv_heads) * impl.head_size * element_bytes
            for impl in (layer.impl for layer in self._attention_layers)
        )
        host = HostAttention(
            self.device,
            self._pool,
            self._vllm_config.scheduler_config.max_num_batched_tokens,
            bytes_per_token,
            attention_fault(self.options.debug),
            prefill,
            self._context_frames,
        )
        per_token = sum(
            kv_bytes_per_token(1, impl.num_kv_heads, impl.head_size, element_bytes, impl.cache_kind)
            for impl in (layer.impl for layer in self._attention_layers)
        )
        logger.info("moe_lightning: keys and values take %d bytes per token of host memory", per_token)
        on_cpu: AttentionPath = CpuAttentionPath(host, self._cache_of)
        return {**dict.fromkeys(SCHEDULE_NAMES, on_cpu), "s4": DeviceAttentionPath(host, self.device, self._cache_of)}

    @property
    def _attends_on_device(self) -> bool:
        return self.options.attention == "device"

    def count_step(self, tokens_by_request: Mapping[str, int]) -> None:
        counters = self._running.counters
        counters.rows += len(tokens_by_request)
        counters.tokens += sum(tokens_by_request.values())
        if self._attends_on_device and tokens_by_request:
            counters.steps["step x1"] += 1  # whose rows the backend alone knows

    def _cache_of(self, layer: int) -> HostKvCache:
        attention = self._attention_layers[layer]
        block_size = self._vllm_config.cache_config.block_size
        return attention.impl.cache_over(attention, attention.kv_cache, block_size)

    def prepare_kv_caches(self) -> None:
        """Once vLLM has made them: counted where they are on the device, else spread, and poisoned where asked for."""
        if self._attends_on_device:
            self.device.reserve(self._kv_bytes, "KV cache")
            return
        self._spread_kv_caches()
        if self._reads_context:
            shared = {layer.kv_cache.untyped_storage().data_ptr(): layer.kv_cache for layer in self._attention_layers}
            for number, cache in enumerate(shared.values()):
                whole = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
                self.device.pin(whole, f"KV cache {number}")
        if self._context_frames is not None:
            self._context_frames.allocate()
        if self.device.poison:  # NaN bytes in every block, so that a read of a row nobody wrote shows
            for attention in self._attention_layers:
                attention.kv_cache.view(torch.uint8).fill_(0xFF)

    def _spread_kv_caches(self) -> None:
        """Over the memory nodes of the attention threads, where the machine has more than one: beside a GPU that is its
        own, to which pages first touched elsewhere go."""
        nodes = sorted(set(nodes_of(self._cpus).values()))
        if len(nodes) < 2 and self._gpu_node is None:
            return
        try:
            for attention in self._attention_layers:
                interleave(attention.kv_cache.data_ptr(), attention.kv_cache.nbytes, nodes)
        except OSError as error:
            logger.warning(
                "moe_lightning: the KV cache stays where it was first touched, attention may be slower: %s", error
            )

    @property
    def _kv_bytes(self) -> int:
        """Of all layers' KV caches, once vLLM has made them."""
        return sum(attention.kv_cache.nbytes for attention in self._attention_layers)

    @property
    def host_kv_bytes(self) -> int:
        return 0 if self._attends_on_device else self._kv_bytes

    def reconfigure(self, **changes: Any) -> dict[str, object]:
        """Change the policy between steps. Returns the policy in force."""
        unknown = sorted(set(changes) - set(CHANGEABLE_WHILE_RUNNING))
        if unknown:
            raise ValueError(f"cannot change {unknown} while running; can change {list(CHANGEABLE_WHILE_RUNNING)}")
        parse_options({**changes, "attention": self.options.attention})  # names a value out of range
        self._running.policy = replace(self._running.policy, **changes)
        return self._running.policy.to_dict()

    def reset(self) -> None:
        self._report = RunReport(self._running)

    def stats(self) -> dict[str, object]:
        """Figures since the last reset; writes the trace if one was asked for."""
        self.write_trace()
        assert self._report is not None, "statistics before the model was loaded"
        return self._report.to_dict()

    def _trace_file(self) -> Path | None:
        """Of this rank."""
        if self.options.trace_file is None:
            return None
        path, parallel = Path(self.options.trace_file), self._vllm_config.parallel_config
        return path.with_stem(f"{path.stem}-rank{parallel.rank}") if parallel.world_size > 1 else path

    def write_trace(self) -> Path | None:
        """Of the last sweeps, where one was asked for. From any thread; returns the file."""
        path = self._trace_file()
        if path is None or self._trace is None:
            return None
        write_chrome_trace(path, self._trace.trace())
        return path

    def host_experts(self) -> dict[int, torch.Tensor]:
        """id of each streamed parameter -> its tensor in the host pages."""
        return self._running.store.host_views()

    def close(self) -> None:
        if self._trace_requests is not None:
            self._trace_requests.close()
        self.write_trace()
        self.device.close()
        if not self.device.stalled:  # else a task may still be in the pool, which would be waited for
            self._pool.close()


def all_streamed(num_tokens: int) -> ExpertPlaces:
    return ALL_STREAMED


def _told(table: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"up to {most}: {layers} layers" for most, layers in table) or "never"


def _warn_of_difference(what: str, planned_bytes: int, loaded_bytes: int) -> None:
    if (difference := weight_difference(what, planned_bytes, loaded_bytes)) is not None:
        logger.warning("moe_lightning: %s", difference)


def _only_attention_of(index: int, decoder_layer: torch.nn.Module) -> Any:
    found = [m for m in decoder_layer.modules() if isinstance(getattr(m, "impl", None), HostAttentionImpl)]
    if len(found) != 1:
        raise UnsupportedError(
            f"decoder layer {index} has {len(found)} attention modules of ours, and exactly 1 is supported; "
            "run this model without --worker-cls"
        )
    return found[0]
