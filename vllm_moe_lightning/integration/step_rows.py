"""A step's rows in host memory, for attention on the CPU: already there on the CPU build, and on CUDA on their way in
one copy, which the host waits for only when it needs them.

With several KV cache groups all copies are under way before the first is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def is_in_host_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def bring_down(packed: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
    """Pinned memory that `packed`, of the GPU, is being copied to, and the wait for it. On the current stream, so
    behind the runner's kernels that write it."""
    landing = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    landing.copy_(packed, non_blocking=True)
    arrived = torch.cuda.Event(blocking=True)  # sleeps: the core is the attention threads'
    arrived.record()
    return landing, arrived.synchronize


def copies_on_host(tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """Of tensors that the runner will write again for the next step, when ours may still be read: their values as of
    now, with their types and shapes. Longer element types come first, so that all are aligned."""
    if all(is_in_host_memory(tensor) for tensor in tensors):
        copies = [tensor.clone() for tensor in tensors]
        return lambda: copies
    as_bytes = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    landing, wait = bring_down(torch.cat(as_bytes))

    def arrived() -> list[torch.Tensor]:
        wait()
        pieces = landing.split([tensor.nbytes for tensor in tensors])
        return [piece.view(tensor.dtype).view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]

    return arrived
