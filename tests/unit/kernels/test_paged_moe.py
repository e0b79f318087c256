# SPDX-License-Identifier: Apache-2.0
"""What of paged_fused_moe needs no kernel to run, and the checks that run one in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.paged_layer import PagedCase, PagedLayer
from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.kernels.page_table import ExpertShape
from vllm_moe_lightning.kernels.paged_moe_launch import check_dtype, check_inputs, paged_fused_moe
from vllm_moe_lightning.kernels.reference_paged_moe import paged_fused_moe_reference

ROOT = Path(__file__).parents[3]
CHECKS = "tests/interpreted/paged_moe_checks.py"
SHAPE = ExpertShape(4, 64, 48, torch.float16)


def test_the_kernels_agree_with_the_reference_in_tritons_interpreter() -> None:
    pytest.importorskip("triton")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", CHECKS],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout


@pytest.mark.parametrize("experts_share_pages", [False, True])
@pytest.mark.parametrize("scale_group", [None, (0, 0), (16, 16)])
def test_the_reference_reads_the_pages_that_hold_the_weights(experts_share_pages: bool, scale_group: Any) -> None:
    layer = PagedLayer(PagedCase(experts_share_pages=experts_share_pages, scale_group=scale_group, num_left_out=2))
    actual = paged_fused_moe_reference(layer.hidden, layer.topk_weights, layer.topk_ids, layer.table)
    torch.testing.assert_close(actual, layer.expected(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("hidden", {"hidden": torch.zeros(3, 32, dtype=torch.float16)}, r"hidden must be \[tokens, 64\]"),
        ("dtype", {"hidden": torch.zeros(3, 64, dtype=torch.bfloat16)}, "hidden must be torch.float16 for"),
        ("stride", {"hidden": torch.zeros(3, 65, dtype=torch.float16)[:, :64]}, "begin at 16 bytes"),
        ("begin", {"hidden": torch.zeros(3, 80, dtype=torch.float16)[:, 1:65]}, "begin at 16 bytes"),
        ("ids", {"topk_ids": torch.zeros(2, 2, dtype=torch.int32)}, r"topk_ids must be integers \[3, top_k\]"),
        ("no choice", {"topk_ids": torch.zeros(3, 0, dtype=torch.int32)}, r"topk_ids must be integers \[3, top_k\]"),
        ("float ids", {"topk_ids": torch.zeros(3, 2)}, "topk_ids must be integers"),
        ("weights", {"topk_weights": torch.zeros(3, 1)}, r"topk_weights must be \[3, 2\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(name: str, change: dict[str, Any], message: str) -> None:
    given = {
        "hidden": torch.zeros(3, 64, dtype=torch.float16),
        "topk_weights": torch.zeros(3, 2),
        "topk_ids": torch.zeros(3, 2, dtype=torch.int32),
    }
    check_inputs(**given, shape=SHAPE)
    with pytest.raises(ValueError, match=message):
        check_inputs(**{**given, **change}, shape=SHAPE)


def test_more_choices_than_can_be_counted_are_refused() -> None:
    num_tokens = (1 << 29) + 1
    hidden = torch.zeros(1, 64, dtype=torch.float16).expand(num_tokens, 64)
    ids = torch.zeros(1, 2, dtype=torch.int32).expand(num_tokens, 2)
    weights = torch.zeros(1, 2).expand(num_tokens, 2)
    with pytest.raises(ValueError, match="choices are over 1073741824 in one call; divide the tokens"):
        check_inputs(hidden, weights, ids, SHAPE)


def test_bfloat16_is_refused_where_the_chip_has_none() -> None:
    check_dtype(torch.bfloat16, 80)
    check_dtype(torch.float16, 75)
    with pytest.raises(UnsupportedError, match="no bfloat16 on sm_75; run with dtype float16"):
        check_dtype(torch.bfloat16, 75)


def test_a_machine_without_a_gpu_is_told_so() -> None:
    pytest.importorskip("triton")
    layer = PagedLayer(PagedCase())
    with pytest.raises(UnsupportedError, match="runs on a CUDA device, not on cpu"):
        paged_fused_moe(layer.hidden, layer.topk_weights, layer.topk_ids, layer.table)


def test_without_triton_the_package_imports_and_a_call_names_the_extra() -> None:
    code = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import torch
from vllm_moe_lightning.errors import UnsupportedError
import vllm_moe_lightning.pipeline.paged_experts
from vllm_moe_lightning.kernels.paged_moe_launch import paged_fused_moe
from tests.helpers.paged_layer import PagedCase, PagedLayer
layer = PagedLayer(PagedCase())
try:
    paged_fused_moe(layer.hidden, layer.topk_weights, layer.topk_ids, layer.table)
except UnsupportedError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "install vllm-moe-lightning[cuda]" in result.stdout
