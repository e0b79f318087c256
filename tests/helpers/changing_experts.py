# SPDX-License-Identifier: Apache-2.0
"""For `preload`: the layers whose experts the CPU computes change from sweep to sweep, as no plan would have it."""

from __future__ import annotations

from itertools import count


def change_with_each_sweep() -> None:
    """None, all, every other layer, the first, the last, and from the start."""
    from vllm_moe_lightning.integration.cpu_experts import CpuExperts

    sweeps = count()

    def layers_of(self: CpuExperts, num_tokens: int) -> frozenset[int]:
        layers = self._streamed
        return frozenset([(), layers, layers[::2], layers[:1], layers[-1:]][next(sweeps) % 5])

    CpuExperts.layers_of = layers_of  # type: ignore[method-assign]
