# SPDX-License-Identifier: Apache-2.0
"""DBRX checkpoints load again: maps the experts' names to where vLLM now keeps them.

Upstream symbol: `vllm.model_executor.models.dbrx.DbrxModel.load_weights`, vLLM 0.24 to 0.33 (tried on 0.32.0).
Why: the experts' parameters moved into a child module (`ffn.experts.w13_weight` became
`ffn.experts.routed_experts.w13_weight`), but DBRX's loader still looks under the old name and ends in
`KeyError: 'blocks.0.ffn.experts.w13_weight'` (vllm#49004, open).
What changes: checkpoint names get the missing step before the loader sees them; it does the rest itself.
Remove when: the oldest supported vLLM loads DBRX. A vLLM whose loader knows the new place is left alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

_NOT_AS_EXPECTED = "cannot patch DBRX's weight loading: DbrxModel.load_weights is not as in vLLM 0.32; use 0.32 or 0.33"
_OLD = ".ffn.experts.mlp."
_NEW = ".ffn.experts.routed_experts.mlp."


def map_expert_name(name: str) -> str:
    """`blocks.0.ffn.experts.mlp.w1` -> `blocks.0.ffn.experts.routed_experts.mlp.w1`; other names stay.

    The loader itself then makes `...routed_experts.w13_weight` of it.
    """
    return name.replace(_OLD, _NEW)


def apply() -> None:
    """Patches the class; a second call does nothing. RuntimeError if vLLM is not as expected."""
    try:
        from vllm.model_executor.models.dbrx import DbrxModel

        load_weights = DbrxModel.load_weights
        source = inspect.getsource(load_weights)
        parameters = list(inspect.signature(load_weights).parameters)
    except (ImportError, AttributeError, OSError) as error:
        raise RuntimeError(f"{_NOT_AS_EXPECTED} ({error})") from error
    if hasattr(load_weights, "_maps_expert_names") or "routed_experts" in source:
        return
    if parameters != ["self", "weights"] or "mlp.{weight_name}" not in source:
        raise RuntimeError(_NOT_AS_EXPECTED)

    @functools.wraps(load_weights)
    def load_weights_with_mapped_names(self: Any, weights: Iterable[tuple[str, Any]]) -> set[str]:
        return load_weights(self, ((map_expert_name(name), weight) for name, weight in weights))

    load_weights_with_mapped_names._maps_expert_names = True  # type: ignore[attr-defined]
    DbrxModel.load_weights = load_weights_with_mapped_names
