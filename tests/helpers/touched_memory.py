# SPDX-License-Identifier: Apache-2.0
"""Which memory torch's operations really read and write, beside what the tasks around them declare.

On the recording double, so that a name which a task forgot is found, and so is a host buffer that the launching thread
touches by itself: on a GPU it would run far ahead of the copies that fill or empty it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.recording_cuda import RecordingCuda

Range = tuple[int, int]


@dataclass(frozen=True)
class Touched:
    span: str | None  # the compute task that it happened in
    place: str
    operation: str


class TouchedMemory(TorchDispatchMode):
    """Notes each operation that reads or writes one of `places` (name -> addresses), views left out. The double's own
    copies are not the launching thread's, and do not count."""

    def __init__(self, cuda: RecordingCuda, places: dict[str, Range]) -> None:
        super().__init__()
        self.touched: list[Touched] = []
        self._cuda, self._places = cuda, places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._cuda.is_at_work and not _is_view(func):
            span = self._cuda.open_ranges[-1] if self._cuda.open_ranges else None
            for tensor in (leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)):
                self.touched += [Touched(span, name, str(func)) for name in self._names(tensor)]
        return result

    def _names(self, tensor: torch.Tensor) -> Iterator[str]:
        begin = tensor.data_ptr()
        end = begin + tensor.nbytes
        return (name for name, (low, high) in self._places.items() if begin < high and low < end)


def _is_view(func: Any) -> bool:
    returned = func._schema.returns
    return bool(returned) and all(value.alias_info is not None and not value.alias_info.is_write for value in returned)
