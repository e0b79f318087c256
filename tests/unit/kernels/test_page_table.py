# SPDX-License-Identifier: Apache-2.0
"""How experts are cut into pages, and what a page table refuses."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.paged_layer import PagedCase, PagedLayer
from vllm_moe_lightning.kernels.page_table import (
    ExpertPages,
    ExpertScales,
    ExpertShape,
    PagedRows,
    page_bytes_for,
    scales_per_tensor,
)

MIXTRAL = ExpertShape(8, 4096, 14336, torch.bfloat16)
MODELS = {
    "mixtral-8x7b": MIXTRAL,
    "qwen3-30b-a3b": ExpertShape(128, 2048, 768, torch.bfloat16),
    "deepseek-v2": ExpertShape(160, 5120, 1536, torch.bfloat16),
    "deepseek-v3": ExpertShape(256, 7168, 2048, torch.float8_e4m3fn),
    "qwen1.5-moe": ExpertShape(60, 2048, 1408, torch.float16),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_page_bytes", [1 << 20, 8 << 20, 64 << 20])
def test_the_pages_that_we_choose_have_no_rest(name: str, max_page_bytes: int) -> None:
    shape = MODELS[name]
    page_bytes = page_bytes_for(shape, max_page_bytes)
    pages = ExpertPages(shape, page_bytes)
    assert page_bytes <= max_page_bytes
    assert page_bytes > max_page_bytes / 8 or page_bytes == shape.expert_bytes // 3
    assert pages.unused_ratio == 0.0
    assert pages.num_pages * page_bytes == shape.expert_bytes


def test_sizes_without_a_common_divisor_get_the_smallest_pages_there_are() -> None:
    shape = ExpertShape(4, 8 * 7, 8 * 11, torch.float16)
    assert ExpertPages(shape, page_bytes_for(shape, max_page_bytes=256)).num_pages == 3 * 8


@pytest.mark.parametrize("page_bytes", [1536, 4096, 5008, 100_000, 1 << 20])
def test_pages_hold_each_row_once_and_in_order(page_bytes: int) -> None:
    shape = ExpertShape(3, 768, 520, torch.float16)
    pages = ExpertPages(shape, page_bytes)
    found = list(pages.page_rows())
    assert len(found) == pages.num_pages
    for matrix in ("w13", "w2"):
        rows = [row for page in found if page.matrix == matrix for row in range(page.begin, page.end)]
        assert rows == list(range(shape.num_rows(matrix)))  # type: ignore[arg-type]
    assert all((page.end - page.begin) * shape.row_bytes(page.matrix) <= page_bytes for page in found)


def test_a_page_smaller_than_a_row_is_refused_with_one_that_fits() -> None:
    with pytest.raises(ValueError, match=r"page_bytes 4096 is less than one row of an expert \(28672 bytes\)"):
        ExpertPages(MIXTRAL, 4096)
    with pytest.raises(ValueError, match=rf"{page_bytes_for(MIXTRAL)} fills every page"):
        ExpertPages(MIXTRAL, 4096)


def test_a_page_that_would_not_keep_rows_aligned_is_refused() -> None:
    with pytest.raises(ValueError, match="page_bytes 30001 is no multiple of 16"):
        ExpertPages(MIXTRAL, 30001)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 60, 64, torch.float16), "hidden_size 60 makes rows of 120 bytes.* must be a multiple of 8"),
        ((4, 64, 24, torch.float8_e4m3fn), "intermediate_size 24 makes rows of 24 bytes.* must be a multiple of 16"),
        ((4, 64, 64, torch.float64), "experts of torch.float64 can't be paged"),
        ((0, 64, 64, torch.float16), "positive sizes"),
    ],
)
def test_shapes_that_the_kernel_has_no_loads_for_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertShape(*arguments)


def test_a_table_refuses_what_does_not_fit_its_shape() -> None:
    table = PagedLayer(PagedCase()).table
    rows = table.w13
    with pytest.raises(ValueError, match=r"w13.first_rows must be contiguous torch.int32 of shape \[4\]"):
        replace(table, w13=replace(rows, first_rows=rows.first_rows[:3]))
    with pytest.raises(ValueError, match=r"w2.addresses must be contiguous torch.int64 of shape \[pages\]"):
        replace(table, w2=replace(table.w2, addresses=table.w2.addresses.int()))
    with pytest.raises(ValueError, match=r"w13: 0 rows per page"):
        replace(table, w13=replace(rows, rows_per_page=0))
    with pytest.raises(ValueError, match=r"allowed 1..2147483647"):
        replace(table, w13=PagedRows(rows.addresses, rows.first_rows, 2**31))


def test_float8_needs_scales_and_others_have_none() -> None:
    scaled = PagedLayer(PagedCase(scale_group=(16, 16))).table
    with pytest.raises(ValueError, match=r"experts of torch.float8_e4m3fn need scales"):
        replace(scaled, w2_scales=None)
    with pytest.raises(ValueError, match=r"experts of torch.float16 have no scales"):
        replace(PagedLayer(PagedCase()).table, w13_scales=scaled.w13_scales)
    assert scaled.w13_scales is not None
    with pytest.raises(ValueError, match=r"w13_scales must be \[4, 6, 4\] float32"):
        replace(scaled, w13_scales=ExpertScales(scaled.w13_scales.values[:, :5], 16, 16))


def test_one_scale_per_tensor_may_be_two_in_w13() -> None:
    shape = ExpertShape(3, 64, 48, torch.float8_e4m3fn)
    both = scales_per_tensor(torch.rand(3, 2), shape, "w13")
    assert (both.values.shape, both.rows_per_scale, both.columns_per_scale) == ((3, 2, 1), 48, 64)
    one = scales_per_tensor(torch.rand(3), shape, "w2")
    assert (one.values.shape, one.rows_per_scale, one.columns_per_scale) == ((3, 1, 1), 64, 48)
    with pytest.raises(ValueError, match=r"w2 has 3 experts, got scales of shape"):
        scales_per_tensor(torch.rand(3, 2), shape, "w2")
