"""The native streams through ctypes alone: order, waits, timings, failures, destruction."""

import ctypes
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from vllm_moe_lightning.kernels import native

ALL_TIMINGS = [native.TIMING_EAGER, native.TIMING_LAZY, native.TIMING_JITTER]
JITTER_MAX_S = 0.002
# For what would hang for ever if it were broken, and for a thread that must not run yet.
A_WHILE_S = 0.05


class Streams:
    """Streams of one test and a log to which their calls append."""

    def __init__(self) -> None:
        self.library = native.library()
        self.log: list[str] = []
        self.handles: list[int] = []
        self._kept: list[object] = []

    def make(self, name: str = "test", timing: int = native.TIMING_EAGER, **options: float) -> int:
        handle = self.library.mol_stream_create(
            name.encode(),
            options.get("bandwidth_bytes_per_s", 0.0),
            options.get("latency_s", 0.0),
            timing,
            int(options.get("seed", 0)),
            options.get("jitter_max_s", JITTER_MAX_S),
        )
        self.handles.append(handle)
        return handle

    def call(self, handle: int, function: Callable[[], int | None], tag: int = 0) -> int:
        wrapped = native.CallFunction(lambda _: function() or 0)
        self._kept.append(wrapped)
        return self.library.mol_stream_call(handle, wrapped, None, tag)

    def note(self, handle: int, word: str) -> int:
        return self.call(handle, lambda: self.log.append(word))

    def wait(self, handle: int, other: int, seq: int) -> int:
        return self.library.mol_stream_wait(handle, other, seq)

    def synchronize(self, handle: int, seq: int, stall_timeout_s: float = 0.0) -> int:
        return self.library.mol_stream_synchronize(handle, seq, stall_timeout_s)

    def records(self, handle: int) -> list[native.Record]:
        records = (native.Record * 64)()
        return list(records[: self.library.mol_stream_drain_records(handle, records, 64)])

    def copy(self, handle: int, dst: list[ctypes.Array], src: list[ctypes.Array], tag: int = 0) -> int:
        count = len(dst)
        return self.library.mol_stream_copy(
            handle,
            count,
            (ctypes.c_void_p * count)(*map(ctypes.addressof, dst)),
            (ctypes.c_void_p * count)(*map(ctypes.addressof, src)),
            (ctypes.c_int64 * count)(*map(ctypes.sizeof, dst)),
            tag,
        )

    def destroy(self, handle: int) -> None:
        self.handles.remove(handle)
        self.library.mol_stream_destroy(handle)


@pytest.fixture
def streams() -> Iterator[Streams]:
    made = Streams()
    yield made
    for handle in list(made.handles):
        made.destroy(handle)


@pytest.mark.parametrize("timing", ALL_TIMINGS)
def test_operations_of_a_stream_run_in_the_order_of_submission(streams: Streams, timing: int) -> None:
    stream = streams.make(timing=timing)
    seqs = [streams.note(stream, str(i)) for i in range(50)]
    assert seqs == list(range(1, 51))
    assert streams.synchronize(stream, seqs[-1]) == native.OK
    assert streams.log == [str(i) for i in range(50)]
    assert streams.library.mol_stream_completed(stream) == streams.library.mol_stream_submitted(stream) == 50


@pytest.mark.parametrize("timing", ALL_TIMINGS)
def test_a_wait_orders_two_streams_in_both_directions(streams: Streams, timing: int) -> None:
    first, second = streams.make("first", timing), streams.make("second", timing)
    for i in range(20):
        streams.call(first, lambda: time.sleep(0.0002))
        sent = streams.note(first, f"first {i}")
        streams.wait(second, first, sent)
        answered = streams.note(second, f"second {i}")
        streams.wait(first, second, answered)
    streams.synchronize(second, answered)
    assert streams.log == [f"{name} {i}" for i in range(20) for name in ("first", "second")]


def test_a_wait_may_name_what_is_submitted_later(streams: Streams) -> None:
    early, late = streams.make("early"), streams.make("late")
    streams.wait(early, late, 1)
    after = streams.note(early, "early")
    streams.note(late, "late")
    streams.synchronize(early, after)
    assert streams.log == ["late", "early"]


def test_waiting_for_the_own_past_is_nothing(streams: Streams) -> None:
    stream = streams.make()
    seq = streams.note(stream, "before")
    streams.wait(stream, stream, seq)
    streams.synchronize(stream, streams.note(stream, "after"))
    assert streams.log == ["before", "after"]


def test_lazy_operations_run_only_when_somebody_waits(streams: Streams) -> None:
    stream = streams.make(timing=native.TIMING_LAZY)
    first = streams.note(stream, "asked for")
    streams.note(stream, "not asked for")
    time.sleep(A_WHILE_S)
    assert streams.log == []
    streams.synchronize(stream, first)
    time.sleep(A_WHILE_S)
    assert streams.log == ["asked for"]


def test_demand_spreads_through_waits_and_no_further(streams: Streams) -> None:
    a, b, c = (streams.make(name, native.TIMING_LAZY) for name in "abc")
    streams.wait(b, a, streams.note(a, "a"))
    in_b = streams.note(b, "b")
    streams.note(a, "a not demanded")
    streams.wait(c, b, in_b)
    in_c = streams.note(c, "c")
    streams.wait(c, a, 2)
    time.sleep(A_WHILE_S)
    assert streams.log == []
    streams.synchronize(c, in_c)
    time.sleep(A_WHILE_S)
    assert streams.log == ["a", "b", "c"]


def test_a_lazy_copy_takes_what_its_source_holds_when_it_is_demanded(streams: Streams) -> None:
    stream = streams.make(timing=native.TIMING_LAZY)
    dst, src = ctypes.create_string_buffer(4), ctypes.create_string_buffer(b"old", 4)
    seq = streams.copy(stream, [dst], [src])
    src.value = b"new"
    streams.synchronize(stream, seq)
    assert dst.value == b"new"


def test_a_copy_gathers_and_scatters_all_its_segments_and_is_one_record(streams: Streams) -> None:
    stream = streams.make()
    streams.library.mol_stream_set_recording(stream, 8)
    src = [ctypes.create_string_buffer(bytes([i]) * i, i) for i in range(1, 6)]
    dst = [ctypes.create_string_buffer(i) for i in range(1, 6)]
    streams.synchronize(stream, streams.copy(stream, dst, src, tag=17))
    assert [d.raw for d in dst] == [s.raw for s in src]
    [record] = streams.records(stream)
    assert (record.tag, record.num_bytes) == (17, 15)
    totals = native.StreamTotals()
    streams.library.mol_stream_get_totals(stream, ctypes.byref(totals))
    assert (totals.num_copies, totals.num_calls, totals.num_bytes) == (1, 0, 15)
    assert totals.busy_ns == record.end_ns - record.start_ns


def test_a_fill_sets_bytes_and_counts_as_no_copy(streams: Streams) -> None:
    stream = streams.make()
    frame = ctypes.create_string_buffer(b"\0" * 10, 10)
    inner = ctypes.addressof(frame) + 1
    streams.synchronize(stream, streams.library.mol_stream_fill(stream, inner, 0xFF, 8))
    assert frame.raw == b"\0" + b"\xff" * 8 + b"\0"
    totals = native.StreamTotals()
    streams.library.mol_stream_get_totals(stream, ctypes.byref(totals))
    assert (totals.num_copies, totals.num_bytes) == (0, 0)


def test_a_call_that_waits_counts_for_nothing_but_its_failure(streams: Streams) -> None:
    stream = streams.make()
    streams.library.mol_stream_set_recording(stream, 8)
    slow = native.CallFunction(lambda _: time.sleep(0.01) or native.ERROR_INJECTED)
    seq = streams.library.mol_stream_wait_call(stream, slow, None, 3)
    assert streams.synchronize(stream, seq) == native.ERROR_INJECTED
    totals = native.StreamTotals()
    streams.library.mol_stream_get_totals(stream, ctypes.byref(totals))
    assert (totals.num_calls, totals.busy_ns) == (0, 0)
    assert streams.records(stream) == []


def test_the_first_failure_is_reported_once_and_the_stream_goes_on(streams: Streams) -> None:
    stream = streams.make()
    streams.call(stream, lambda: native.ERROR_INJECTED)
    streams.call(stream, lambda: native.ERROR_OUT_OF_MEMORY)
    seq = streams.note(stream, "after")
    assert streams.synchronize(stream, seq) == native.ERROR_INJECTED
    assert streams.synchronize(stream, seq) == native.OK
    assert streams.log == ["after"]


def test_paced_copies_take_at_least_the_time_of_the_model(streams: Streams) -> None:
    bandwidth_bytes_per_s, latency_s, num_copies = 100e6, 1e-3, 5
    stream = streams.make(bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=latency_s)
    streams.library.mol_stream_set_recording(stream, num_copies)
    src, dst = ctypes.create_string_buffer(100_000), ctypes.create_string_buffer(100_000)
    model_s = latency_s + 100_000 / bandwidth_bytes_per_s
    start_s = time.monotonic()
    for _ in range(num_copies):
        seq = streams.copy(stream, [dst], [src])
    streams.synchronize(stream, seq)
    assert time.monotonic() - start_s >= num_copies * model_s - 1e-6
    records = streams.records(stream)
    for record in records:
        assert record.end_ns - record.start_ns >= model_s * 1e9 - 1
    # On the link's line one copy begins where the one before it ended, so oversleeping costs no bandwidth.
    for before, after in itertools.pairwise(records):
        assert after.start_ns >= before.end_ns


def test_a_paced_copy_begins_after_what_it_waited_for(streams: Streams) -> None:
    calls, link = streams.make("calls"), streams.make("link", bandwidth_bytes_per_s=1e6)
    for stream in (calls, link):
        streams.library.mol_stream_set_recording(stream, 4)
    src, dst = ctypes.create_string_buffer(1000), ctypes.create_string_buffer(1000)
    streams.wait(link, calls, streams.call(calls, lambda: time.sleep(0.005)))
    streams.synchronize(link, streams.copy(link, [dst], [src]))
    assert streams.records(link)[0].start_ns >= streams.records(calls)[0].end_ns


def splitmix64(x: int) -> int:
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return x ^ (x >> 31)


def jitter_s(name: str, seed: int, seq: int, jitter_max_s: float) -> float:
    hashed = 0xCBF29CE484222325
    for letter in name.encode():
        hashed = (hashed ^ letter) * 0x100000001B3 % 2**64
    return jitter_max_s * (splitmix64(seed ^ hashed ^ splitmix64(seq)) >> 11) / 2**53


def test_jitter_is_the_delay_that_seed_and_name_give(streams: Streams) -> None:
    num_calls, jitter_max_s = 12, 0.01
    for name, seed in (("h2d", 1), ("h2d", 2), ("d2h", 1)):
        stream = streams.make(name, native.TIMING_JITTER, seed=seed, jitter_max_s=jitter_max_s)
        streams.library.mol_stream_set_recording(stream, num_calls)
        begin_ns = time.monotonic_ns()
        for i in range(num_calls):
            seq = streams.call(stream, lambda: None, tag=i)
        streams.synchronize(stream, seq)
        expected_s = [jitter_s(name, seed, i + 1, jitter_max_s) for i in range(num_calls)]
        ends_ns = [begin_ns]
        for record, delay_s in zip(streams.records(stream), expected_s, strict=True):
            assert record.start_ns - ends_ns[-1] >= delay_s * 1e9 - 1000
            ends_ns.append(record.end_ns)
        assert (ends_ns[-1] - begin_ns) * 1e-9 < sum(expected_s) + 0.5


def test_delays_differ_between_seeds_and_between_streams() -> None:
    runs = [[jitter_s(name, seed, seq, 1.0) for seq in range(1, 100)] for name in ("d2h", "h2d") for seed in range(20)]
    assert len({tuple(run) for run in runs}) == 40
    assert all(0.3 < sum(run) / len(run) < 0.7 for run in runs)


def test_the_ring_keeps_the_newest_records_and_drains_the_oldest_first(streams: Streams) -> None:
    stream = streams.make()
    streams.synchronize(stream, streams.call(stream, lambda: None, tag=99))
    streams.library.mol_stream_set_recording(stream, 4)
    for tag in range(10):
        seq = streams.call(stream, lambda: None, tag=tag)
    streams.synchronize(stream, seq)
    two = (native.Record * 2)()
    assert streams.library.mol_stream_drain_records(stream, two, 2) == 2
    assert [record.tag for record in two] == [6, 7]
    assert [record.tag for record in streams.records(stream)] == [8, 9]
    assert streams.records(stream) == []


def test_destroy_drops_waits_that_can_never_end(streams: Streams) -> None:
    never, ring_a, ring_b, behind = (streams.make(name) for name in ("never", "ring_a", "ring_b", "behind"))
    streams.wait(never, ring_a, 1000)
    streams.wait(ring_a, ring_b, 2)
    streams.wait(ring_b, ring_a, 2)
    streams.wait(behind, ring_b, 2)
    for stream in (never, ring_a, ring_b, behind):
        streams.note(stream, "must not run")
    for stream in (behind, never, ring_a, ring_b):
        streams.destroy(stream)
    assert streams.log == []


@pytest.mark.parametrize("timing", ALL_TIMINGS)
def test_destroy_runs_out_what_can_still_run(streams: Streams, timing: int) -> None:
    first, second = streams.make("first", timing), streams.make("second", timing)
    streams.call(first, lambda: time.sleep(0.005))
    streams.wait(second, first, streams.note(first, "first"))
    streams.note(second, "second")
    streams.destroy(second)
    streams.destroy(first)
    assert streams.log == ["first", "second"]


def test_a_stream_that_waits_for_a_destroyed_one_can_be_destroyed(streams: Streams) -> None:
    gone, waiting = streams.make("gone"), streams.make("waiting")
    streams.wait(waiting, gone, 5)
    streams.note(waiting, "must not run")
    streams.destroy(gone)
    streams.destroy(waiting)
    assert streams.log == []


def test_the_thread_runs_on_the_cpus_it_was_given(streams: Streams) -> None:
    stream = streams.make()
    cpu = max(os.sched_getaffinity(0))
    seen: list[set[int]] = []
    assert streams.library.mol_stream_set_affinity(stream, (ctypes.c_int32 * 1)(cpu), 1) == native.OK
    streams.synchronize(stream, streams.call(stream, lambda: seen.append(os.sched_getaffinity(0))))
    assert seen == [{cpu}]
    for cpus in ([], [-1], [1 << 20]):
        code = streams.library.mol_stream_set_affinity(stream, (ctypes.c_int32 * len(cpus))(*cpus), len(cpus))
        assert code == native.ERROR_BAD_ARGUMENT


def status_of(streams: Streams, handle: int) -> native.StreamStatus:
    status = native.StreamStatus()
    streams.library.mol_stream_get_status(handle, ctypes.byref(status))
    return status


def test_a_wait_that_sees_no_progress_returns_and_says_what_runs(streams: Streams) -> None:
    """And the stream goes on once what held it comes back."""
    held, behind, release = streams.make("held"), streams.make("behind"), threading.Event()
    streams.wait(behind, held, streams.call(held, lambda: release.wait(60) and None, tag=7))
    last = streams.note(behind, "done")
    assert streams.synchronize(behind, last, A_WHILE_S) == native.ERROR_STALLED
    status = status_of(streams, held)
    assert (status.state, status.tag, status.submitted, status.completed) == (native.STREAM_RUNNING, 7, 1, 0)
    status = status_of(streams, behind)
    assert (status.state, status.awaited, status.awaited_seq) == (native.STREAM_WAITING, held, 1)
    release.set()
    assert streams.synchronize(behind, last, 60.0) == native.OK
    assert status_of(streams, held).state == native.STREAM_IDLE


def test_a_wait_goes_on_for_as_long_as_some_stream_does(streams: Streams) -> None:
    stream = streams.make()
    for _ in range(30):
        seq = streams.call(stream, lambda: time.sleep(0.01))
    assert streams.synchronize(stream, seq, 0.2) == native.OK


def test_who_waits_for_a_thread_that_ends_learns_of_it(streams: Streams) -> None:
    """Directly, and through a stream that waits for the one that ended."""
    ends, behind = streams.make("ends"), streams.make("behind")
    seq = streams.library.mol_stream_call(ends, streams.library.mol_fault_end_thread, None, 5)
    streams.wait(behind, ends, seq)
    last = streams.note(behind, "must not run")
    assert streams.synchronize(behind, last) == native.ERROR_ENDED
    assert streams.synchronize(ends, seq) == native.ERROR_ENDED
    status = status_of(streams, ends)
    assert (status.state, status.tag) == (native.STREAM_ENDED, 5)
    assert streams.log == []
