"""paged_fused_moe in plain torch and float32, reading the same page table: for tests, and the emulated device.

Addresses must be of host memory. Nothing falls back to this by itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection

import torch

from vllm_moe_lightning.errors import MoeLightningError
from vllm_moe_lightning.kernels.page_table import ExpertScales, ExpertShape, Matrix, PagedRows, PageTable
from vllm_moe_lightning.kernels.reference_ffn import expert_ffn


class ReferencePagedMoeStep:
    """As PagedMoeStep of kernels/paged_moe_launch.py; silu(gate) * up is not rounded."""

    def __init__(
        self, hidden: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, shape: ExpertShape
    ) -> None:
        self._hidden, self._topk_weights, self._topk_ids, self._shape = hidden, topk_weights, topk_ids, shape
        self._total = torch.zeros(hidden.shape, dtype=torch.float32)

    def add(self, table: PageTable, experts: Collection[int] | None = None) -> None:
        """Compute the choices of these experts; None: of all that ids name. Reads no other expert's pages."""
        named = {expert for expert in self._topk_ids.unique().tolist() if expert >= 0}
        wanted = sorted(named if experts is None else named & set(experts))
        if not wanted:
            return
        # Expert i of the dense weights is the i-th of those wanted.
        dense_ids = torch.full((self._shape.num_experts,), -1)
        dense_ids[wanted] = torch.arange(len(wanted))
        ids = torch.where(self._topk_ids >= 0, dense_ids[self._topk_ids.clamp(min=0).long()], -1)
        w13 = torch.stack([read_matrix(table, "w13", expert) for expert in wanted])
        w2 = torch.stack([read_matrix(table, "w2", expert) for expert in wanted])
        self._total += expert_ffn(self._hidden, w13, w2, ids, self._topk_weights)

    def finish(self, output: torch.Tensor | None = None) -> torch.Tensor:
        """[T, H]; float32 if no output is given."""
        return self._total if output is None else output.copy_(self._total)


def paged_fused_moe_reference(
    hidden: torch.Tensor,  # [T, H]
    topk_weights: torch.Tensor,  # [T, K]
    topk_ids: torch.Tensor,  # [T, K]; negative: left out
    page_table: PageTable,
) -> torch.Tensor:
    """[T, H] float32. Raises ValueError for pages that are not in host memory."""
    step = ReferencePagedMoeStep(hidden, topk_weights, topk_ids, page_table.shape)
    step.add(page_table)
    return step.finish()


def read_matrix(table: PageTable, matrix: Matrix, expert: int) -> torch.Tensor:
    """One expert's w13 [2 I, H] or w2 [H, I] in float32, scales applied, gathered page by page."""
    if table.device.type != "cpu":
        raise ValueError(f"the reference reads pages in host memory only, these are on {table.device}")
    shape = table.shape
    rows = table.w13 if matrix == "w13" else table.w2
    scales = table.w13_scales if matrix == "w13" else table.w2_scales
    first, num_rows = int(rows.first_rows[expert]), shape.num_rows(matrix)
    pieces = [
        _read_rows(rows, begin, first + num_rows, shape.row_bytes(matrix)) for begin in _cuts(rows, first, num_rows)
    ]
    dense = torch.cat(pieces).view(shape.dtype)
    return _scaled(dense.view(num_rows, shape.num_columns(matrix)).float(), scales, expert)


def _cuts(rows: PagedRows, first: int, num_rows: int) -> list[int]:
    """Where reading begins in each page that holds some of the rows."""
    step = rows.rows_per_page
    return [first, *range((first // step + 1) * step, first + num_rows, step)]


def _read_rows(rows: PagedRows, begin: int, end: int, row_bytes: int) -> torch.Tensor:
    """Where they lie, [bytes] uint8."""
    page, offset = divmod(begin, rows.rows_per_page)
    count = min(end - begin, rows.rows_per_page - offset)
    address = int(rows.addresses[page])
    if not address:
        raise MoeLightningError(f"page {page} of the table is not on the device, and its expert got a token")
    raw = (ctypes.c_uint8 * (count * row_bytes)).from_address(address + offset * row_bytes)
    return torch.frombuffer(raw, dtype=torch.uint8)


def _scaled(matrix: torch.Tensor, scales: ExpertScales | None, expert: int) -> torch.Tensor:
    if scales is None:
        return matrix
    factors = scales.values[expert].repeat_interleave(scales.rows_per_scale, 0)[: matrix.shape[0]]
    return matrix * factors.repeat_interleave(scales.columns_per_scale, 1)[:, : matrix.shape[1]]
