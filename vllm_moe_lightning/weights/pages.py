"""Where a layer's expert tensors lie in its packed frame, and how that frame is cut into pages.

A frame holds one layer, packed and contiguous, the same on the host and on the device, so a page is a plain byte
range and a stock kernel finds each tensor as a view with the shape and strides it had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm_moe_lightning.errors import UnsupportedError

# Vector loads and tensor cores want 64 or 128 bytes; a page boundary inside a tensor is of no consequence.
TENSOR_ALIGNMENT_BYTES = 128


@dataclass(frozen=True)
class TensorPlace:
    """One tensor inside a frame."""

    name: str
    offset_bytes: int
    num_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def view_in(self, frame: torch.Tensor) -> torch.Tensor:
        """The tensor as a view of `frame` (uint8, 1-D)."""
        raw = frame[self.offset_bytes : self.offset_bytes + self.num_bytes].view(self.dtype)
        return raw.as_strided(self.shape, self.stride, raw.storage_offset())


@dataclass(frozen=True)
class LayerLayout:
    places: tuple[TensorPlace, ...]
    num_bytes: int


@dataclass(frozen=True)
class Page:
    """The unit of transfer: a byte range of a layer's frame."""

    offset_bytes: int
    num_bytes: int


def layout_of(layer_name: str, tensors: Mapping[str, torch.Tensor]) -> LayerLayout:
    """Pack `tensors` one after the other. Raises UnsupportedError for a tensor whose memory has holes or overlaps."""
    places, offset = [], 0
    for name, tensor in tensors.items():
        if not is_dense(tensor):
            raise UnsupportedError(
                f"cannot page {layer_name}.{name}: its memory is not dense "
                f"(shape {tuple(tensor.shape)}, stride {tensor.stride()}); run this model without moe_lightning"
            )
        num_bytes = tensor.numel() * tensor.element_size()
        places.append(TensorPlace(name, offset, num_bytes, tuple(tensor.shape), tensor.stride(), tensor.dtype))
        offset = _align(offset + num_bytes)
    return LayerLayout(tuple(places), offset)


def pages_of(num_bytes: int, page_bytes: int) -> tuple[Page, ...]:
    """Cut a frame into pages of equal size; the last takes the remainder."""
    return tuple(Page(begin, min(page_bytes, num_bytes - begin)) for begin in range(0, num_bytes, page_bytes))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without holes or overlaps, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0


def _align(offset_bytes: int) -> int:
    return -(-offset_bytes // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES
