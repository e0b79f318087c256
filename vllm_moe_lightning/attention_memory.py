"""Device memory that attention of prompts takes: the bounds that the engine keeps, and that plans count.

What it takes for a moment, beside queries, keys and values, is kept small by working in slices; at the least a slice is
one query over one key head.
"""

from __future__ import annotations

MIB = 1 << 20
# Of each kind at a time. Slices of a few hundred queries over 32k keys already keep a GPU busy.
MASK_BYTES = 64 * MIB
QUERY_BYTES = 32 * MIB
KEY_BYTES = 32 * MIB
PROMPT_ATTENTION_BYTES = MASK_BYTES + QUERY_BYTES + KEY_BYTES

CONTEXT_FRAME_BYTES = 256 * MIB
"""Of a frame for prompts' cached context, at most: keys and values of 64k tokens of a layer with 8 heads of 128 in 16
bits. Longer contexts are attended to on the CPU."""

QUERY_COPIES = 3  # regrouped queries, the kernel's output, and that in the model's order


def mask_bytes_per_pair(element_bytes: int) -> int:
    """Of a query and a key: bools in the making, and what torch's kernels take: the elements' type, once more if the
    keys are no multiple of 16."""
    return 3 + 2 * element_bytes
