# SPDX-License-Identifier: Apache-2.0
"""Every schedule on the CUDA device, with a double in CUDA's place: the right result, and a proof from the log.

The proof is over streams and events alone (tests/helpers/stream_log.py): with each wait removed in turn, it must name
the hazard. That no GPU ran these calls is what is left to benchmarks/gpu_check.py.
"""

import logging
import mmap
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import pytest
import torch

from benchmarks.torch_decoder import DecoderConfig
from tests.helpers.decoder import all_close, all_equal, make_engine, plain_dummy, plain_run, run, run_dummy, steps_of
from tests.helpers.recording_cuda import Copied, RecordingCuda
from tests.helpers.stream_log import StreamLog
from tests.helpers.touched_memory import TouchedMemory
from tests.unit.pipeline.test_races import CONFIGS, COUNT, NAMES, ORDER_ONLY, WAITS
from vllm_moe_lightning.device import EmulatedDevice
from vllm_moe_lightning.errors import DeviceStalledError, DeviceTaskError, HazardError

SMALL = DecoderConfig(num_layers=3)
PAGE, MIB = mmap.PAGESIZE, 1 << 20
ACROSS = DecoderConfig(num_layers=3, head_dim=24)  # a KV block of one page and a half


def first_hazard(log: StreamLog) -> str:
    """What the proof trips over; empty if it holds."""
    try:
        log.check()
    except HazardError as error:
        return str(error)
    return ""


def run_on_double(
    cuda: RecordingCuda, config: DecoderConfig, name: str, count: int = COUNT, **options: Any
) -> list[torch.Tensor]:
    """Dummy sweeps before and after the steps, whose results are returned."""
    device = cuda.device(poison=True)
    with make_engine(config, device=device, schedule=name, num_micro_batches=count, **options) as engine:
        dummies = [run_dummy(engine) for _ in range(2)]
        steps = run(engine)
        dummies += [run_dummy(engine) for _ in range(2)]
        assert cuda.pinned, "nothing was pinned"
    assert not cuda.pinned, "something is still pinned after close"
    assert all(torch.equal(dummy, plain_dummy(config)) for dummy in dummies) or options.get("debug")
    return steps


@pytest.mark.parametrize("late", [False, True], ids=["at_once", "late"])
@pytest.mark.parametrize("count", [1, 3, 7])
@pytest.mark.parametrize("name", NAMES)
def test_the_result_is_that_of_the_plain_forward_and_the_log_proves_it(name: str, count: int, late: bool) -> None:
    cuda = RecordingCuda(late=late)
    assert all_equal(run_on_double(cuda, SMALL, name, count), plain_run(SMALL, count))
    cuda.log.check()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (DecoderConfig(num_layers=1), {}),
        (DecoderConfig(num_layers=4, dense_layers=(0, 2)), {}),
        (DecoderConfig(num_layers=5), {"num_resident_layers": 2}),
        (DecoderConfig(num_layers=3), {"num_resident_layers": 3}),
        (DecoderConfig(num_layers=3), {"lookahead": 1}),
        (DecoderConfig(num_layers=3), {"lookahead": 5}),
        (DecoderConfig(num_layers=3), {"page_mib": 100}),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else None,
)
def test_so_it_is_for_other_shapes(name: str, config: DecoderConfig, options: dict[str, Any]) -> None:
    cuda = RecordingCuda(late=True)
    assert all_equal(run_on_double(cuda, config, name, **options), plain_run(config, COUNT))
    cuda.log.check()


@pytest.mark.parametrize("late", [False, True], ids=["at_once", "late"])
@pytest.mark.parametrize("name", NAMES)
def test_weights_and_kv_that_lie_across_registrations_come_over_as_if_in_one(name: str, late: bool) -> None:
    """The double refuses a copy that crosses an edge."""
    cut, results = run_across_registrations(name, late=late)
    assert all_equal(results, plain_run(ACROSS, COUNT))
    assert cut >= ({"weight_page", "kv_load"} if name == "s4" else {"weight_page"})


@pytest.mark.parametrize("late", [False, True], ids=["at_once", "late"])
@pytest.mark.parametrize(
    ("options", "label"),
    [({"prefill_context": "link"}, "kv_load"), ({"experts": "fetched", "expert_slots": 8}, "experts_fetch")],
    ids=["context", "fetched"],
)
def test_so_do_context_and_single_experts(options: dict[str, Any], label: str, late: bool) -> None:
    cut, results = run_across_registrations("cgopipe", late=late, **options)
    assert all_close(results, plain_run(ACROSS, reference=True))
    assert label in cut


def run_across_registrations(name: str, *, late: bool, **options: Any) -> tuple[set[str], list[torch.Tensor]]:
    """(copies from the host, by their labels, that took several calls; the steps' results)"""
    cuda = RecordingCuda(late=late)
    device = cuda.device(poison=True, pin_chunk_bytes=PAGE)
    options = {"num_micro_batches": COUNT, "page_mib": 1.5 * PAGE / MIB, **options}
    with make_engine(ACROSS, device=device, schedule=name, **options) as engine:
        results = run(engine)
    cuda.log.check()
    from_host = [copied for copied in cuda.copied if copied.stream == "h2d" and copied.source is not None]
    assert all(low // PAGE == (high - 1) // PAGE for low, high in (copied.source or (0, 1) for copied in from_host))
    return {copied.label.partition("(")[0] for copied in joined(from_host) if len(copied.calls) > 1}, results


@dataclass
class Joined:
    label: str
    calls: list[Copied]


def joined(copied: Iterable[Copied]) -> list[Joined]:
    """Of one operation, calls whose host memory and device memory go on where the last call's end."""
    found: list[Joined] = []
    for each in copied:
        last = found[-1].calls[-1] if found else None
        goes_on = last is not None and each.source is not None and last.source is not None
        if goes_on and (last.label, last.source[1], last.target[1]) == (each.label, each.source[0], each.target[0]):
            found[-1].calls.append(each)
        else:
            found.append(Joined(each.label, [each]))
    return found


@pytest.mark.parametrize(("name", "wait"), [entry for entry in WAITS if entry not in ORDER_ONLY])
def test_with_a_wait_removed_the_log_names_the_hazard(name: str, wait: str) -> None:
    hazard = ""
    for config in CONFIGS:
        cuda = RecordingCuda()
        run_on_double(cuda, config, name, debug={"remove_wait": wait})
        if hazard := first_hazard(cuda.log):
            break
    assert re.search(r"buffer '.+': '.+' on stream '.+' .* nothing orders that after '.+' on stream '.+'", hazard)


@pytest.mark.parametrize("name", NAMES)
def test_the_emulated_device_s_log_passes_the_same_proof(name: str) -> None:
    log = StreamLog()
    with make_engine(SMALL, device=EmulatedDevice(observer=log), schedule=name, num_micro_batches=COUNT) as engine:
        assert all_equal(run(engine), plain_run(SMALL, COUNT))
    log.check()
    log = StreamLog()
    debug = {"remove_wait": "post_attention<-weight_page"}
    options: dict[str, Any] = {"schedule": name, "num_micro_batches": COUNT, "debug": debug}
    with make_engine(SMALL, device=EmulatedDevice(observer=log), **options) as engine:
        run_dummy(engine)  # has no hidden states, whose wait would cover for this one
    with pytest.raises(HazardError, match="slot"):
        log.check()


@pytest.mark.parametrize("name", NAMES)
def test_in_a_sweep_the_host_waits_for_attention_alone(name: str) -> None:
    cuda = RecordingCuda(late=True)
    with make_engine(SMALL, device=cuda.device(), schedule=name, num_micro_batches=COUNT) as engine:
        before, begin = cuda.host_waits, len(cuda.log.calls)
        run(engine)
        assert cuda.host_waits == before
        waits = {call for kind, call in cuda.log.calls[begin:] if kind == "wait_event"}
        held_up_for = {(stream, on) for stream, on, _ in waits if on == "cpu"}
        # S4 brings up context that the CPU has appended, and lands in staging that the CPU has read.
        assert held_up_for == ({("h2d", "cpu"), ("d2h", "cpu")} if name == "s4" else {("h2d", "cpu")})
        kinds = engine.executor.counters.wait_s
        expected = {"kv_load<-sweep_start", "qkv_offload<-kv_append", "qkv_offload<-sweep_start"}
        assert set(kinds) <= (expected if name == "s4" else {"hidden_load<-attention"})
        assert engine.device.h2d.wait_s > 0


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_go_up_behind_no_more_than_one_page(name: str, count: int) -> None:
    """With pages of the default size, a layer over the number of micro-batches. The baselines bring up a layer in one
    block, which is what makes them baselines."""
    layer_bytes = next(iter(make_engine(SMALL).store.layers.values())).layout.num_bytes
    cuda = RecordingCuda()
    options: dict[str, Any] = {"num_micro_batches": count, "page_mib": -(-layer_bytes // count) / 2**20}
    with make_engine(SMALL, device=cuda.device(), schedule=name, **options) as engine:
        pages = engine.store.num_pages(0)
        run(engine)
    labels = [label.partition("(")[0] for label, _, _ in cuda.log.operations("h2d")]
    runs = [(label, len(list(group))) for label, group in groupby(labels)]
    first = labels.index("hidden_load") if "hidden_load" in labels else 0
    longest = max((length for label, length in runs[first and 1 :] if label == "weight_page"), default=0)
    if name == "cgopipe":
        assert longest == 1
    elif name == "s4":
        assert "hidden_load" not in labels
    else:
        assert longest == pages


@pytest.mark.parametrize("name", NAMES)
def test_query_key_and_value_go_down_in_one_copy(name: str) -> None:
    cuda = RecordingCuda()
    with make_engine(SMALL, device=cuda.device(), schedule=name, num_micro_batches=COUNT) as engine:
        run(engine)
    down = [copied for copied in cuda.copied if copied.stream == "d2h"]
    assert len(down) == SMALL.num_layers * COUNT * len(list(steps_of()))
    assert all(len(copied.reads) == len(copied.writes) == 1 for copied in down)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_copy_touches_is_what_it_declares(name: str) -> None:
    """Within a step, buffers of different names lie at different addresses: the proof by names is one by memory."""
    cuda = RecordingCuda()
    with make_engine(SMALL, device=cuda.device(), schedule=name, num_micro_batches=COUNT) as engine:
        for step in steps_of(config=SMALL):
            cuda.copied.clear()
            engine.step(step)
            places = ranges_by_name(cuda.copied)
            spans = sorted((low, high, name) for name, ranges in places.items() for low, high in ranges)
            for (_, end, one), (begin, _, other) in pairwise(spans):
                assert end <= begin or one == other, f"{one} and {other} overlap"


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_launching_thread_touches_frames_within_tasks_that_declare_them_and_host_buffers_never(
    name: str, poison: bool
) -> None:
    cuda = RecordingCuda()
    device = cuda.device(poison=poison)
    with make_engine(SMALL, device=device, schedule=name, num_micro_batches=COUNT) as engine:
        run_dummy(engine)
        run(engine)  # makes S4's frames
        frames = {name: (t.data_ptr(), t.data_ptr() + t.nbytes) for name, t in device._frames.items() if t.nbytes}
        pinned = {f"pinned memory at {begin:#x}": (begin, begin + size) for begin, size in cuda.pinned.items()}
        with TouchedMemory(cuda, {**frames, **pinned}) as memory:
            run_dummy(engine)
            run(engine)
    declared: dict[str, set[str]] = {}
    for label, reads, writes in cuda.log.operations("compute"):
        declared.setdefault(label, set()).update(reads, writes)
    assert {touched.place for touched in memory.touched} >= {"slot[0]", "slot[1]", "qkv staging (device)"}
    for touched in memory.touched:
        assert touched.place in frames, touched
        assert touched.span is not None, touched
        names = {"qkv_device" if "qkv_device" in each else each for each in declared[touched.span]}
        assert {"qkv staging (device)": "qkv_device"}.get(touched.place, touched.place) in names, touched


@pytest.mark.parametrize("name", [name for name in NAMES if name != "s4"])
def test_memory_that_the_allocator_hands_out_again_is_ordered_by_its_addresses(name: str) -> None:
    """The attention outputs are torch's own, freed at the launching thread's pace: judged by memory, not by name."""
    cuda = RecordingCuda()
    with make_engine(SMALL, device=cuda.device(), schedule=name, num_micro_batches=COUNT) as engine:
        run(engine)
    loaded = [copied for copied in cuda.copied if copied.label.startswith("hidden_load")]
    by_memory(cuda.log, loaded).check()
    without = StreamLog()
    without.calls = [call for call in by_memory(cuda.log, loaded).calls if call[0] != "wait_event"]
    assert "addresses" in first_hazard(without)


def by_memory(log: StreamLog, loaded: list[Copied]) -> StreamLog:
    """The log of the attention outputs alone, each named by the pieces of memory that it was loaded into."""
    edges = sorted({edge for copied in loaded for edge in copied.target})
    places: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)  # by layer and micro-batch, sweep by sweep
    for copied in loaded:
        places[copied.label.partition("(")[2]].append(copied.target)
    seen: Counter[str] = Counter()
    renamed = StreamLog()
    for kind, call in log.calls:
        if kind == "operation":
            stream, label, reads, writes = call
            key = label.partition("(")[2]
            touches = [any(name.startswith("attention_output") for name in names) for names in (reads, writes)]
            low, high = places[key][seen[label]] if any(touches) else (0, 0)
            seen[label] += any(touches)
            pieces = tuple(f"addresses from {edge}" for edge in edges if low <= edge < high)
            call = (stream, label, pieces if touches[0] else (), pieces if touches[1] else ())
        renamed.calls.append((kind, call))
    return renamed


def ranges_by_name(copied: list[Copied]) -> dict[str, set[tuple[int, int]]]:
    """Without what torch allocates and frees. The parity of S4's caches tells sweeps apart, not memory."""
    places: dict[str, set[tuple[int, int]]] = {}
    for each in copied:
        [target] = each.writes
        if not target.startswith("attention_output"):
            places.setdefault(target.partition("@")[0], set()).add(each.target)
        if each.source is not None:
            [source] = each.reads
            places.setdefault(source.partition("@")[0], set()).add(each.source)
    return places


@pytest.mark.parametrize("late", [False, True])
def test_pageable_memory_when_asked_for_gives_the_same_result_and_says_so(
    late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = RecordingCuda(late=late)
    device = cuda.device(host_memory="pageable", pageable_from_bytes=1)
    allocate_host = device.allocate_host

    def allocate_known_host(num_bytes: int, name: str) -> Any:
        buffer = allocate_host(num_bytes, name)
        cuda.treat_as_host(buffer.tensor)
        return buffer

    device.allocate_host = allocate_known_host  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING), make_engine(device=device, num_micro_batches=3) as engine:
        assert all_equal(run(engine), plain_run(num_micro_batches=3))
        assert device.h2d.wait_s > 0
        report = device.memory_report()
    assert "pageable (copied through a staging buffer)" in report
    assert "64.00 MiB pinned" in report  # the staging itself
    assert "host pages of layers.0.experts" in caplog.text
    assert "is pageable, as host_memory asks" in caplog.text


def test_after_a_failed_attention_task_the_step_can_be_taken_again() -> None:
    cuda = RecordingCuda(late=True)
    debug = {"fail_attention_at": 8, "attention_fault": "error"}
    with make_engine(SMALL, device=cuda.device(poison=True), num_micro_batches=COUNT, debug=debug) as engine:
        got = []
        for step in steps_of(config=SMALL):
            try:
                got.append(engine.step(step))
            except DeviceTaskError:
                got.append(engine.step(step))
        assert engine.executor.counters.aborted_sweeps == 1
        assert all_equal(got, plain_run(SMALL, COUNT))
    cuda.log.check()


def test_an_attention_task_that_never_returns_ends_the_engine_with_its_name() -> None:
    debug = {"fail_attention_at": 7, "attention_fault": "hang"}
    device = RecordingCuda().device(stall_timeout_s=0.5)
    with make_engine(SMALL, device=device, num_micro_batches=COUNT, debug=debug) as engine:
        with pytest.raises(DeviceStalledError, match=r"cpu .* runs attention\(2,0\)"):
            run(engine)
        assert engine.device.stalled
