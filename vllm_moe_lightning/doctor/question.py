"""What is asked about, and what the rehearsed start answers beside its findings: plain data between two processes."""

from __future__ import annotations

from typing import Any

import msgspec


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of vLLM and of ours, under their own names; None: not given."""

    model: str
    """A checkpoint's folder."""
    dtype: str = "auto"
    max_model_len: int | None = None
    kv_cache_gib: float | None = None
    """Of each rank."""
    device_memory_mib: float | None = None
    tensor_parallel_size: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """Of ours, as under additional_config["moe_lightning"]."""
        given = {"kv_cache_gib": self.kv_cache_gib, "device_memory_mib": self.device_memory_mib}
        return {name: value for name, value in given.items() if value is not None}


class StartFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What only a start knows. None: it did not get that far."""

    is_cuda_build: bool | None = None
    """Of torch."""
    dtype: str | None = None
    """That vLLM computes in."""
    max_model_len: int | None = None
    kv_bytes_per_rank: int | None = None
    """By the plan."""
