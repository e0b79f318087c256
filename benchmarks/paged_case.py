"""Random experts on a device, in pages and behind a page table, and batches of tokens for them: what paged_fused_moe
is checked and timed on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from vllm_moe_lightning.kernels.page_table import ExpertScales, ExpertShape, Matrix, PagedRows, PageTable
from vllm_moe_lightning.kernels.paged_moe_launch import paged_fused_moe
from vllm_moe_lightning.kernels.reference_paged_moe import paged_fused_moe_reference

Weights = Literal["16 bits", "float8 per tensor", "float8 per block"]
LARGEST_FLOAT8 = 448.0  # of float8_e4m3fn
SCALE_BLOCK = 128


@dataclass(frozen=True)
class PagedShape:
    num_experts: int
    hidden: int
    intermediate: int
    top_k: int
    rows_per_page: Mapping[Matrix, int]


class PagedExperts:
    """E experts behind their page table, drawn where they lie; dtype: of the hidden states."""

    def __init__(self, shape: PagedShape, dtype: torch.dtype, device: torch.device, weights: Weights) -> None:
        rng = torch.Generator(device).manual_seed(5)
        is_float8 = weights != "16 bits"
        self.top_k, self.dtype, self.device = shape.top_k, dtype, device
        self.shape = ExpertShape(
            shape.num_experts, shape.hidden, shape.intermediate, torch.float8_e4m3fn if is_float8 else dtype
        )
        self.exact: dict[Matrix, torch.Tensor] = {}
        """[E, rows, columns] on the device: what the weights stand for; float32 of float8 ones."""
        rows_of: dict[Matrix, PagedRows] = {}
        scales: dict[Matrix, ExpertScales | None] = {}
        self._pages = []  # alive as long as the table
        matrices: tuple[Matrix, ...] = ("w13", "w2")
        for matrix in matrices:
            stored = _draw(rng, self.shape, matrix, dtype)
            self.exact[matrix], scales[matrix] = stored, None
            if is_float8:
                stored, scales[matrix], self.exact[matrix] = _float8(stored.float(), weights)
            rows_of[matrix], pages = _paged(stored, shape.rows_per_page[matrix])
            self._pages.append(pages)
        self.table = PageTable(self.shape, rows_of["w13"], rows_of["w2"], scales["w13"], scales["w2"])


class PagedBatch:
    """T tokens for the experts, or for all but the last of them."""

    def __init__(self, experts: PagedExperts, num_tokens: int, num_asked_for: int) -> None:
        rng = torch.Generator().manual_seed(6)
        self.experts = experts
        self.hidden = torch.randn(num_tokens, experts.shape.hidden_size, generator=rng).to(experts.dtype)
        chosen = [torch.randperm(num_asked_for, generator=rng)[: experts.top_k] for _ in range(num_tokens)]
        self.ids = torch.stack(chosen)
        self.weights = torch.rand(num_tokens, experts.top_k, generator=rng)

    @cached_property
    def on_device(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(hidden states, weights, ids)"""
        hidden, weights, ids = (tensor.to(self.experts.device) for tensor in (self.hidden, self.weights, self.ids))
        return hidden, weights, ids

    def run(self) -> torch.Tensor:
        """[T, H] by the Triton kernel; where there is no GPU by the reference, which tells nothing about the kernel."""
        if self.experts.device.type == "cpu":
            return paged_fused_moe_reference(*self.on_device, self.experts.table)
        return paged_fused_moe(*self.on_device, self.experts.table)


def _draw(rng: torch.Generator, shape: ExpertShape, matrix: Matrix, dtype: torch.dtype) -> torch.Tensor:
    rows, columns = shape.num_rows(matrix), shape.num_columns(matrix)
    drawn = torch.randn(shape.num_experts, rows, columns, generator=rng, device=rng.device, dtype=dtype)
    return drawn.mul_(columns**-0.5)


def _float8(drawn: torch.Tensor, weights: Weights) -> tuple[torch.Tensor, ExpertScales, torch.Tensor]:
    """(float8 [E, rows, columns], their scales, what both stand for)"""
    _, rows, columns = drawn.shape
    height, width = (rows, columns) if weights == "float8 per tensor" else (SCALE_BLOCK, SCALE_BLOCK)
    whole = torch.nn.functional.pad(drawn, (0, -columns % width, 0, -rows % height))
    largest = whole.abs().unflatten(2, (-1, width)).amax(3).unflatten(1, (-1, height)).amax(2)  # [E, groups, groups]
    values = (largest / LARGEST_FLOAT8).contiguous()
    each = values.repeat_interleave(height, 1)[:, :rows].repeat_interleave(width, 2)[:, :, :columns]
    stored = (drawn / each).to(torch.float8_e4m3fn)
    return stored, ExpertScales(values, height, width), stored.float() * each


def _paged(weights: torch.Tensor, step: int) -> tuple[PagedRows, torch.Tensor]:
    """(the table's rows, the memory of the pages), pages in reverse. weights: [E, rows, columns]"""
    device, rows = weights.device, weights.flatten(0, 1).view(torch.uint8)
    num_pages = -(-len(rows) // step)
    pages = torch.full((num_pages, step, rows.shape[1]), 0xFF, dtype=torch.uint8, device=device)  # NaN in every type
    for page, part in enumerate(rows.split(step)):
        pages[num_pages - 1 - page, : len(part)] = part
    addresses = [pages[num_pages - 1 - page].data_ptr() for page in range(num_pages)]
    first_rows = torch.arange(weights.shape[0], dtype=torch.int32) * weights.shape[1]
    return PagedRows(torch.tensor(addresses, device=device), first_rows.to(device), step), pages
