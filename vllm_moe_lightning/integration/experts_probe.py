"""Measures vLLM's own experts kernel where the emulated device computes: one core of the CPU build.

It is another kernel than torch's GEMM, and up to twice as slow with many rows on a CPU without matrix units.
"""

from __future__ import annotations

import torch
from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight
from vllm.platforms import current_platform

from vllm_moe_lightning.hardware import MIB
from vllm_moe_lightning.host_probes import FEW_ROWS, MANY_ROWS, Effort, rows_and_weights, timed_s, torch_threads
from vllm_moe_lightning.machine_readings import Reading

HIDDEN, INTERMEDIATE, TOP_K = 1024, 1024, 2
MATRICES = 3  # gate, up and down


def device_experts(effort: Effort) -> list[Reading]:
    """FLOP/s of a row and bytes/s of the weights; nothing on CUDA, where the profile has no figure for it yet."""
    if not current_platform.is_cpu():
        return []
    isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    num_experts = max(TOP_K, effort.kv_bytes // (MATRICES * HIDDEN * INTERMEDIATE * 2))
    w13 = torch.full((num_experts, 2 * INTERMEDIATE, HIDDEN), 0.01, dtype=torch.bfloat16)
    w2 = torch.full((num_experts, HIDDEN, INTERMEDIATE), 0.01, dtype=torch.bfloat16)
    num_bytes = w13.nbytes + w2.nbytes
    packed = [cpu_prepack_moe_weight(weights, isa) for weights in (w13, w2)]
    del w13, w2

    def seconds_of_rows(num_rows: int) -> list[float]:
        """num_rows rows at each expert."""
        num_tokens = num_rows * num_experts // TOP_K
        hidden = torch.ones(num_tokens, HIDDEN, dtype=torch.bfloat16)
        experts = torch.arange(num_tokens * TOP_K, dtype=torch.int32).remainder(num_experts).view(num_tokens, TOP_K)
        weights, output = torch.full(experts.shape, 0.5), torch.empty_like(hidden)
        return timed_s(
            lambda: cpu_fused_moe(output, hidden, *packed, None, None, weights, experts, "silu", isa),
            effort.repeats,
        )

    with torch_threads(1):
        few_s, many_s = (seconds_of_rows(rows) for rows in (FEW_ROWS, MANY_ROWS))
    note = f"vLLM's {isa} kernel, {FEW_ROWS} and {MANY_ROWS} rows by {num_bytes // MIB} MiB of bfloat16 weights"
    return rows_and_weights("experts.1", few_s, many_s, float(num_bytes), num_bytes, note)  # 2 FLOPs, 2 bytes
