# SPDX-License-Identifier: Apache-2.0
"""The CUDA device behind the Device interface, on a double of CUDA."""

import gc
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.helpers.recording_cuda import DoubleStream, RecordingCuda
from vllm_moe_lightning.device import CudaDevice
from vllm_moe_lightning.errors import (
    DeviceMemoryError,
    DeviceStalledError,
    HazardError,
    MoeLightningError,
)

KIB = 1024
MakeDevice = Callable[..., CudaDevice]


@pytest.fixture
def cuda() -> RecordingCuda:
    return RecordingCuda(late=True)


@pytest.fixture
def make_device(cuda: RecordingCuda) -> Iterator[MakeDevice]:
    devices: list[CudaDevice] = []

    def make(**options: object) -> CudaDevice:
        devices.append(CudaDevice(runtime=cuda, **options))  # type: ignore[arg-type]
        return devices[-1]

    yield make
    cuda.hang = False
    for device in devices:
        device.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_what_to_do() -> None:
    with pytest.raises(MoeLightningError, match=r"sees no GPU.*'emulated' runs anywhere"):
        CudaDevice()


def test_a_page_arrives_once_compute_has_waited_for_it(make_device: MakeDevice) -> None:
    device = make_device(poison=True, check_hazards=True)
    host, frame = device.allocate_host(4 * KIB, "host"), device.allocate(4 * KIB, "frame")
    host.tensor.copy_(torch.arange(4 * KIB) % 251)
    device.h2d.wait_event(device.compute.record_event())
    device.h2d.copy([frame.tensor], [host.tensor], "page", reads=["host"], writes=["frame"])
    assert frame.tensor.view(torch.float32).isnan().all(), "the double is not late"
    device.compute.wait_event(device.h2d.record_event())
    with device.compute.span("post", reads=["frame"], writes=[]):
        assert torch.equal(frame.tensor, host.tensor)


def test_a_forgotten_wait_is_refused_under_check_hazards(make_device: MakeDevice) -> None:
    device = make_device(check_hazards=True)
    host, frame = device.allocate_host(KIB, "host"), device.allocate(KIB, "frame")
    device.h2d.copy([frame.tensor], [host.tensor], "page", reads=["host"], writes=["frame"])
    with (
        pytest.raises(HazardError, match=r"frame.*post.*page"),
        device.compute.span("post", reads=["frame"], writes=[]),
    ):
        pass
    device.synchronize()
    with device.compute.span("post", reads=["frame"], writes=[]):
        pass


def test_a_fill_of_host_memory_is_a_copy_from_the_gpu(make_device: MakeDevice) -> None:
    device = make_device()
    host = device.allocate_host(3 << 20, "host")
    device.d2h.fill(host.tensor[KIB:], 0xFF, writes=["host"])
    device.d2h.synchronize()
    assert not host.tensor[:KIB].any()
    assert (host.tensor[KIB:] == 0xFF).all()
    assert device.totals()["d2h"].num_operations == 0


def test_memory_is_counted_against_what_is_free_or_what_was_given() -> None:
    cuda = RecordingCuda(gpu_bytes=10 * KIB)
    device = cuda.device()
    assert device.memory_budget_bytes == 10 * KIB
    device.allocate(4 * KIB, "slot")
    with pytest.raises(DeviceMemoryError, match=r"8\.00 KiB do not fit"):
        device.allocate(8 * KIB, "other")
    assert device.memory_used_bytes == 4 * KIB
    device.close()
    device = RecordingCuda(gpu_bytes=2 * KIB).device(memory_budget_bytes=10 * KIB)
    with pytest.raises(DeviceMemoryError, match="no 4096 bytes free"):
        device.allocate(4 * KIB, "slot")
    assert device.memory_used_bytes == 0
    device.close()


def test_operands_stay_alive_until_the_copy_has_run(make_device: MakeDevice) -> None:
    device = make_device()
    host = device.allocate_host(KIB, "host").tensor
    source = torch.full((KIB,), 9, dtype=torch.uint8)
    alive = weakref.ref(source)
    device.d2h.copy([host], [source], "qkv", reads=["source"], writes=["host"])
    del source
    gc.collect()
    assert alive() is not None
    device.d2h.synchronize()
    assert (host == 9).all()
    device.totals()
    gc.collect()
    assert alive() is None


def test_records_carry_streams_labels_and_bytes(make_device: MakeDevice) -> None:
    device = make_device()
    host, frame = device.allocate_host(KIB, "host"), device.allocate(KIB, "frame")
    device.set_recording(16)
    with device.compute.span("pre(0,0)", reads=[], writes=["frame"]):
        pass
    device.d2h.wait_event(device.compute.record_event())
    device.d2h.copy([host.tensor], [frame.tensor], "qkv(0,0)", reads=["frame"], writes=["host"])
    device.cpu.wait_event(device.d2h.record_event())
    device.cpu.fill(host.tensor, 3, writes=["host"])
    device.h2d.wait_event(device.cpu.record_event())
    device.h2d.copy([frame.tensor], [host.tensor], "hidden(0,0)", reads=["host"], writes=["frame"])
    device.synchronize()
    assert (frame.tensor == 3).all()
    records = device.drain_records()
    assert [(record.stream, record.label, record.num_bytes) for record in records] == [
        ("compute", "pre(0,0)", 0),
        ("d2h", "qkv(0,0)", KIB),
        ("cpu", "fill", 0),
        ("h2d", "hidden(0,0)", KIB),
    ]
    assert device.drain_records() == []
    totals = device.totals()
    assert (totals["h2d"].num_bytes, totals["h2d"].num_operations, totals["compute"].num_operations) == (KIB, 1, 1)


def test_operations_are_named_ranges_for_a_profiler_unless_switched_off(
    make_device: MakeDevice, cuda: RecordingCuda
) -> None:
    for annotate in (True, False):
        device = make_device(annotate=annotate)
        with device.compute.span("pre(0,0)", reads=[], writes=[]):
            pass
    assert cuda.ranges == ["pre(0,0)"]


def test_a_copy_that_fails_leaves_no_range_open_and_its_memory_held(
    make_device: MakeDevice, cuda: RecordingCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = make_device()
    host, frame = device.allocate_host(KIB, "host").tensor, device.allocate(KIB, "frame").tensor
    source = torch.full((KIB,), 9, dtype=torch.uint8)
    copy, calls = cuda.copy, []

    def second_fails(stream: DoubleStream, dst: torch.Tensor, src: torch.Tensor) -> None:
        calls.append(stream)
        if len(calls) > 1:
            raise RuntimeError("CUDA error: invalid argument")
        copy(stream, dst, src)

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: invalid argument")

    monkeypatch.setattr(cuda, "copy", second_fails)
    monkeypatch.setattr(cuda, "fill", fail)
    alive = weakref.ref(source)
    with pytest.raises(RuntimeError, match="invalid argument"):
        device.h2d.fill(frame, 9, writes=["frame"])
    with pytest.raises(RuntimeError, match="invalid argument"):
        device.d2h.copy([host[:512], host[512:]], source.split(512), "qkv", reads=["source"], writes=["host"])
    assert cuda.ranges == ["fill", "qkv"]
    assert not cuda.open_ranges
    del source
    gc.collect()
    assert alive() is not None, "the first half of the copy still reads it"
    device.d2h.synchronize()
    assert (host[:512] == 9).all()
    assert device.totals()["d2h"].num_bytes == 512


def test_a_wait_of_the_native_thread_for_the_gpu_is_not_busy_time(make_device: MakeDevice) -> None:
    device = make_device()
    before = device.totals()["cpu"]
    device.cpu.set_recording(8)
    device.cpu.wait_event(device.compute.record_event())
    device.synchronize()
    assert device.totals()["cpu"] == before
    assert device.drain_records() == []


def test_a_model_that_runs_on_another_stream_is_refused(make_device: MakeDevice, cuda: RecordingCuda) -> None:
    device = make_device(compute=cuda.new_stream("other"))
    with (
        pytest.raises(MoeLightningError, match=r"post.*nothing would order the model's kernels"),
        device.compute.span("post", reads=[], writes=[]),
    ):
        pass


def test_without_a_stream_of_its_own_compute_follows_torchs_and_orders_the_two(
    make_device: MakeDevice, cuda: RecordingCuda
) -> None:
    device = make_device()
    with device.compute.span("pre", reads=[], writes=[]):
        pass
    before = len(cuda.log.calls)
    cuda.current = cuda.new_stream("compute")
    with device.compute.span("post", reads=[], writes=[]):
        pass
    assert [name for name, _ in cuda.log.calls[before : before + 2]] == ["record_event", "wait_event"]
    assert device.compute.handle is cuda.current


def test_a_gpu_that_hangs_ends_the_wait_with_what_it_is_at(make_device: MakeDevice, cuda: RecordingCuda) -> None:
    device = make_device(stall_timeout_s=0.1)
    host, frame = device.allocate_host(KIB, "host"), device.allocate(KIB, "frame")
    device.h2d.copy([frame.tensor], [host.tensor], "weight_page(0,1)", reads=["host"], writes=["frame"])
    cuda.hang = True
    with pytest.raises(DeviceStalledError, match=r"'h2d', which is at weight_page\(0,1\).*stall_timeout_s"):
        device.h2d.synchronize()
    assert device.stalled
    device.close()
    assert cuda.pinned, "memory that a copy may still touch was given back"


def test_bad_copies_are_refused_before_they_are_submitted(make_device: MakeDevice) -> None:
    device = make_device()
    host, frame = device.allocate_host(64, "host").tensor, device.allocate(64, "frame").tensor
    for dst, src, words in (
        ([frame], [host[:32]], "32 bytes for 64"),
        ([frame.view(8, 8).T], [host], "contiguous"),
        ([frame, frame], [host], "2 destinations for 1"),
        ([host], [frame], "here on the GPU"),
        ([frame], [frame], "here on the host"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            device.h2d.copy(dst, src, "page", reads=["host"], writes=["frame"])
    with pytest.raises(ValueError, match="256"):
        device.h2d.fill(frame, 256, writes=["frame"])
    assert device.totals()["h2d"].num_operations == 0


def test_host_memory_that_nobody_pinned_is_refused(make_device: MakeDevice, cuda: RecordingCuda) -> None:
    device = make_device()
    frame, loose = device.allocate(64, "frame").tensor, torch.zeros(64, dtype=torch.uint8)
    cuda.treat_as_host(loose)
    with pytest.raises(ValueError, match=r"is not pinned.*allocate_host"):
        device.h2d.copy([frame], [loose], "page", reads=["loose"], writes=["frame"])


def test_a_closed_device_says_so_and_closes_twice(cuda: RecordingCuda) -> None:
    device = CudaDevice(runtime=cuda)
    frame, host = device.allocate(KIB, "frame"), device.allocate_host(KIB, "host")
    device.h2d.copy([frame.tensor], [host.tensor], "page", reads=["host"], writes=["frame"])
    device.close()
    device.close()
    assert not cuda.pinned
    with pytest.raises(MoeLightningError, match="closed"):
        device.h2d.synchronize()


def test_bad_options_are_refused_with_their_value(cuda: RecordingCuda) -> None:
    for options, words in (
        ({"stall_timeout_s": 0.0}, "stall_timeout_s"),
        ({"memory_budget_bytes": -5}, "-5"),
        ({"host_memory": "paged"}, "paged"),
        ({"pin_chunk_bytes": 100}, "100"),
    ):
        with pytest.raises(ValueError, match=words):
            CudaDevice(runtime=cuda, **options)  # type: ignore[arg-type]


def test_figures_that_other_threads_ask_for_meanwhile_are_exact(
    make_device: MakeDevice, cuda: RecordingCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = make_device()
    frame, host = device.allocate(KIB, "frame"), device.allocate_host(KIB, "host")
    device.set_recording(10_000)
    is_complete = cuda.is_complete

    def is_complete_after_a_while(event: object) -> bool:
        time.sleep(1e-4)  # another thread's turn
        return is_complete(event)  # type: ignore[arg-type]

    monkeypatch.setattr(cuda, "is_complete", is_complete_after_a_while)
    num_copies, records, is_over = 200, [], threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            device.totals()
            records.extend(device.drain_records())

    askers = [threading.Thread(target=ask) for _ in range(3)]
    for asker in askers:
        asker.start()
    for _ in range(num_copies):
        device.h2d.copy([frame.tensor], [host.tensor], "page", reads=["host"], writes=["frame"])
        device.compute.wait_event(device.h2d.record_event())
        device.h2d.drain()
    is_over.set()
    for asker in askers:
        asker.join()
    assert (device.totals()["h2d"].num_operations, device.totals()["h2d"].num_bytes) == (num_copies, num_copies * KIB)
    records += device.drain_records()
    assert [record.label for record in records].count("page") == num_copies
