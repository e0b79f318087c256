# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM's quantised CPU experts run without AMX, in tests: preload `OPEN` (see tests/helpers/engine.py).

vLLM offers these kernels on CPUs with AMX only. They are built on BF16 and VNNI dot products and on oneDNN, which
compute the same without AMX tiles, so what is tested here (loading, packing, paging) is tested with the real ones.
"""

from __future__ import annotations

OPEN = f"{__name__}:open_gate"


def open_gate() -> None:
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    for name in ("CPUExpertsFp8", "CPUExpertsInt4", "CPUExpertsInt8", "CPUExpertsMxfp4"):
        getattr(cpu_moe, name)._supports_current_device = staticmethod(lambda: True)
