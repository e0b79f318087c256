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

from vllm_moe_lightning.errors import MoeLightningError
from vllm_moe_lightning.kernels.expert_ffn import ExpertFfn
from vllm_moe_lightning.pipeline.coroutine import yield_to_executor
from vllm_moe_lightning.pipeline.experts_path import ExpertsRequest

# Subclasses of RoutedExperts in vLLM's models: PluggableLayer looks a replacement up by exact class name.
SUBCLASSES = (
    ("vllm.model_executor.models.dbrx", "DbrxExperts"),
    ("vllm.model_executor.models.gpt_oss", "GptOssRoutedExperts"),
    ("vllm.model_executor.layers.fused_moe.routed_experts", "SubstitutedRoutedExperts"),  # 0.33
)


class PagedExperts:
    """Mixin. `is_bound` is set once the layer is streamed: whether its parameters are those of this layer now.
    `is_elsewhere` where it need not be streamed: whether it is not in this sweep. `is_unpacked`: the CPU build's own
    kernel can't read the weights, ours does. `own_kernel`: in the place of vLLM's (integration/plain_experts.py).
    `built_bytes`: of its parameters, before anything was loaded or packed."""

    is_bound: Callable[[], bool] | None = None
    is_elsewhere: Callable[[], bool] | None = None
    is_unpacked = False
    own_kernel: Callable[..., torch.Tensor] | None = None
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
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> Any:
        if self.is_elsewhere is not None and self.is_elsewhere():
            output = torch.empty_like(x)
            with _shared_output_aside(shared_experts):
                yield_to_executor(ExpertsRequest(x, topk_ids, topk_weights, output))
            return output
        self._require_bound()
        if self.own_kernel is not None:
            return self.own_kernel(x, topk_weights, topk_ids, self.w13_weight.data, self.w2_weight.data)  # type: ignore[attr-defined]
        if self.is_unpacked:
            return ffn_over(self.w13_weight.data, self.w2_weight.data).run(x, topk_ids, topk_weights)  # type: ignore[attr-defined]
        return super().forward_modular(x, topk_weights, topk_ids, shared_experts, shared_experts_input)  # type: ignore[misc]

    def forward_monolithic(self, *args: Any, **kwargs: Any) -> Any:
        self._require_bound()
        return super().forward_monolithic(*args, **kwargs)  # type: ignore[misc]


@contextmanager
def _shared_output_aside(shared_experts: Any) -> Iterator[None]:
    """vLLM leaves the shared experts' output in their module until the routed ones are done, and another micro-batch
    comes by meanwhile."""
    if shared_experts is None:
        yield
        return
    output = shared_experts._output
    shared_experts._output = [None] * len(output)
    try:
        yield
    except BaseException:  # nobody will ask for it
        shared_experts._output = [None] * len(output)
        raise
    shared_experts._output = output


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


def call_experts_directly(runner: Any) -> None:
    """Without the opaque op that CUDA builds call: no greenlet can switch under its frame."""
    runner._forward_entry = _moe_forward if runner.shared_experts is None else _moe_forward_shared
