"""bfloat16 weights in float16, for chips before sm_80: a cast that is checked, since float16 ends at 65504.

Says nothing of activations: a model trained in bfloat16 may have some that float16 can't hold, whatever its weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_moe_lightning.errors import UnsupportedError


@dataclass(frozen=True)
class CastLoss:
    """What float16 did not keep. bfloat16 has fewer digits, so all that is lost is lost below 2**-14."""

    num_values: int
    num_made_zero: int
    """Not zero before: smaller than half of 2**-24."""
    num_rounded: int
    """Smaller than 2**-14 and not zero, and not the same value after."""


def cast_to_float16(name: str, weights: torch.Tensor) -> tuple[torch.Tensor, CastLoss]:
    """weights: bfloat16 of any shape. Returns them in float16, and what that cost.

    Raises UnsupportedError if a value would overflow, or is not finite to begin with.
    """
    cast = weights.to(torch.float16)
    num_infinite = int((~weights.isfinite()).sum())
    if num_infinite:
        raise UnsupportedError(f"{name} has {num_infinite} values that are NaN or infinite; the checkpoint is damaged")
    num_overflowed = int((~cast.isfinite()).sum())
    if num_overflowed:
        raise UnsupportedError(
            f"{name} can't be cast to float16: {num_overflowed} of {weights.numel()} values are over 65504, the "
            f"largest is {float(weights.abs().max()):.6g}; this model needs bfloat16, so a GPU of sm_80 or newer"
        )
    num_made_zero = int(((cast == 0) & (weights != 0)).sum())
    num_changed = int((cast.to(weights.dtype) != weights).sum())
    return cast, CastLoss(weights.numel(), num_made_zero, num_changed - num_made_zero)
