"""Faults on demand: what becomes of one attention task, to show that requests end with an error and never hang; and a
page of zeros, to show that wrong weights are noticed."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_moe_lightning.config import DebugOptions, FaultKind
from vllm_moe_lightning.errors import DeviceTaskError
from vllm_moe_lightning.kernels import native
from vllm_moe_lightning.weights.store import PagedWeightStore


@dataclass(frozen=True)
class AttentionFault:
    """The `task_number`-th attention task (1, 2, ...) goes wrong."""

    task_number: int
    kind: FaultKind

    def function(self, label: str) -> object:
        """What runs on the stream in the task's place. Raises DeviceTaskError for the kind `raise`."""
        match self.kind:
            case "raise":
                raise DeviceTaskError(f"{label}: failure injected by moe_lightning.debug.fail_attention_at")
            case "error":
                return native.library().mol_fault_error
            case "hang":
                return native.library().mol_fault_hang
            case "end_thread":
                return native.library().mol_fault_end_thread


def attention_fault(debug: DebugOptions) -> AttentionFault | None:
    """The fault that the options ask for."""
    if debug.fail_attention_at is None:
        return None
    return AttentionFault(debug.fail_attention_at, debug.attention_fault or "raise")


def zero_page(debug: DebugOptions, store: PagedWeightStore) -> None:
    """Zeroes the host page that the options name, if any. Raises ValueError for one that there is not."""
    if debug.zero_page is None:
        return
    layer, page = debug.zero_page
    if page >= store.num_pages(layer):
        there = {index: len(streamed.pages) for index, streamed in store.layers.items()}
        raise ValueError(
            f"moe_lightning.debug.zero_page: no page {page} of decoder layer {layer}; the streamed layers have "
            f"{there} pages"
        )
    streamed = store.layers[layer]
    where = streamed.pages[page]
    streamed.host.tensor[where.offset_bytes : where.offset_bytes + where.num_bytes].zero_()
