"""How often each expert was asked for, lately: what a step's experts are kept or evicted by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

DEFAULT_HALF_LIFE_STEPS = 64.0
"""Long enough to tell an expert of every tenth step from one of every twentieth, short against a change of topic."""


class ExpertScores:
    """Steps that asked for an expert, each counted half after so many steps of its layer.

    Steps and not tokens, since an expert is fetched once for a step, however many tokens it gets: a long prompt would
    otherwise outweigh hundreds of decode steps.
    """

    def __init__(self, num_experts: Mapping[int, int], half_life_steps: float = DEFAULT_HALF_LIFE_STEPS) -> None:
        """num_experts: by layer."""
        if not half_life_steps > 0:
            raise ValueError(f"half_life_steps must be positive, got {half_life_steps}")
        self._decay = 0.5 ** (1.0 / half_life_steps)
        self._scores = {layer: [0.0] * count for layer, count in num_experts.items()}

    def count(self, layer: int, experts: Iterable[int]) -> None:
        """One step of the layer, which asked for these."""
        scores = [score * self._decay for score in self._scores[layer]]
        for expert in experts:
            scores[expert] += 1.0
        self._scores[layer] = scores

    def of(self, layer: int, expert: int) -> float:
        return self._scores[layer][expert]
