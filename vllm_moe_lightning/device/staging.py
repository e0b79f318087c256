"""Copies between the GPU and host memory that is not pinned: through a small pinned buffer, piece by piece.

The slow way, for those who asked for it: the launching thread moves every byte itself, and waits for the copies before.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from vllm_moe_lightning.device.cuda_runtime import CudaRuntime, EventHandle, StreamHandle

PIECE_BYTES = 16 << 20
NUM_PIECES = 2  # one is filled while the other is copied


class StagingBuffer:
    """memory: [NUM_PIECES * PIECE_BYTES] or fewer uint8, pinned; used by one stream. copy(dst, src): puts a copy
    between it and the GPU on that stream. wait: blocks until an event is complete."""

    def __init__(
        self,
        runtime: CudaRuntime,
        memory: torch.Tensor,
        copy: Callable[[torch.Tensor, torch.Tensor], None],
        wait: Callable[[EventHandle], None],
    ) -> None:
        self.wait_s = 0.0
        self._runtime = runtime
        self._copy = copy
        self._pieces = memory.chunk(NUM_PIECES)
        self._busy: list[EventHandle | None] = [None] * NUM_PIECES
        self._wait = wait

    def upload(self, stream: StreamHandle, dst: torch.Tensor, src: torch.Tensor) -> None:
        """dst: on the GPU, src: pageable; [num_bytes] uint8. `src` has been read when this returns."""
        begin_s = time.monotonic()
        for index, (to, source) in enumerate(self._cut(dst, src)):
            piece = self._free_piece(index)[: source.numel()]
            piece.copy_(source)
            self._copy(to, piece)
            self._busy[index % NUM_PIECES] = self._runtime.record(stream)
        self.wait_s += time.monotonic() - begin_s

    def download(self, stream: StreamHandle, dst: torch.Tensor, src: torch.Tensor) -> None:
        """dst: pageable, src: on the GPU; [num_bytes] uint8. `dst` has been written when this returns."""
        begin_s = time.monotonic()
        for index, (to, source) in enumerate(self._cut(dst, src)):
            piece = self._free_piece(index)[: to.numel()]
            self._copy(piece, source)
            self._wait(self._runtime.record(stream))
            to.copy_(piece)
        self.wait_s += time.monotonic() - begin_s

    def _cut(self, dst: torch.Tensor, src: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        size = self._pieces[0].numel()
        return list(zip(dst.split(size), src.split(size), strict=True))

    def _free_piece(self, index: int) -> torch.Tensor:
        index %= NUM_PIECES
        if self._busy[index] is not None:
            self._wait(self._busy[index])
            self._busy[index] = None
        return self._pieces[index]
