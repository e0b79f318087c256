"""Keeps the random generator of a seeded request still while its prompt is only partly computed.

vLLM samples a token for such a row as well, throws it away, and sets the generator back by an offset. Generators of the
CPU have no offset, so that one seeded request with a prompt in two chunks ends the engine (vLLM 0.32, runner V1). Here
the row has no generator until its prompt is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


@contextmanager
def generators_of_complete_prompts_only(runner: Any) -> Iterator[None]:
    """Around the sampling of one step. runner: vLLM's model runner V1."""
    batch = runner.input_batch
    incomplete = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs]).tolist()
    held = {row: batch.generators.pop(row) for row in incomplete if row in batch.generators}
    try:
        yield
    finally:
        batch.generators.update(held)
