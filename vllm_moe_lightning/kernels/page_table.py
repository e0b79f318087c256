"""Where on a device the rows of a layer's experts lie: the page table that paged_fused_moe reads.

A page holds whole rows of one matrix, so a row is contiguous and an address is looked up once per row of a tile. Pages
of one matrix hold the same number of rows; where an expert begins or ends inside a page is free. Says nothing of which
experts are on the device (weights/expert_residency.py does).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

ROW_ALIGNMENT_BYTES = 16  # one vector load
PAGED_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float32)
MAX_ROWS = 2**31 - 1  # rows are counted in int32

Matrix = Literal["w13", "w2"]


@dataclass(frozen=True)
class ExpertShape:
    """The routed experts of one layer: w13 [E, 2 I, H], w1's rows (gate) and then w3's (up), and w2 [E, H, I]."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype
    """Of the weights: float16, bfloat16, or float8_e4m3fn with scales; float32 for the reference alone."""

    def __post_init__(self) -> None:
        if self.dtype not in PAGED_DTYPES:
            raise ValueError(f"experts of {self.dtype} can't be paged, only {', '.join(map(str, PAGED_DTYPES))}")
        if min(self.num_experts, self.hidden_size, self.intermediate_size) < 1:
            raise ValueError(f"experts need positive sizes, got {self}")
        for name, size in (("hidden_size", self.hidden_size), ("intermediate_size", self.intermediate_size)):
            if size * self.dtype.itemsize % ROW_ALIGNMENT_BYTES:
                step = ROW_ALIGNMENT_BYTES // self.dtype.itemsize
                raise ValueError(
                    f"{name} {size} makes rows of {size * self.dtype.itemsize} bytes, which are no multiple of "
                    f"{ROW_ALIGNMENT_BYTES}; in {self.dtype} it must be a multiple of {step}"
                )

    def num_rows(self, matrix: Matrix) -> int:
        """Of one expert."""
        return 2 * self.intermediate_size if matrix == "w13" else self.hidden_size

    def num_columns(self, matrix: Matrix) -> int:
        return self.hidden_size if matrix == "w13" else self.intermediate_size

    def row_bytes(self, matrix: Matrix) -> int:
        return self.num_columns(matrix) * self.dtype.itemsize

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size * self.dtype.itemsize


class PageRows(NamedTuple):
    """The rows of one expert's matrix that a page holds, begin to end, from the page's first byte on."""

    matrix: Matrix
    begin: int
    end: int


@dataclass(frozen=True)
class ExpertPages:
    """How one expert is cut into pages of page_bytes: whole rows of w13, then pages with whole rows of w2.

    Raises ValueError where a page is too small for one row, or would not keep rows aligned.
    """

    shape: ExpertShape
    page_bytes: int

    def __post_init__(self) -> None:
        row_bytes = max(self.shape.row_bytes("w13"), self.shape.row_bytes("w2"))
        if self.page_bytes < row_bytes:
            raise ValueError(
                f"page_bytes {self.page_bytes} is less than one row of an expert ({row_bytes} bytes), and no row may "
                f"lie in two pages; {page_bytes_for(self.shape)} fills every page of these experts"
            )
        if self.page_bytes % ROW_ALIGNMENT_BYTES:
            raise ValueError(f"page_bytes {self.page_bytes} is no multiple of {ROW_ALIGNMENT_BYTES}")

    def rows_per_page(self, matrix: Matrix) -> int:
        return min(self.page_bytes // self.shape.row_bytes(matrix), self.shape.num_rows(matrix))

    def num_pages_of(self, matrix: Matrix) -> int:
        return -(-self.shape.num_rows(matrix) // self.rows_per_page(matrix))

    @property
    def num_pages(self) -> int:
        """Of one expert."""
        return self.num_pages_of("w13") + self.num_pages_of("w2")

    @property
    def unused_ratio(self) -> float:
        """Of the pages' bytes, those that hold no weights."""
        return 1.0 - self.shape.expert_bytes / (self.num_pages * self.page_bytes)

    def page_rows(self) -> Iterator[PageRows]:
        """Page by page: w13's, then w2's."""
        matrices: tuple[Matrix, ...] = ("w13", "w2")
        for matrix in matrices:
            step, num_rows = self.rows_per_page(matrix), self.shape.num_rows(matrix)
            yield from (PageRows(matrix, begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step))


def page_bytes_for(shape: ExpertShape, max_page_bytes: int = 64 << 20) -> int:
    """The largest page up to max_page_bytes that an expert fills without a rest.

    w2 has I H elements and w13 twice as many: with m a divisor of I and of H, pages of I H / m elements are full,
    3 m of them. The smallest page there is has m = gcd(I, H), and is given where even that is over max_page_bytes.
    """
    w2_bytes = shape.expert_bytes // 3
    common = math.gcd(shape.hidden_size, shape.intermediate_size)
    divisors = (m for m in range(1, common + 1) if common % m == 0 and w2_bytes // m <= max_page_bytes)
    return w2_bytes // next(divisors, common)


@dataclass(frozen=True)
class PagedRows:
    """The rows of one matrix of all experts, in pages. Row r of expert e is row first_rows[e] + r, counted over all
    pages in the table's order; it lies in page (first_rows[e] + r) // rows_per_page."""

    addresses: torch.Tensor  # [num_pages] int64: of each page's first row; of experts that get no token: anything
    first_rows: torch.Tensor  # [E] int32
    rows_per_page: int


@dataclass(frozen=True)
class ExpertScales:
    """What float8 weights are multiplied by: values[e, row // rows_per_scale, column // columns_per_scale]."""

    values: torch.Tensor  # [E, row groups, column groups] float32
    rows_per_scale: int
    columns_per_scale: int

    def check(self, name: str, shape: ExpertShape, matrix: Matrix) -> None:
        """Raises ValueError where these are not the scales of `matrix`."""
        groups = (
            -(-shape.num_rows(matrix) // self.rows_per_scale),
            -(-shape.num_columns(matrix) // self.columns_per_scale),
        )
        expected = (shape.num_experts, *groups)
        if tuple(self.values.shape) != expected or self.values.dtype != torch.float32 or self.values.stride(2) != 1:
            raise ValueError(
                f"{name} must be {list(expected)} float32 with adjacent columns for groups of {self.rows_per_scale} x "
                f"{self.columns_per_scale}, got {list(self.values.shape)} {self.values.dtype}"
            )


def scales_per_tensor(scale: torch.Tensor, shape: ExpertShape, matrix: Matrix) -> ExpertScales:
    """From one scale per expert [E], or for w13 also one for w1 and one for w3 [E, 2]."""
    values = scale.float().reshape(shape.num_experts, -1)
    if values.shape[1] not in ((1, 2) if matrix == "w13" else (1,)):
        raise ValueError(f"{matrix} has {shape.num_experts} experts, got scales of shape {list(scale.shape)}")
    return ExpertScales(
        values[:, :, None].contiguous(), shape.num_rows(matrix) // values.shape[1], shape.num_columns(matrix)
    )


@dataclass(frozen=True)
class PageTable:
    """All that paged_fused_moe needs to find a layer's experts. Tensors on the device that computes.

    Raises ValueError where a tensor does not fit the shape. The addresses are taken on trust: they are of memory that
    the page's rows fill, aligned to 16 bytes, for each expert that gets a token.
    """

    shape: ExpertShape
    w13: PagedRows
    w2: PagedRows
    w13_scales: ExpertScales | None = None
    w2_scales: ExpertScales | None = None

    def __post_init__(self) -> None:
        is_scaled = self.shape.dtype == torch.float8_e4m3fn
        if (self.w13_scales is not None, self.w2_scales is not None) != (is_scaled, is_scaled):
            raise ValueError(f"experts of {self.shape.dtype} {'need' if is_scaled else 'have no'} scales")
        matrices: tuple[tuple[Matrix, PagedRows, ExpertScales | None], ...] = (
            ("w13", self.w13, self.w13_scales),
            ("w2", self.w2, self.w2_scales),
        )
        for name, rows, scales in matrices:
            _check_vector(f"{name}.addresses", rows.addresses, None, torch.int64, self.device)
            _check_vector(f"{name}.first_rows", rows.first_rows, self.shape.num_experts, torch.int32, self.device)
            num_rows = rows.addresses.numel() * rows.rows_per_page
            if rows.rows_per_page < 1 or num_rows > MAX_ROWS:
                raise ValueError(f"{name}: {rows.rows_per_page} rows per page make {num_rows}, allowed 1..{MAX_ROWS}")
            if scales is not None:
                scales.check(f"{name}_scales", self.shape, name)
                if scales.values.device != self.device:
                    raise ValueError(f"{name}_scales are on {scales.values.device}, the pages on {self.device}")

    @property
    def device(self) -> torch.device:
        return self.w13.addresses.device


def _check_vector(name: str, vector: torch.Tensor, size: int | None, dtype: torch.dtype, device: torch.device) -> None:
    is_right = vector.dim() == 1 and vector.numel() > 0 and size in (None, vector.numel()) and vector.dtype == dtype
    if not is_right or not vector.is_contiguous() or vector.device != device:
        raise ValueError(
            f"{name} must be contiguous {dtype} of shape [{'pages' if size is None else size}] on {device}, got "
            f"{list(vector.shape)} {vector.dtype} on {vector.device}"
        )
