# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU experts as the benchmark runs them: on weights packed their way, with the outputs that ours have."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks.cpu_ffn import run_setting
from benchmarks.ffn_arms import TOKEN_TOLERANCE
from benchmarks.ffn_shapes import MEMORY, Setting, Shape

pytestmark = pytest.mark.integration


def test_vllms_experts_agree_with_ours_on_the_weights_before_packing():
    shape = Shape("tiny", num_experts=4, hidden_size=128, intermediate_size=96, top_k=2)
    for row in run_setting(Setting(MEMORY, shape, (2, 20), (1, 2)), 1, Console(quiet=True)):
        assert row["arms"]["vllm vec"]["token_error"] < TOKEN_TOLERANCE
        amx = row["arms"]["vllm amx"]
        assert amx.get("null_reason") or amx["token_error"] < TOKEN_TOLERANCE
