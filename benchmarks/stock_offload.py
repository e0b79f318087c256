"""Which settings of stock vLLM's offload fit a device-memory budget: the small grid its best one is searched on.

Written from vLLM 0.32's config/offload.py and model_executor/offloader. **Never run**: no GPU was at hand, and on the
CPU build both offloaders leave every weight where it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30
UVA, PREFETCH = "stock --cpu-offload-gb", "stock --offload-backend prefetch"
MORE_OFFLOADED = (1.0, 1.25, 1.5)
"""Times the least that has to go: more leaves room for a larger KV cache."""
PREFETCH_STEPS = (1, 2)
LARGEST_GROUP = 8
NUM_FRACTIONS = 2
EXPERTS = "experts"
"""Segment of the parameter names that holds a layer's routed experts."""


@dataclass(frozen=True)
class ModelBytes:
    num_layers: int
    layer: int
    """Of one decoder layer."""
    layer_experts: int
    """Of these, its routed experts."""
    other: int
    """Embeddings, head, norms."""

    @property
    def total(self) -> int:
        return self.num_layers * self.layer + self.other


@dataclass(frozen=True)
class StockSetting:
    arm: str
    engine_args: dict[str, Any]
    offloaded_bytes: int
    """As asked for."""

    @property
    def label(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.engine_args.items())


def fits_without_offload(model: ModelBytes, budget_bytes: int, least_kv_bytes: int, reserve_bytes: int) -> bool:
    return model.total + least_kv_bytes + reserve_bytes <= budget_bytes


def bytes_to_offload(model: ModelBytes, budget_bytes: int, least_kv_bytes: int, reserve_bytes: int) -> int:
    """The least that leaves room for one sequence's KV cache and the reserve, which is for activations and CUDA."""
    return max(0, model.total + least_kv_bytes + reserve_bytes - budget_bytes)


def uva_settings(model: ModelBytes, least_bytes: int) -> Iterator[StockSetting]:
    """All parameters of a layer, or its experts alone."""
    for limit_bytes, params in (
        (model.num_layers * model.layer, None),
        (model.num_layers * model.layer_experts, EXPERTS),
    ):
        sizes = sorted({min(int(least_bytes * factor), limit_bytes) for factor in MORE_OFFLOADED})
        for size in sizes:
            if size < least_bytes or not size:
                continue
            args: dict[str, Any] = {"offload_backend": "uva", "cpu_offload_gb": math.ceil(size / GIB * 1000) / 1000}
            if params is not None:
                args["cpu_offload_params"] = {params}
            yield StockSetting(UVA, args, size)


def prefetch_settings(model: ModelBytes, least_bytes: int) -> Iterator[StockSetting]:
    """Groups of layers of which the last ones are offloaded; `step` layers' buffers stay on the device."""
    if least_bytes <= 0:
        return
    for params, layer_bytes in ((None, model.layer), (EXPERTS, model.layer_experts)):
        for step in PREFETCH_STEPS:
            fractions: dict[float, tuple[int, int, int]] = {}
            for group in range(1, min(LARGEST_GROUP, model.num_layers) + 1):
                for in_group in range(1, group + 1):
                    count = sum(index % group >= group - in_group for index in range(model.num_layers))
                    net_bytes = (count - step) * layer_bytes  # the buffers take their part back
                    if step < count and net_bytes >= least_bytes:
                        fractions.setdefault(count / model.num_layers, (group, in_group, count * layer_bytes))
            for _, (group, in_group, size) in sorted(fractions.items())[:NUM_FRACTIONS]:
                args: dict[str, Any] = {
                    "offload_backend": "prefetch",
                    "offload_group_size": group,
                    "offload_num_in_group": in_group,
                    "offload_prefetch_step": step,
                }
                if params is not None:
                    args["offload_params"] = {params}
                yield StockSetting(PREFETCH, args, size)
