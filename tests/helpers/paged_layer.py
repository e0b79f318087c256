"""Random routed experts in pages, with traps around them.

Each page is memory of its own, in no order. What no row of a used expert fills holds NaN bytes, and pages of experts
without tokens have address zero, so that reading one ends the process.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.helpers.attention_batch import SENTINEL, nan_bytes
from vllm_moe_lightning.kernels.page_table import (
    ExpertScales,
    ExpertShape,
    Matrix,
    PagedRows,
    PageTable,
    scales_per_tensor,
)
from vllm_moe_lightning.kernels.reference_ffn import expert_ffn

GUARD = 64  # elements between tokens
FLOAT8 = torch.float8_e4m3fn
MAX_FLOAT8 = 448.0
MATRICES: tuple[Matrix, Matrix] = ("w13", "w2")


@dataclass(frozen=True)
class PagedCase:
    num_tokens: int = 5
    top_k: int = 2
    num_experts: int = 4
    hidden_size: int = 64
    intermediate_size: int = 48
    dtype: torch.dtype = torch.float16
    scale_group: tuple[int, int] | None = None  # rows and columns of a float8 scale; (0, 0): one per tensor
    w13_rows_per_page: int = 10
    w2_rows_per_page: int = 7
    experts_share_pages: bool = False  # a page ends with rows of the next expert
    num_used_experts: int | None = None  # tokens go to the first of the experts alone
    num_left_out: int = 0  # choices whose id is negative
    seed: int = 0

    @property
    def shape(self) -> ExpertShape:
        dtype = self.dtype if self.scale_group is None else FLOAT8
        return ExpertShape(self.num_experts, self.hidden_size, self.intermediate_size, dtype)


class PagedLayer:
    """One case's tensors, on `device`. `dense` are the weights that the pages hold, on the host in float32 with scales
    applied."""

    def __init__(self, case: PagedCase, device: str = "cpu") -> None:
        self.case, shape = case, case.shape
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.rng = torch.Generator().manual_seed(case.seed)
        used = case.num_used_experts or case.num_experts
        scores = torch.rand(case.num_tokens, used, generator=self.rng)
        self.topk_ids = scores.topk(case.top_k).indices.to(torch.int32)
        left_out = torch.randperm(self.topk_ids.numel(), generator=self.rng)[: case.num_left_out]
        self.topk_ids.view(-1)[left_out] = -1
        self.topk_weights = torch.rand(case.num_tokens, case.top_k, generator=self.rng)
        spread = nan_bytes((case.num_tokens, case.hidden_size + GUARD), case.dtype)
        spread[:, : case.hidden_size] = torch.randn(case.num_tokens, case.hidden_size, generator=self.rng)
        self.hidden = spread.to(self.device)[:, : case.hidden_size]
        self.pages: list[torch.Tensor] = []
        self.dense: dict[str, torch.Tensor] = {}
        rows, scales = {}, {}
        for matrix in MATRICES:
            weights, scales[matrix] = self._weights(shape, matrix)
            rows_per_page = case.w13_rows_per_page if matrix == "w13" else case.w2_rows_per_page
            rows[matrix] = self._page(weights, rows_per_page)
        self.table = PageTable(shape, rows["w13"], rows["w2"], scales["w13"], scales["w2"])
        self.topk_ids, self.topk_weights = self.topk_ids.to(self.device), self.topk_weights.to(self.device)

    def _weights(self, shape: ExpertShape, matrix: Matrix) -> tuple[torch.Tensor, ExpertScales | None]:
        num_rows, num_columns = shape.num_rows(matrix), shape.num_columns(matrix)
        weights = torch.randn(shape.num_experts, num_rows, num_columns, generator=self.rng) / num_columns**0.5
        if self.case.scale_group is None:
            self.dense[matrix] = weights.to(shape.dtype).float()
            return weights.to(shape.dtype), None
        group_rows = self.case.scale_group[0] or num_rows
        group_columns = self.case.scale_group[1] or num_columns
        # Loud and quiet blocks, so that a scale of the wrong place shows.
        grid = (shape.num_experts, -(-num_rows // group_rows), -(-num_columns // group_columns))
        values = torch.rand(grid, generator=self.rng).mul(2).add(0.25) * (4 / MAX_FLOAT8)
        factors = values.repeat_interleave(group_rows, 1)[:, :num_rows].repeat_interleave(group_columns, 2)
        factors = factors[:, :, :num_columns]
        quantised = (weights / factors).clamp(-MAX_FLOAT8, MAX_FLOAT8).to(FLOAT8)
        self.dense[matrix] = quantised.float() * factors
        if self.case.scale_group == (0, 0):
            return quantised, scales_per_tensor(values.view(shape.num_experts).to(self.device), shape, matrix)
        return quantised, ExpertScales(values.to(self.device), group_rows, group_columns)

    def _page(self, weights: torch.Tensor, rows_per_page: int) -> PagedRows:
        num_experts, num_rows, _ = weights.shape
        raw = weights.view(torch.uint8).view(num_experts, num_rows, -1)
        step = num_rows if self.case.experts_share_pages else -(-num_rows // rows_per_page) * rows_per_page
        first_rows = torch.arange(num_experts, dtype=torch.int32) * step
        num_pages = -(-num_experts * step // rows_per_page)
        held: dict[int, torch.Tensor] = {}
        for expert in self.used_experts():
            for row in range(num_rows):
                page, place = divmod(int(first_rows[expert]) + row, rows_per_page)
                if page not in held:
                    held[page] = torch.full((rows_per_page, raw.shape[2]), 0xFF, dtype=torch.uint8)
                held[page][place] = raw[expert, row]
        held = {page: rows.to(self.device) for page, rows in held.items()}
        self.pages += held.values()
        addresses = [held[page].data_ptr() if page in held else 0 for page in range(num_pages)]
        return PagedRows(torch.tensor(addresses, device=self.device), first_rows.to(self.device), rows_per_page)

    def used_experts(self) -> list[int]:
        return [expert for expert in self.topk_ids.unique().tolist() if expert >= 0]

    def expected(self) -> torch.Tensor:
        """[T, H] in float32 on the host, from the dense weights."""
        batch = (self.topk_ids.cpu(), self.topk_weights.cpu())
        return expert_ffn(self.hidden.cpu(), self.dense["w13"], self.dense["w2"], *batch)

    def guarded_output(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows for the output, and all the memory that they lie in."""
        size = (self.case.num_tokens + 2, self.case.hidden_size + GUARD)
        memory = torch.full(size, SENTINEL, dtype=self.case.dtype, device=self.device)
        return memory[1:-1, : self.case.hidden_size], memory

    def is_guarded(self, memory: torch.Tensor) -> bool:
        """Whether nothing but the output was written."""
        edges = (memory[0], memory[-1], memory[:, self.case.hidden_size :])
        return all(bool((edge == SENTINEL).all()) for edge in edges)


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the errors, over that of what is expected."""
    return float((actual.cpu().double() - expected).norm() / expected.norm())
