"""Weights that were cast to float16 while they were loaded, as for chips before sm_80: float16 ends at 65504, and what
is larger became infinite without a word.

Says nothing of activations: a model trained in bfloat16 may have some that float16 can't hold, whatever its weights.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.host_limits import usable_cpus

PIECE_ELEMENTS = 4 << 20  # looked at in one go, so that the check takes next to no memory
EXPONENT = 0x7C00  # all of its bits: infinite, or NaN


def refuse_overflow(name: str, weights: torch.Tensor) -> None:
    """Raises UnsupportedError if float16 weights hold values that are not finite. Any shape and device; those of other
    types were not cast. With all CPUs that may be used: vLLM leaves torch one."""
    if weights.dtype != torch.float16:
        return
    pieces = weights.reshape(-1).view(torch.int16).split(PIECE_ELEMENTS)
    with ThreadPoolExecutor(usable_cpus()) as pool:
        if all(pool.map(_is_finite, pieces)):
            return
    halves = [piece.view(torch.float16) for piece in pieces]
    num_infinite, num_nan = (sum(int(mark(half).sum()) for half in halves) for mark in (torch.isinf, torch.isnan))
    raise UnsupportedError(
        f"{name} can't be held in float16: {num_infinite} of its {weights.numel()} values are over 65504 and "
        f"{num_nan} are NaN. This model needs bfloat16 (--dtype bfloat16), so a GPU of sm_80 or newer; if it is no "
        "better there, the checkpoint is damaged"
    )


def _is_finite(piece: torch.Tensor) -> bool:
    """piece: float16 as int16 [n]"""
    return not bool(((piece & EXPONENT) == EXPONENT).any())
