# SPDX-License-Identifier: Apache-2.0
"""Quantisation methods that keep weights where paging can't reach them: functions to preload (see engine.py)."""

from __future__ import annotations

from typing import Any


def keep_a_view() -> None:
    """As a method does that derives a tensor without a copy."""

    def keep(layer: Any) -> None:
        layer.kept = [layer.w2_weight.data.view(-1)]

    _after_packing(keep)


def move_weights_away() -> None:
    """As vLLM's Triton kernels for mxfp4 do: the parameters go, objects of the kernel's own come."""

    def move(layer: Any) -> None:
        layer.moved = {name: getattr(layer, name).data.clone() for name in ("w13_weight", "w2_weight")}
        del layer.w13_weight, layer.w2_weight

    _after_packing(move)


def _after_packing(change: Any) -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsInt8

    pack = CPUExpertsInt8.process_weights_after_loading

    def pack_and_change(self: Any, layer: Any) -> None:
        pack(self, layer)
        change(layer)

    CPUExpertsInt8.process_weights_after_loading = pack_and_change
