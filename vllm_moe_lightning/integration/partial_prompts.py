"""Keeps requests with a seed apart from sampling while their prompt is only partly computed.

vLLM samples those rows too, throws the token away and rolls the request's generator back; on the CPU a generator cannot
be rolled back, and the V1 runner dies of it. A plan's token budget makes partial prompts common.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def partial_prompts_draw_nothing(model_runner: Any) -> Iterator[None]:
    """Rows that are thrown away draw from the common generator, so their own stays as it is. V2 has no such state."""
    mask = getattr(model_runner, "discard_request_mask", None)
    generators: dict[int, Any] = {} if mask is None else model_runner.input_batch.generators
    put_aside = {row: generators.pop(row) for row in list(generators) if mask is not None and mask.np[row]}
    try:
        yield
    finally:
        generators.update(put_aside)
