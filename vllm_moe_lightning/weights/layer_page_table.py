"""The page table of one layer whose experts come and go: written on the host, uploaded before each use."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_moe_lightning.device.base import Device
from vllm_moe_lightning.kernels.page_table import ExpertPages, ExpertScales, PagedRows, PageTable


class LayerPageTable:
    """Each expert's addresses page by page, w13's of all experts first; zero while it is not on the device, so that a
    kernel which should not look there faults instead of computing with another expert's weights."""

    def __init__(self, pages: ExpertPages, device: Device, name: str) -> None:
        self._pages = pages
        num_experts = pages.shape.num_experts
        num_w13, num_w2 = pages.num_pages_of("w13"), pages.num_pages_of("w2")
        # Pageable on purpose: a copy from it has read it when it returns, so it may be written again at once.
        self._host = torch.zeros(num_experts * pages.num_pages, dtype=torch.int64)
        self._host_w13 = self._host[: num_experts * num_w13].view(num_experts, num_w13)
        self._host_w2 = self._host[num_experts * num_w13 :].view(num_experts, num_w2)
        experts = torch.arange(num_experts, dtype=torch.int32)
        first_rows = torch.stack(
            [experts * (num_w13 * pages.rows_per_page("w13")), experts * (num_w2 * pages.rows_per_page("w2"))]
        )
        buffer = device.allocate(self._host.nbytes + first_rows.nbytes, name)
        self.buffer_name = buffer.name
        self._addresses = buffer.tensor[: self._host.nbytes].view(torch.int64)
        self._first_rows = buffer.tensor[self._host.nbytes :].view(torch.int32).view(2, num_experts)
        with device.compute.span(f"first rows of {name}", reads=(), writes=[name]):
            self._first_rows.copy_(first_rows)

    def set(self, expert: int, addresses: Sequence[int]) -> None:
        """addresses: of the expert's pages in the order of ExpertPages.page_rows."""
        num_w13 = self._host_w13.shape[1]
        self._host_w13[expert] = torch.tensor(addresses[:num_w13])
        self._host_w2[expert] = torch.tensor(addresses[num_w13:])

    def forget(self, expert: int) -> None:
        self._host_w13[expert] = 0
        self._host_w2[expert] = 0

    def upload(self, w13_scales: ExpertScales | None, w2_scales: ExpertScales | None) -> PageTable:
        """The table as it is now, for what is launched on the current stream until the next upload."""
        self._addresses.copy_(self._host, non_blocking=True)
        num_w13 = self._host_w13.numel()
        return PageTable(
            self._pages.shape,
            PagedRows(self._addresses[:num_w13], self._first_rows[0], self._pages.rows_per_page("w13")),
            PagedRows(self._addresses[num_w13:], self._first_rows[1], self._pages.rows_per_page("w2")),
            w13_scales,
            w2_scales,
        )
