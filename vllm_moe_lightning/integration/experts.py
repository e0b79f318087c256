"""Routed experts whose parameters live in host memory and are brought to the device by the ring of slots.

Replaces vLLM's expert container for every quantisation method, and its subclasses, which escape the registration of
the base class by their name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from vllm_moe_lightning.errors import MoeLightningError

# Subclasses of RoutedExperts in vLLM's models: PluggableLayer looks a replacement up by exact class name.
SUBCLASSES = (
    ("vllm.model_executor.models.dbrx", "DbrxExperts"),
    ("vllm.model_executor.models.gpt_oss", "GptOssRoutedExperts"),
    ("vllm.model_executor.layers.fused_moe.routed_experts", "SubstitutedRoutedExperts"),  # 0.33
)


class PagedExperts:
    """Mixin. `is_bound` is set once the layer is streamed: whether its parameters are those of this layer now."""

    is_bound: Callable[[], bool] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with torch.device("cpu"):
            super().__init__(*args, **kwargs)

    def _require_bound(self) -> None:
        if self.is_bound is not None and not self.is_bound():
            raise MoeLightningError(
                f"{self.layer_name} was run outside of a sweep: its parameters hold another layer's experts"  # type: ignore[attr-defined]
            )

    def forward_modular(self, *args: Any, **kwargs: Any) -> Any:
        self._require_bound()
        return super().forward_modular(*args, **kwargs)  # type: ignore[misc]

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
