# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU attention as the benchmark runs it: on its own cache layouts, with the outputs that ours have."""

from __future__ import annotations

import pytest
import torch

from benchmarks.attention_shapes import Setting, Shape
from benchmarks.cpu_attention import run_setting, vllm_arms

pytestmark = pytest.mark.integration

MOST_ROW_ERROR = 0.02


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_vllms_kernels_agree_with_ours_on_their_own_caches(dtype, block_size):
    shape = Shape(3, 96, block_size, dtype, num_heads=8, num_kv_heads=2, head_dim=64, working_set_bytes=300_000)
    has_quantised = dtype == torch.bfloat16 and block_size == 32
    rows = run_setting(Setting("memory", shape, (1, 2), has_quantised=has_quantised), 1, vllm_arms)
    isas = {16: ("vec16",), 32: ("amx", "vec")}[block_size]
    for row in rows:
        arms = {isa: row["arms"][f"vllm {isa}"] for isa in isas}
        ran = [isa for isa, arm in arms.items() if "null_reason" not in arm]
        assert "vec" in ran or "vec16" in ran
        assert all(arms[isa]["row_error"] < MOST_ROW_ERROR for isa in ran)
        assert all(arm["null_reason"] for isa, arm in arms.items() if isa not in ran)
        assert ("vllm fp8" in row["arms"]) == has_quantised
