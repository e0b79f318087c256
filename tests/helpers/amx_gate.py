# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM's quantised CPU experts run without AMX, in tests: preload `OPEN` or `SHUT` (see tests/helpers/engine.py).

vLLM offers these kernels on CPUs with AMX only. They are built on BF16 and VNNI dot products and on oneDNN, which
compute the same without AMX tiles, so what is tested here (loading, packing, paging) is tested with the real ones.
"""

from __future__ import annotations

OPEN, SHUT = f"{__name__}:open_gate", f"{__name__}:shut_gate"


def open_gate() -> None:
    _answer(True)


def shut_gate() -> None:
    """As on a machine without AMX, wherever the test runs."""
    _answer(False)


def _answer(is_supported: bool) -> None:
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    for name in ("CPUExpertsFp8", "CPUExpertsInt4", "CPUExpertsInt8", "CPUExpertsMxfp4"):
        getattr(cpu_moe, name)._supports_current_device = staticmethod(lambda: is_supported)
