"""The page-table MoE kernel on a device against float64: pages in no order, experts without tokens, batches of 1 to 256
tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.fp64_checks import TOLERANCE, relative_error
from vllm_moe_lightning.kernels.page_table import ExpertShape, Matrix, PagedRows, PageTable
from vllm_moe_lightning.kernels.paged_moe_launch import paged_fused_moe
from vllm_moe_lightning.kernels.reference_ffn import expert_ffn

NUM_EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 8, 256, 448, 2
ROWS_PER_PAGE: dict[Matrix, int] = {"w13": 100, "w2": 60}  # no divisors: experts begin and end inside of pages
NUM_TOKENS = (1, 37, 256)


def paged_moe_checks(device: torch.device, dtypes: Sequence[torch.dtype]) -> list[dict[str, Any]]:
    """Each element type and batch size once."""
    return [_row(device, dtype, num_tokens) for dtype in dtypes for num_tokens in NUM_TOKENS]


def _row(device: torch.device, dtype: torch.dtype, num_tokens: int) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(5)
    shape = ExpertShape(NUM_EXPERTS, HIDDEN, INTERMEDIATE, dtype)
    w13 = _draw(rng, shape, "w13")
    w2 = _draw(rng, shape, "w2")
    hidden = torch.randn(num_tokens, HIDDEN, generator=rng).to(dtype)
    # The last expert gets no token.
    ids = torch.stack([torch.randperm(NUM_EXPERTS - 1, generator=rng)[:TOP_K] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, TOP_K, generator=rng)
    (w13_rows, w13_pages), (w2_rows, w2_pages) = (_paged(w, m, device) for w, m in ((w13, "w13"), (w2, "w2")))
    table = PageTable(shape, w13_rows, w2_rows)
    got = paged_fused_moe(hidden.to(device), weights.to(device), ids.to(device), table).cpu()
    del w13_pages, w2_pages  # alive until the kernel has read them
    expected = expert_ffn(hidden, w13, w2, ids, weights, dtype=torch.float64)
    error, limit = relative_error(got, expected), TOLERANCE[dtype]
    return {
        "check": f"paged_fused_moe {dtype}, {num_tokens} tokens",
        "error": error,
        "limit": limit,
        "ok": error <= limit,
    }


def _draw(rng: torch.Generator, shape: ExpertShape, matrix: Matrix) -> torch.Tensor:
    rows, columns = shape.num_rows(matrix), shape.num_columns(matrix)
    return torch.randn(shape.num_experts, rows, columns, generator=rng).mul_(columns**-0.5).to(shape.dtype)


def _paged(weights: torch.Tensor, matrix: Matrix, device: torch.device) -> tuple[PagedRows, torch.Tensor]:
    """(the table's rows, the memory of the pages), pages in reverse. weights: [E, rows, columns]"""
    rows, step = weights.flatten(0, 1), ROWS_PER_PAGE[matrix]
    num_pages = -(-len(rows) // step)
    pages = torch.full((num_pages, step, rows.shape[1]), float("nan"), dtype=weights.dtype)
    for page, part in enumerate(rows.split(step)):
        pages[num_pages - 1 - page, : len(part)] = part
    placed = pages.to(device)
    addresses = [placed[num_pages - 1 - page].data_ptr() for page in range(num_pages)]
    first_rows = torch.arange(weights.shape[0], dtype=torch.int32) * weights.shape[1]
    return PagedRows(torch.tensor(addresses, device=device), first_rows.to(device), step), placed
