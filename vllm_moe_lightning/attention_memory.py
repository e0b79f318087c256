"""Device memory that attention of prompts takes for a moment, beside queries, keys and values: the bounds that the
kernels keep by working in slices, and that plans count. At the least a slice is one query over one key head."""

from __future__ import annotations

MIB = 1 << 20
# Of each kind at a time. Slices of a few hundred queries over 32k keys already keep a GPU busy.
MASK_BYTES = 64 * MIB
QUERY_BYTES = 32 * MIB
KEY_BYTES = 32 * MIB
PROMPT_ATTENTION_BYTES = MASK_BYTES + QUERY_BYTES + KEY_BYTES

QUERY_COPIES = 3  # regrouped queries, the kernel's output, and that in the model's order


def mask_bytes_per_pair(element_bytes: int) -> int:
    """Of a query and a key: bools in the making, and what torch's kernels take: the elements' type, once more if the
    keys are no multiple of 16."""
    return 3 + 2 * element_bytes
