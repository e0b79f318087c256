"""What becomes of a micro-batch's routed experts where their layer is not streamed: on the CPU, or fetched."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_moe_lightning.pipeline.tasks import TaskKey


@dataclass(frozen=True)
class ExpertsRequest:
    """Yielded by a micro-batch: the routed experts of its layer, the result into `output`. T tokens, K choices each."""

    hidden: torch.Tensor  # device [T, hidden_size]
    topk_ids: torch.Tensor  # device [T, K]
    topk_weights: torch.Tensor  # device [T, K]
    output: torch.Tensor  # device [T, hidden_size]


class TokenRegions:
    """One region of a staging buffer for each micro-batch, by its tokens."""

    def __init__(self) -> None:
        self._first_token: list[int] = []

    def begin_sweep(self, num_tokens: Sequence[int]) -> None:
        self._first_token = [sum(num_tokens[:index]) for index in range(len(num_tokens))]

    def part(self, tensor: torch.Tensor, index: int, num_tokens: int, bytes_per_token: int) -> torch.Tensor:
        """Of a staging buffer [num_bytes] uint8: the region of a micro-batch."""
        begin = self._first_token[index] * bytes_per_token
        return tensor[begin : begin + num_tokens * bytes_per_token]


class ExpertsPath(ABC):
    """Staging regions are one per micro-batch, free again once the micro-batch's own chain of tasks has gone round."""

    @abstractmethod
    def begin_sweep(self, num_tokens: Sequence[int]) -> None:
        """Tokens of each micro-batch: gives each its region."""

    @abstractmethod
    def pack(self, index: int, request: ExpertsRequest) -> None:
        """At the end of post-attention, on the compute stream: what goes down, side by side, in one copy."""

    @abstractmethod
    def pack_writes(self, index: int) -> list[str]:
        """Names of the buffers that `pack` writes."""

    @abstractmethod
    def launch(self, key: TaskKey, request: ExpertsRequest) -> None:
        """Put one task on its own stream, none of which is compute."""

    @abstractmethod
    def finish(self, key: TaskKey, request: ExpertsRequest) -> None:
        """Before the micro-batch goes on, on the compute stream: what is still to be computed there."""

    @abstractmethod
    def output_reads(self, index: int) -> list[str]:
        """Names of the buffers that the rest of the layer reads."""

    @abstractmethod
    def abort(self) -> None:
        """The sweep was given up: forget what is open."""
