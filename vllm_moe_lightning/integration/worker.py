"""The worker that `--worker-cls` names: vLLM's own for the platform, with the engine put in at its moments."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import msgspec
import torch
from vllm.logger import init_logger
from vllm.model_executor.offloader.base import set_offloader

from vllm_moe_lightning.engine_plan import PredictedFigures, plan_of
from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.hardware import GIB
from vllm_moe_lightning.host_limits import available_memory_bytes
from vllm_moe_lightning.integration.attention import register_host_attention
from vllm_moe_lightning.integration.compat import require_ledger
from vllm_moe_lightning.integration.configure import needs_plain_experts, options_in_force
from vllm_moe_lightning.integration.dbrx import apply as apply_dbrx_names
from vllm_moe_lightning.integration.experts import experts_stay_unpacked, register_paged_experts
from vllm_moe_lightning.integration.exposition import log_run, metrics_directory, metrics_labels
from vllm_moe_lightning.integration.figures import SampledTokens, WorkerFigures
from vllm_moe_lightning.integration.host_memory import (
    freed_tensors_leave_the_process,
    packed_experts_stay_pageable,
)
from vllm_moe_lightning.integration.kv_memory import kv_cache_in_host_memory
from vllm_moe_lightning.integration.offloader import PagingOffloader
from vllm_moe_lightning.integration.partial_prompts import partial_prompts_draw_nothing
from vllm_moe_lightning.integration.peers import (
    PeerWatch,
    forget_shared_memory_names,
    ranks_of_node,
    watch_peers,
)
from vllm_moe_lightning.integration.platform import gpu_memory_node, is_cuda, worker_base
from vllm_moe_lightning.integration.register import SCHEDULER_MODULE
from vllm_moe_lightning.integration.runtime import Runtime

logger = init_logger("vllm.vllm_moe_lightning.worker")

UNPLANNED_KV_SHARE = 0.7  # of the host memory that is free once the experts are in their pages


_Base: Any = worker_base()


class MoELightningWorker(_Base):
    """Pages expert weights and attends on the CPU, around an unmodified model runner (V1 or V2)."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self._peers: PeerWatch | None = None
        self._figures: WorkerFigures | None = None
        self._predicted: PredictedFigures | None = None
        self._sampled_tokens = SampledTokens()
        require_ledger()
        scheduler_cls = vllm_config.scheduler_config.scheduler_cls
        if not str(scheduler_cls).startswith(SCHEDULER_MODULE):
            raise UnsupportedError(
                "the moe_lightning plugin was not loaded where the configuration was made (VLLM_PLUGINS leaves it out, "
                "or the package is not installed there), so this set-up is incomplete"
            )
        self._options = options_in_force(vllm_config)
        register_host_attention(is_used=self._options.attention != "device")
        register_paged_experts()
        apply_dbrx_names()
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        super().init_device()
        forget_shared_memory_names()
        self._ranks = ranks_of_node(gpu_memory_node())
        self._peers = watch_peers(self._ranks)
        self._runtime = Runtime(self.vllm_config, self._options, self._ranks)
        self._offloader = PagingOffloader(self._runtime.take_over)
        set_offloader(self._offloader)  # the runner's constructor has just set vLLM's own

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        unpacked = experts_stay_unpacked() if needs_plain_experts(self._options) else nullcontext()
        with freed_tensors_leave_the_process(), packed_experts_stay_pageable(), unpacked:
            super().load_model(*args, **kwargs)
            self._offloader.post_init()
        set_offloader(None)  # the global would keep the host pages alive after this engine's end
        self._runtime.attach(self.model_runner.get_model(), self._offloader.other_bytes_in_layers)

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache: of the host, unless attention is on the device."""
        cache = self.vllm_config.cache_config
        if is_cuda() and self._options.attention != "device" and cache.kv_cache_memory_bytes is None:
            cache.kv_cache_memory_bytes = int(UNPLANNED_KV_SHARE * available_memory_bytes() / self._ranks.count)
            logger.info(
                "moe_lightning: %.2f GiB of host memory for keys and values, %.0f %% of what is free, shared by %d "
                "ranks; --kv-cache-memory-bytes says otherwise",
                cache.kv_cache_memory_bytes / GIB,
                100 * UNPLANNED_KV_SHARE,
                self._ranks.count,
            )
        return int(super().determine_available_memory())

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        with nullcontext() if self._options.attention == "device" else kv_cache_in_host_memory():
            super().initialize_from_config(*args, **kwargs)
        self._runtime.prepare_kv_caches()
        plan, executor = plan_of(self.vllm_config), self._runtime.executor
        assert executor is not None, "the KV cache is made after the model was loaded"
        self._predicted = None if plan is None else plan.predicted
        directory = metrics_directory(self.vllm_config)
        if directory is None:
            logger.warning(
                "moe_lightning: rank %d runs on another machine than the front end, so /metrics lacks its figures",
                self.rank,
            )
            return
        self._figures = WorkerFigures(
            executor,
            directory,
            metrics_labels(self.vllm_config),
            self.rank,
            self._options.metrics_window_s,
            self._runtime.host_kv_bytes,
            self._predicted,
        )

    def execute_model(self, scheduler_output: Any) -> Any:
        sampled_tokens = self._sampled_tokens.count(scheduler_output)
        self._runtime.count_step(scheduler_output.num_scheduled_tokens)
        try:
            output = super().execute_model(scheduler_output)
        except BaseException as error:
            # vLLM listens to one rank only. The others' failures would be logged and nothing else, while that one
            # waits for them in a collective; but that a process is gone, everybody notices.
            if self._peers is None or self.is_driver_worker or not isinstance(error, Exception):
                raise
            logger.exception("moe_lightning: rank %d failed in a step, and ends", self.rank)
            raise SystemExit(1) from None
        if self._figures is not None:
            self._figures.after_step(sampled_tokens)
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if is_cuda() else partial_prompts_draw_nothing(self.model_runner):
            return super().sample_tokens(*args, **kwargs)

    def shutdown(self) -> None:
        if self._peers is not None:
            self._peers.close()
        if self._figures is not None:
            achieved = self._figures.close()
            if achieved is not None and self.rank == 0:
                log_run(self._runtime.device.kind, self._predicted, achieved)
            self._figures = None
        super().shutdown()
        set_offloader(None)
        if hasattr(self, "_runtime"):
            self._runtime.close()

    def _refuse_weight_access(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            "moe_lightning keeps the experts in host pages, so weights can be neither reloaded nor saved from the "
            "running engine; start it anew with the other checkpoint"
        )

    # vLLM's own would work on the slots, which hold whatever layer passed last.
    reload_weights = _refuse_weight_access
    update_weights = _refuse_weight_access
    save_sharded_state = _refuse_weight_access
    save_tensorized_model = _refuse_weight_access

    # ------------------------------------------------ called through collective_rpc

    def moe_lightning_stats(self) -> dict[str, object]:
        """Counters since the last reset, as plain JSON values."""
        predicted = None if self._predicted is None else msgspec.to_builtins(self._predicted)
        return {**self._runtime.stats(), "predicted": predicted}

    def moe_lightning_trace(self) -> str | None:
        """Writes the trace of the last sweeps now. The file; None without the option trace_file."""
        path = self._runtime.write_trace()
        return None if path is None else str(path)

    def moe_lightning_host_experts(self) -> dict[int, torch.Tensor]:
        """id of each streamed parameter -> its tensor in the host pages. Within the worker's process only."""
        return self._runtime.host_experts()

    def moe_lightning_reset(self) -> None:
        self._runtime.reset()

    def moe_lightning_reconfigure(self, **changes: Any) -> dict[str, object]:
        return self._runtime.reconfigure(**changes)
