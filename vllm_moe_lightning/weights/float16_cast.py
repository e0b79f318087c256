"""Weights that were cast to float16 while they were loaded, as for chips before sm_80: float16 ends at 65504, and what
is larger became infinite without a word.

Says nothing of activations: a model trained in bfloat16 may have some that float16 can't hold, whatever its weights.
"""

from __future__ import annotations

import torch

from vllm_moe_lightning.errors import UnsupportedError


def refuse_overflow(name: str, weights: torch.Tensor) -> None:
    """Raises UnsupportedError if float16 weights hold values that are not finite. Any shape, device and type: those of
    other types were not cast."""
    if weights.dtype != torch.float16 or weights.isfinite().all():
        return
    num_infinite, num_nan = int(weights.isinf().sum()), int(weights.isnan().sum())
    raise UnsupportedError(
        f"{name} can't be held in float16: {num_infinite} of its {weights.numel()} values are over 65504 and "
        f"{num_nan} are NaN. This model needs bfloat16 (--dtype bfloat16), so a GPU of sm_80 or newer; if it is no "
        "better there, the checkpoint is damaged"
    )
