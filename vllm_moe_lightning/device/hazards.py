"""Finds conflicting operations that no event orders, at submission and whatever order they happen to run in.

A happens-before race detector with vector clocks. A stream is ordered with itself, with streams whose events
it waits for, and with what the host synchronised before it submitted; nothing else counts. The compute stream
is a stream like the others, although on the emulated device it is the launching thread, so that a wait which
only a GPU would miss is found here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllm_moe_lightning.errors import HazardError

STREAM_NAMES = ("compute", "d2h", "h2d", "cpu")
# At this many events, and at each doubling, those that every stream knows of already are dropped.
NUM_EVENTS_KEPT = 4096


@dataclass(frozen=True)
class Access:
    """One operation's touch of a buffer: the `tick`-th operation of `stream`."""

    stream: str
    tick: int
    label: str


@dataclass
class History:
    """The accesses of one buffer that a new one can still conflict with."""

    last_write: Access | None = None
    reads: dict[str, Access] = field(default_factory=dict)  # newest per stream since last_write


class StreamObserver(Protocol):
    """Told of every submission, in the host's order. An event is (stream, seq)."""

    def operation(self, stream: str, label: str, reads: Iterable[str], writes: Iterable[str]) -> None: ...

    def record_event(self, stream: str, seq: int) -> None: ...

    def wait_event(self, stream: str, event_stream: str, seq: int) -> None: ...

    def synchronize(self, streams: Iterable[str]) -> None: ...

    def forget(self, buffer: str) -> None: ...


class HazardChecker:
    """The observer that refuses what no event orders."""

    def __init__(self, streams: Sequence[str]) -> None:
        self._streams = tuple(streams)
        # _known[s][t]: how many operations of t come before whatever s is given next.
        self._known = {stream: dict.fromkeys(streams, 0) for stream in streams}
        self._known_to_host = dict.fromkeys(streams, 0)
        self._events: dict[tuple[str, int], dict[str, int]] = {}
        self._num_events_allowed = NUM_EVENTS_KEPT
        self._histories: dict[str, History] = {}

    def operation(self, stream: str, label: str, reads: Iterable[str], writes: Iterable[str]) -> None:
        """Submits an operation. Raises HazardError naming the buffer, both operations and both streams."""
        known = self._known[stream]
        _join(known, self._known_to_host)
        access = Access(stream, known[stream] + 1, label)
        written = frozenset(writes)
        for name in written:
            history = self._histories.setdefault(name, History())
            for earlier in history.reads.values():
                self._require_order(earlier, "reads", access, "writes", name)
            if history.last_write is not None:
                self._require_order(history.last_write, "writes", access, "writes", name)
        read = [name for name in reads if name not in written]
        for name in read:
            history = self._histories.setdefault(name, History())
            if history.last_write is not None:
                self._require_order(history.last_write, "writes", access, "reads", name)
        for name in written:
            self._histories[name] = History(last_write=access)
        for name in read:
            self._histories[name].reads[stream] = access
        known[stream] = access.tick

    def record_event(self, stream: str, seq: int) -> None:
        """The event (stream, seq) stands for everything submitted to the stream so far."""
        known = self._known[stream]
        _join(known, self._known_to_host)
        self._events.setdefault((stream, seq), dict(known))
        if len(self._events) > self._num_events_allowed:
            self._drop_known_events()

    def wait_event(self, stream: str, event_stream: str, seq: int) -> None:
        """What `stream` is given from now on comes after the event. Dropped events are known already."""
        event = self._events.get((event_stream, seq))
        if event is not None:
            _join(self._known[stream], event)

    def synchronize(self, streams: Iterable[str]) -> None:
        """The host waited for all that these streams were given: what is submitted later comes after it."""
        for stream in streams:
            _join(self._known_to_host, self._known[stream])

    def forget(self, buffer: str) -> None:
        """The buffer was released; its name may be used again for other memory."""
        self._histories.pop(buffer, None)

    def _require_order(self, earlier: Access, did: str, later: Access, does: str, buffer: str) -> None:
        if earlier.tick > self._known[later.stream][earlier.stream]:
            raise HazardError(
                f"buffer {buffer!r}: {later.label!r} on stream {later.stream!r} {does} it, and nothing orders"
                f" that after {earlier.label!r} on stream {earlier.stream!r}, which {did} it; let"
                f" {later.stream!r} wait for an event recorded on {earlier.stream!r} after {earlier.label!r}"
            )

    def _drop_known_events(self) -> None:
        common = {stream: min(known[stream] for known in self._known.values()) for stream in self._streams}
        self._events = {
            key: event
            for key, event in self._events.items()
            if any(event[stream] > common[stream] for stream in self._streams)
        }
        self._num_events_allowed = max(NUM_EVENTS_KEPT, 2 * len(self._events))


def _join(clock: dict[str, int], other: dict[str, int]) -> None:
    for stream, tick in other.items():
        if tick > clock[stream]:
            clock[stream] = tick
