# SPDX-License-Identifier: Apache-2.0
"""For `preload`: the layers whose experts the CPU computes change from sweep to sweep, as no plan would have it."""

from __future__ import annotations

from itertools import count


def change_with_each_sweep() -> None:
    """None, all, every other layer, the first, the last, and from the start."""
    from vllm_moe_lightning.integration.cpu_experts import CpuExperts
    from vllm_moe_lightning.pipeline.expert_places import ExpertPlaces

    sweeps = count()

    def places(self: CpuExperts, num_tokens: int) -> ExpertPlaces:
        layers = self._streamed
        return ExpertPlaces(on_cpu=frozenset([(), layers, layers[::2], layers[:1], layers[-1:]][next(sweeps) % 5]))

    CpuExperts.places = places  # type: ignore[method-assign]
