"""Routed experts whose parameters live in host memory and are brought to the device by the ring of slots.

Replaces vLLM's expert container for every quantisation method, and its subclasses, which escape the registration of
the base class by their name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import _moe_forward, _moe_forward_shared
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform

from vllm_moe_lightning.errors import MoeLightningError, UnsupportedError
from vllm_moe_lightning.kernels.expert_ffn import ExpertFfn
from vllm_moe_lightning.pipeline.coroutine import yield_to_executor
from vllm_moe_lightning.pipeline.host_experts import ExpertsRequest

# Subclasses of RoutedExperts in vLLM's models: PluggableLayer looks a replacement up by exact class name.
SUBCLASSES = (
    ("vllm.model_executor.models.dbrx", "DbrxExperts"),
    ("vllm.model_executor.models.gpt_oss", "GptOssRoutedExperts"),
    ("vllm.model_executor.layers.fused_moe.routed_experts", "SubstitutedRoutedExperts"),  # 0.33
)


class PagedExperts:
    """Mixin. `is_bound` is set once the layer is streamed: whether its parameters are those of this layer now.
    `runs_on_cpu` where the CPU may compute it: whether it does in this sweep. `is_unpacked`: the CPU build's own kernel
    can't read the weights, ours does. `built_bytes`: of its parameters, before anything was loaded or packed."""

    is_bound: Callable[[], bool] | None = None
    runs_on_cpu: Callable[[], bool] | None = None
    is_unpacked = False
    built_bytes = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with torch.device("cpu"):
            super().__init__(*args, **kwargs)
        self.built_bytes = sum(p.nbytes for p in self.parameters())  # type: ignore[attr-defined]

    def _require_bound(self) -> None:
        if self.is_bound is not None and not self.is_bound():
            raise MoeLightningError(
                f"{self.layer_name} was run outside of a sweep: its parameters hold another layer's experts"  # type: ignore[attr-defined]
            )

    def forward_modular(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if self.runs_on_cpu is not None and self.runs_on_cpu():
            output = torch.empty_like(x)
            yield_to_executor(ExpertsRequest(x, topk_ids, topk_weights, output))
            return output
        self._require_bound()
        if self.is_unpacked:
            return ffn_over(self.w13_weight.data, self.w2_weight.data).run(x, topk_ids, topk_weights)  # type: ignore[attr-defined]
        return super().forward_modular(x, topk_weights, topk_ids, *args, **kwargs)  # type: ignore[misc]

    def forward_monolithic(self, *args: Any, **kwargs: Any) -> Any:
        self._require_bound()
        return super().forward_monolithic(*args, **kwargs)  # type: ignore[misc]


def register_paged_experts() -> None:
    """Put our class in place of RoutedExperts and of its known subclasses. Idempotent."""
    _register("RoutedExperts", RoutedExperts)
    for module_name, class_name in SUBCLASSES:
        module = importlib.import_module(module_name)
        if base := getattr(module, class_name, None):
            _register(class_name, base)


def _register(name: str, base: type) -> None:
    registered = op_registry_oot.get(name)
    if registered is None:
        RoutedExperts.register_oot(type(f"Paged{name}", (PagedExperts, base), {}), name=name)
    elif not issubclass(registered, PagedExperts):
        raise MoeLightningError(
            f"{name} is already replaced by {registered.__module__}.{registered.__qualname__}; uninstall the other "
            "plugin, or list the plugins to load in VLLM_PLUGINS"
        )


def ffn_over(w13: torch.Tensor, w2: torch.Tensor) -> ExpertFfn:
    """Our kernel over weights as the checkpoint has them: [E, 2 I, H] and [E, H, I]."""
    return ExpertFfn(w13, w2)


@contextmanager
def experts_stay_unpacked() -> Iterator[None]:
    """While weights load: the CPU build leaves experts as our kernel reads them. Elsewhere they are not repacked."""

    def leave(self: Any, layer: torch.nn.Module) -> None:
        self._use_zentorch = False
        layer.is_unpacked = True  # type: ignore[assignment]

    with patch.object(CPUUnquantizedExperts, "process_weights_after_loading", leave):
        yield


def require_cpu_experts(module: Any) -> None:
    """Raises UnsupportedError for experts that our CPU kernel does not compute."""
    activation = getattr(module.activation, "value", module.activation)
    for found, what in (
        (not isinstance(module.quant_method, UnquantizedFusedMoEMethod), "quantised experts"),
        (activation != "silu", f"the activation {activation}"),
        (hasattr(module, "w13_bias") or hasattr(module, "w2_bias"), "experts with biases"),
        (module.apply_router_weight_on_input, "router weights on the experts' input"),
        (not module.is_unpacked and current_platform.is_cpu(), "packed experts"),
    ):
        if found:
            raise UnsupportedError(
                f"moe_lightning.experts: the CPU kernel does not know {what}, which {module.layer_name} has; "
                "drop the option"
            )


def call_experts_directly(runner: Any) -> None:
    """Without the opaque op that CUDA builds call: no greenlet can switch under its frame."""
    runner._forward_entry = _moe_forward if runner.shared_experts is None else _moe_forward_shared
