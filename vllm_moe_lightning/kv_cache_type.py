"""How a KV cache holds its elements, under the names of vLLM's --kv-cache-dtype: what a row costs. No torch."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

ElementKind = Literal["int8", "fp8"]
SCALE_BYTES = 4  # one fp32 scale for the keys, and one for the values, of each token and head

QUANTISED_TYPES: MappingProxyType[str, ElementKind] = MappingProxyType(
    {"int8_per_token_head": "int8", "fp8_per_token_head": "fp8"}
)
"""vLLM's name -> the kernels' kind. Any other name is the model's own type, or not supported."""


def quantised_row_bytes(head_dim: int) -> int:
    """Keys (or values) of one token and head, with their scale."""
    return head_dim + SCALE_BYTES


def row_bytes(head_dim: int, element_bytes: int, kind: ElementKind | None) -> int:
    """The same for a cache of any kind; `element_bytes` are those of an element that is not quantised."""
    return head_dim * element_bytes if kind is None else quantised_row_bytes(head_dim)
