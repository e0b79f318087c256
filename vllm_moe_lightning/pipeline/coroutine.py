"""One micro-batch's forward pass as a coroutine that yields at a decoder layer's entry and at attention.

Greenlets: one OS thread, so the order of launches is that of the schedule and nothing else. A greenlet cannot switch
under a `torch.ops` frame, hence eager mode with direct attention calls (integration/attention.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import greenlet

Result = TypeVar("Result")


class LayerEntry:
    """Yielded at the entry of a decoder layer."""


LAYER_ENTRY = LayerEntry()


class MicroBatchCoroutine(Generic[Result]):
    """Runs `body` until it yields; `resume` goes on. An exception in the body comes out of `resume`."""

    def __init__(self, index: int, body: Callable[[], Result]) -> None:
        self.index = index
        self.result: Result | None = None
        self.finished = False
        self._body = body
        self._greenlet = greenlet.greenlet(self._run)

    def _run(self) -> None:
        self.result = self._body()
        self.finished = True

    def resume(self) -> object:
        """Run to the next yield. Returns what was yielded, or None when the body has finished."""
        assert not self.finished, f"micro-batch {self.index} has finished"
        return self._greenlet.switch()

    def unwind(self) -> None:
        """End a body that will not be resumed, running its `finally` blocks."""
        if not self._greenlet.dead:
            self._greenlet.throw(greenlet.GreenletExit)


def yield_to_executor(value: object) -> None:
    """Called inside a body: hand `value` to whoever resumed it, and wait to be resumed."""
    parent = greenlet.getcurrent().parent
    assert parent is not None, "yield outside of a micro-batch"
    parent.switch(value)
