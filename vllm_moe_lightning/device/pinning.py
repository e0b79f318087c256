"""Host memory of a CUDA device: mappings of our own, registered with the driver piece by piece.

Not torch's pinned allocator, which rounds every block up to a power of two and so takes up to twice the weights. Every
registration's result is checked, and one that fails takes back what it had pinned. Decides where buffers lie and which
of them are pinned; copies are the streams', who cut them at the edges of registrations: drivers have refused a copy
whose host side spans two as an invalid argument.
"""

from __future__ import annotations

import bisect
import logging
import mmap
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch

from vllm_moe_lightning.config import HostMemoryKind
from vllm_moe_lightning.device.cuda_runtime import CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CudaRuntime
from vllm_moe_lightning.device.memory import readable
from vllm_moe_lightning.errors import PinningError
from vllm_moe_lightning.host_limits import available_memory_bytes, memlock_bytes
from vllm_moe_lightning.numa import interleave

logger = logging.getLogger("vllm.vllm_moe_lightning.pinning")

HOST_MEMORY_KINDS = ("pinned", "pageable")
MIB = 1 << 20
# One call for hundreds of GiB has been refused by drivers that take the same bytes in pieces.
CHUNK_BYTES = 1024 * MIB
# With pageable memory asked for, what is larger than this is not pinned: weights and KV, not the staging of a step.
PAGEABLE_FROM_BYTES = 256 * MIB
ROOT = Path("/")


class HostMemory:
    """The host buffers of one device. `fail_at`: the n-th registration (1, 2, ...) fails, for tests."""

    def __init__(
        self,
        runtime: CudaRuntime,
        kind: HostMemoryKind = "pinned",
        *,
        chunk_bytes: int = CHUNK_BYTES,
        pageable_from_bytes: int = PAGEABLE_FROM_BYTES,
        fail_at: int | None = None,
    ) -> None:
        if kind not in HOST_MEMORY_KINDS:
            raise ValueError(f"host_memory must be one of {list(HOST_MEMORY_KINDS)}, got {kind!r}")
        if chunk_bytes <= 0 or chunk_bytes % mmap.PAGESIZE:
            raise ValueError(f"pieces to pin must be whole pages of {mmap.PAGESIZE} bytes, got {chunk_bytes}")
        self.kind = kind
        self.pinned_bytes = 0
        self.pageable_bytes = 0
        self._runtime = runtime
        self._chunk_bytes = chunk_bytes
        self._pageable_from_bytes = pageable_from_bytes
        self._fail_at = fail_at
        self._num_calls = 0
        self._node = runtime.numa_node()
        self._starts: list[int] = []  # of the registrations, in order; whole pages, none in two of them
        self._ends: list[int] = []
        self._registered: list[int] = []  # their addresses, as they came
        self._finalizer = weakref.finalize(self, _unregister, runtime, self._registered)
        self._finalizer.atexit = False  # the driver does it, and may be gone by then

    def allocate(self, num_bytes: int, name: str) -> torch.Tensor:
        """[num_bytes] uint8, zeroed, in a mapping of its own. Raises PinningError, with nothing left pinned of it."""
        tensor = self._map(num_bytes, name)
        if self.kind == "pageable" and num_bytes >= self._pageable_from_bytes:
            self.pageable_bytes += num_bytes
            logger.warning(
                "moe_lightning: %s (%s) is pageable, as host_memory asks: its copies go through a pinned staging "
                "buffer and hold up the launching thread",
                name,
                readable(num_bytes),
            )
        else:
            self.pin(tensor, name)
        return tensor

    def allocate_pinned(self, num_bytes: int, name: str) -> torch.Tensor:
        """The same, pinned whatever was asked for."""
        tensor = self._map(num_bytes, name)
        self.pin(tensor, name)
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a GPU may copy to or from it without holding up the host: ours, or pinned by its owner."""
        return bool(self._sizes_by_registration(tensor)) or self._runtime.is_pinned(tensor)

    def piece_sizes(self, tensor: torch.Tensor) -> list[int]:
        """Bytes of the pieces, in order, that a copy of it is to be made of: each lies in one registration. What is not
        pinned by us is one piece."""
        return self._sizes_by_registration(tensor) or [tensor.nbytes]

    def _sizes_by_registration(self, tensor: torch.Tensor) -> list[int]:
        """Empty: not all of it is pinned by us."""
        begin = tensor.data_ptr()
        end = begin + tensor.nbytes
        index = bisect.bisect_right(self._starts, begin) - 1
        if index < 0:
            return []
        sizes: list[int] = []
        while index < len(self._starts) and self._starts[index] <= begin < min(end, self._ends[index]):
            sizes.append(min(end, self._ends[index]) - begin)
            begin += sizes[-1]
            index += 1
        return sizes if begin == end else []

    def report(self) -> str:
        text = f"host memory  {readable(self.pinned_bytes)} pinned"
        if self.pageable_bytes:
            text += f", {readable(self.pageable_bytes)} pageable (copied through a staging buffer)"
        return text

    def close(self) -> None:
        """Unpins everything; the buffers stay readable as long as somebody holds them."""
        self._finalizer()
        self._starts, self._ends = [], []

    def _map(self, num_bytes: int, name: str) -> torch.Tensor:
        if num_bytes < 0:
            raise ValueError(f"{name}: cannot allocate {num_bytes} bytes")
        if num_bytes == 0:  # neither a mapping nor a registration can be empty
            return torch.empty(0, dtype=torch.uint8)
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A child process that shared the pages would make the parent's next write land in a copy, past the GPU's eyes.
        mapping.madvise(mmap.MADV_DONTFORK)
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:  # a kernel built without them
            logger.info("moe_lightning: %s: no huge pages: %s", name, error)
        tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        self._bind(tensor, name)
        return tensor

    def _bind(self, tensor: torch.Tensor, name: str) -> None:
        """To the GPU's memory node, before a page is touched: a copy across the sockets reaches half the speed."""
        if self._node is None:
            return
        try:
            interleave(tensor.data_ptr(), tensor.nbytes, [self._node])
        except OSError as error:
            logger.warning("moe_lightning: %s is not bound to the GPU's memory node %d: %s", name, self._node, error)

    def pin(self, tensor: torch.Tensor, name: str) -> None:
        """Contiguous host memory, until `close`. Raises PinningError, with nothing left pinned of it.

        Whole pages, since that is what the driver pins: memory of malloc's begins and ends in the midst of one, and
        a neighbour's registration may hold that page already.
        """
        if not tensor.nbytes:
            return
        pieces: list[int] = []
        ends: list[int] = []
        done = 0
        for begin, end in self._unpinned_pages(tensor):
            for address in range(begin, end, self._chunk_bytes):
                size = min(self._chunk_bytes, end - address)
                self._num_calls += 1
                fails = self._num_calls == self._fail_at
                code = CUDA_ERROR_OUT_OF_MEMORY if fails else self._runtime.register(address, size)
                if code != CUDA_SUCCESS:
                    _unregister(self._runtime, pieces)
                    raise PinningError(self._failure(name, tensor.nbytes, done, size, code))
                pieces.append(address)
                ends.append(address + size)
                done += size
        self._registered += pieces
        self.pinned_bytes += done
        self._starts = sorted([*self._starts, *pieces])
        self._ends = sorted([*self._ends, *ends])

    def _unpinned_pages(self, tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
        """[begin, end) addresses of the pages under the tensor, without those that are registered."""
        begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        end = -(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        for start, stop in zip(self._starts, self._ends, strict=True):
            if stop <= begin or end <= start:
                continue
            if begin < start:
                yield begin, start
            begin = stop
        if begin < end:
            yield begin, end

    def _failure(self, name: str, num_bytes: int, done: int, size: int, code: int) -> str:
        limit = memlock_bytes()
        memlock = "unlimited" if limit is None else f"{readable(limit)} (ulimit -l; in a container --ulimit memlock=-1)"
        wsl = "; under WSL, Windows lets about half of its memory be pinned" if is_wsl() else ""
        return (
            f"{name}: {readable(num_bytes)} of host memory cannot be pinned: CUDA error {code} "
            f"({self._runtime.error_text(code)}) for {readable(size)} after {readable(done)} of them, and "
            f"{readable(self.pinned_bytes)} of other buffers that are pinned. Limits: memlock {memlock}, "
            f"{readable(available_memory_bytes())} of memory available{wsl}. Raise the limit, keep more layers on the "
            'device (num_resident_layers), take a smaller KV cache (kv_cache_gib), or ask for host_memory: "pageable", '
            "which is slower"
        )


def is_wsl(root: Path = ROOT) -> bool:
    version = root / "proc/version"
    return version.exists() and "microsoft" in version.read_text().lower()


def _unregister(runtime: CudaRuntime, pieces: list[int]) -> None:
    while pieces:
        code = runtime.unregister(pieces.pop())
        if code != CUDA_SUCCESS:
            logger.warning("moe_lightning: unpinning failed: CUDA error %d (%s)", code, runtime.error_text(code))
