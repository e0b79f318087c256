"""Straight lines of a formula in a policy's continuous choices, for a solver: by evaluating the formula itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from vllm_moe_lightning.workload import HrmPolicy

_Key = TypeVar("_Key")


@dataclass(frozen=True)
class Affine:
    """A quantity that depends on the policy's continuous choices along straight lines."""

    constant: float
    per_resident_layer: float
    per_kv_gpu_ratio: float
    per_disk_layer: float

    def at(self, policy: HrmPolicy) -> float:
        return (
            self.constant
            + self.per_resident_layer * policy.num_resident_layers
            + self.per_kv_gpu_ratio * policy.kv_gpu_ratio
            + self.per_disk_layer * policy.num_disk_layers
        )


def affine_terms(quantity: Callable[[HrmPolicy], Mapping[_Key, float]], policy: HrmPolicy) -> dict[_Key, Affine]:
    """The lines of a formula that is known to be affine, by evaluating it at the origin and one step along each axis:
    so a solver's coefficients can't drift from the formula."""
    origin = replace(policy, num_resident_layers=0, kv_gpu_ratio=0.0, num_disk_layers=0)
    base = quantity(origin)
    resident = quantity(replace(origin, num_resident_layers=1))
    kv = quantity(replace(origin, kv_gpu_ratio=1.0)) if policy.attention_on_gpu else base
    disk = quantity(replace(origin, num_disk_layers=1))
    return {
        key: Affine(value, resident[key] - value, kv[key] - value, disk[key] - value) for key, value in base.items()
    }
