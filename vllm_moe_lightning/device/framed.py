"""What every device does with its frames and its streams alike: count, poison, forget, wait for all."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

import torch

from vllm_moe_lightning.device.base import Device, Stream
from vllm_moe_lightning.device.hazards import StreamObserver
from vllm_moe_lightning.device.memory import MemoryBudget
from vllm_moe_lightning.errors import DeviceTaskError


class FramedDevice(Device):
    """Frames by name, against a budget."""

    def __init__(self, memory: MemoryBudget, hazards: StreamObserver | None, *, poison: bool) -> None:
        self.poison = poison
        self._memory = memory
        self._hazards = hazards
        self._frames: dict[str, torch.Tensor] = {}

    @abstractmethod
    def _poison(self, frame: torch.Tensor) -> None:
        """NaN bytes into all of it, where they are asked for."""

    def reserve(self, num_bytes: int, name: str) -> None:
        self._memory.take(num_bytes, name)

    def release(self, name: str) -> None:
        # On CUDA to the caching allocator, for the compute stream's use: what that was given before comes first.
        self._memory.give_back(name)
        frame = self._frames.pop(name, None)
        if frame is not None:
            self._poison(frame)
        if self._hazards is not None:
            self._hazards.forget(name)

    @property
    def memory_budget_bytes(self) -> int | None:
        return self._memory.budget_bytes

    @property
    def memory_used_bytes(self) -> int:
        return self._memory.used_bytes


def synchronize_all(streams: Iterable[Stream]) -> None:
    """Waits for each; then raises the first DeviceTaskError, after which all streams are idle as well."""
    failure: DeviceTaskError | None = None
    for stream in streams:
        try:
            stream.synchronize()
        except DeviceTaskError as error:
            failure = failure or error
    if failure is not None:
        raise failure
