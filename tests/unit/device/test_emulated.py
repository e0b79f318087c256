"""The emulated device behind the Device interface."""

import ctypes
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from vllm_moe_lightning.device import EmulatedDevice
from vllm_moe_lightning.errors import DeviceMemoryError, DeviceTaskError, HazardError, MoeLightningError
from vllm_moe_lightning.kernels import native

A_WHILE_S = 0.05
KIB = 1024
MakeDevice = Callable[..., EmulatedDevice]


class Argument(ctypes.Structure):
    _fields_ = (("value", ctypes.c_int32),)


@native.CallFunction
def return_value(argument: int) -> int:
    return Argument.from_address(argument).value


@pytest.fixture
def make_device() -> Iterator[MakeDevice]:
    devices: list[EmulatedDevice] = []

    def make(**options: object) -> EmulatedDevice:
        devices.append(EmulatedDevice(**options))  # type: ignore[arg-type]
        return devices[-1]

    yield make
    for device in devices:
        device.close()


def call(device: EmulatedDevice, value: int = native.OK) -> None:
    device.cpu.call(return_value, Argument(value), "attention", keep_alive=None, reads=(), writes=())


@pytest.mark.parametrize("timing", ["eager", "lazy", "jitter"])
def test_a_page_arrives_once_compute_has_waited_for_it(make_device: MakeDevice, timing: str) -> None:
    device = make_device(timing=timing, poison=True, check_hazards=True)
    host, frame = device.allocate_host(4 * KIB, "host"), device.allocate(4 * KIB, "frame")
    host.tensor.copy_(torch.arange(4 * KIB) % 251)
    device.h2d.copy([frame.tensor], [host.tensor], "page", reads=["host"], writes=["frame"])
    device.compute.wait_event(device.h2d.record_event())
    with device.compute.span("post", reads=["frame"], writes=[]):
        assert torch.equal(frame.tensor, host.tensor)


def test_a_forgotten_wait_reads_nan_under_lazy_and_poison(make_device: MakeDevice) -> None:
    device = make_device(timing="lazy", poison=True)
    host, frame = device.allocate_host(4 * KIB, "host"), device.allocate(4 * KIB, "frame")
    device.h2d.copy([frame.tensor], [host.tensor], "page", reads=["host"], writes=["frame"])
    time.sleep(A_WHILE_S)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert frame.tensor.view(dtype).isnan().all()
    device.h2d.synchronize()
    assert not frame.tensor.any()


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


def test_an_event_of_compute_orders_but_never_blocks(make_device: MakeDevice) -> None:
    device = make_device(check_hazards=True)
    host, frame = device.allocate_host(KIB, "host"), device.allocate(KIB, "frame")
    with device.compute.span("pre", reads=[], writes=["frame"]):
        frame.tensor.fill_(3)
    device.d2h.wait_event(device.compute.record_event())
    device.d2h.copy([host.tensor], [frame.tensor], "qkv", reads=["frame"], writes=["host"])
    device.synchronize()
    assert (host.tensor == 3).all()


def test_what_compute_wrote_after_an_event_is_not_part_of_it(make_device: MakeDevice) -> None:
    device = make_device(check_hazards=True)
    frame, host = device.allocate(KIB, "frame"), device.allocate_host(KIB, "host")
    early = device.compute.record_event()
    device.h2d.fill(frame.tensor, 1, writes=["frame"])
    device.compute.wait_event(device.h2d.record_event())
    device.d2h.wait_event(early)
    with pytest.raises(HazardError, match="frame"):
        device.d2h.copy([host.tensor], [frame.tensor], "out", reads=["frame"], writes=["host"])


def test_over_budget_is_an_error_with_the_numbers_and_the_cure(make_device: MakeDevice) -> None:
    device = make_device(memory_budget_bytes=10 * KIB)
    device.reserve(4 * KIB, "activations")
    device.allocate(4 * KIB, "slot_0")
    with pytest.raises(DeviceMemoryError) as caught:
        device.allocate(4 * KIB, "slot_1")
    message = str(caught.value)
    for part in ("slot_1", "4.00 KiB", "8.00 KiB", "10.00 KiB", "fewer layers resident", "activations"):
        assert part in message
    assert device.memory_used_bytes == 8 * KIB
    assert device.memory_budget_bytes == 10 * KIB
    device.release("slot_0")
    device.allocate(6 * KIB, "slot_1")
    assert device.memory_used_bytes == 10 * KIB
    device.allocate(0, "nothing")
    report = device.memory_report()
    assert report.index("slot_1") < report.index("activations") < report.index("in use") < report.index("budget")


def test_names_of_allocations_are_unique_and_known(make_device: MakeDevice) -> None:
    device = make_device()
    device.allocate(KIB, "slot")
    with pytest.raises(ValueError, match="slot"):
        device.reserve(KIB, "slot")
    with pytest.raises(ValueError, match="frame"):
        device.release("frame")
    with pytest.raises(ValueError, match="-1"):
        device.allocate(-1, "negative")


def test_fresh_and_released_frames_hold_nan_under_poison(make_device: MakeDevice) -> None:
    device = make_device(poison=True)
    frame = device.allocate(KIB, "frame").tensor
    assert frame.view(torch.float32).isnan().all()
    frame.zero_()
    device.release("frame")
    assert frame.view(torch.bfloat16).isnan().all()


def test_host_memory_is_zeroed_page_aligned_and_outside_the_budget(make_device: MakeDevice) -> None:
    device = make_device(memory_budget_bytes=0)
    buffer = device.allocate_host(10_000, "weights")
    assert buffer.tensor.data_ptr() % os.sysconf("SC_PAGE_SIZE") == 0
    assert buffer.tensor.shape == (10_000,)
    assert not buffer.tensor.any()
    assert device.allocate_host(0, "nothing").tensor.numel() == 0


def test_a_failed_task_is_reported_once_by_the_next_wait_for_any_stream(make_device: MakeDevice) -> None:
    device = make_device()
    host, frame = device.allocate_host(KIB, "host"), device.allocate(KIB, "frame")
    call(device, native.ERROR_INJECTED)
    call(device)
    device.h2d.wait_event(device.cpu.record_event())
    device.h2d.copy([frame.tensor], [host.tensor], "hidden", reads=["host"], writes=["frame"])
    arrived = device.h2d.record_event()
    with pytest.raises(DeviceTaskError, match=r"'cpu'.*99.*injected"):
        device.compute.wait_event(arrived)
    device.compute.wait_event(arrived)
    call(device)
    device.synchronize()
    assert device.totals()["cpu"].num_operations == 3


def test_synchronize_waits_for_all_streams_before_it_reports_a_failure(make_device: MakeDevice) -> None:
    device = make_device(h2d_bytes_per_s=1e6)
    host, frame = device.allocate_host(20_000, "host"), device.allocate(20_000, "frame")
    host.tensor.fill_(5)
    call(device, native.ERROR_OUT_OF_MEMORY)
    device.h2d.copy([frame.tensor], [host.tensor], "page", reads=["host"], writes=["frame"])
    with pytest.raises(DeviceTaskError, match="out of memory"):
        device.synchronize()
    assert (frame.tensor == 5).all()
    assert device.totals()["h2d"].num_bytes == 20_000


def test_a_paced_link_takes_at_least_its_time_and_compute_counts_the_wait(make_device: MakeDevice) -> None:
    device = make_device(h2d_bytes_per_s=10e6, link_latency_s=1e-3)
    host, frame = device.allocate_host(100_000, "host"), device.allocate(100_000, "frame")
    start_s = time.monotonic()
    for _ in range(2):
        device.h2d.copy([frame.tensor], [host.tensor], "page", reads=["host"], writes=["frame"])
    device.compute.wait_event(device.h2d.record_event())
    took_s = time.monotonic() - start_s
    assert took_s >= 0.022 - 1e-6
    assert 0 < device.compute.wait_s <= took_s
    assert device.totals()["h2d"].busy_s >= 0.022 - 1e-6


def test_records_carry_streams_labels_and_one_clock(make_device: MakeDevice) -> None:
    device = make_device()
    host, frame = device.allocate_host(KIB, "host"), device.allocate(KIB, "frame")
    device.set_recording(16)
    before_s = time.monotonic()
    with device.compute.span("pre(0,0)", reads=[], writes=["frame"]):
        pass
    device.d2h.wait_event(device.compute.record_event())
    device.d2h.copy([host.tensor], [frame.tensor], "qkv(0,0)", reads=["frame"], writes=["host"])
    device.cpu.wait_event(device.d2h.record_event())
    call(device)
    device.h2d.wait_event(device.cpu.record_event())
    device.h2d.fill(frame.tensor, 0, writes=["frame"])
    device.synchronize()
    records = device.drain_records()
    assert [(record.stream, record.label, record.num_bytes) for record in records] == [
        ("compute", "pre(0,0)", 0),
        ("d2h", "qkv(0,0)", KIB),
        ("cpu", "attention", 0),
        ("h2d", "fill", 0),
    ]
    times = [before_s, *(t for record in records for t in (record.start_s, record.end_s)), time.monotonic()]
    assert times == sorted(times)
    assert device.drain_records() == []
    device.set_recording(0)
    call(device)
    device.synchronize()
    assert device.drain_records() == []


def test_a_wait_inside_a_span_is_not_busy_time(make_device: MakeDevice) -> None:
    device = make_device(h2d_bytes_per_s=1e6)
    host, frame = device.allocate_host(30_000, "host"), device.allocate(30_000, "frame")
    device.h2d.copy([frame.tensor], [host.tensor], "page", reads=["host"], writes=["frame"])
    start_s = time.monotonic()
    with device.compute.span("post", reads=[], writes=[]):
        device.compute.wait_event(device.h2d.record_event())
    assert device.totals()["compute"].busy_s + device.compute.wait_s <= time.monotonic() - start_s


def test_operands_stay_alive_until_the_copy_has_run(make_device: MakeDevice) -> None:
    device = make_device(timing="lazy")
    frame = device.allocate(KIB, "frame")
    source = torch.full((KIB,), 9, dtype=torch.uint8)
    alive = weakref.ref(source)
    device.h2d.copy([frame.tensor], [source], "page", reads=["source"], writes=["frame"])
    del source
    gc.collect()
    assert alive() is not None
    device.h2d.synchronize()
    assert (frame.tensor == 9).all()
    device.h2d.fill(frame.tensor, 0, writes=["frame"])
    gc.collect()
    assert alive() is None


def test_a_scattered_copy_is_one_operation(make_device: MakeDevice) -> None:
    device = make_device()
    dst, src = torch.zeros(6, 8), torch.arange(48.0).view(6, 8)
    rows = [4, 1, 2]
    device.d2h.copy([dst[i] for i in range(3)], [src[row] for row in rows], "kv", reads=["a"], writes=["b"])
    device.synchronize()
    assert torch.equal(dst[:3], src[rows])
    assert device.totals()["d2h"].num_operations == 1
    assert device.totals()["d2h"].num_bytes == 3 * 8 * 4


def test_bad_copies_are_refused_before_they_are_submitted(make_device: MakeDevice) -> None:
    device = make_device()
    a, b = torch.zeros(4, 4), torch.zeros(4, 4)
    for dst, src, words in (
        ([a], [b[:2]], "32 bytes for 64"),
        ([a.T], [b], "contiguous"),
        ([a, a], [b], "2 destinations for 1"),
    ):
        with pytest.raises(ValueError, match=words):
            device.h2d.copy(dst, src, "page", reads=["b"], writes=["a"])
    with pytest.raises(ValueError, match="256"):
        device.h2d.fill(a, 256, writes=["a"])
    assert device.totals()["h2d"].num_operations == 0


def test_bad_options_are_refused_with_their_value() -> None:
    for options, words in (
        ({"timing": "late"}, "late"),
        ({"h2d_bytes_per_s": 0.0}, "h2d_bytes_per_s"),
        ({"link_latency_s": -1.0}, "-1"),
        ({"memory_budget_bytes": -5}, "-5"),
        ({"cpus": [100_000]}, "100000"),
    ):
        with pytest.raises(ValueError, match=words):
            EmulatedDevice(**options)  # type: ignore[arg-type]


def test_streams_run_on_the_cpus_they_were_given(make_device: MakeDevice) -> None:
    cpu = max(os.sched_getaffinity(0))
    device = make_device(cpus=[cpu])
    seen: list[set[int]] = []

    @native.CallFunction
    def look(_: int) -> int:
        seen.append(os.sched_getaffinity(0))
        return native.OK

    device.cpu.call(look, Argument(0), "look", keep_alive=None, reads=(), writes=())
    device.synchronize()
    assert seen == [{cpu}]


def test_a_closed_device_says_so_and_closes_twice() -> None:
    device = EmulatedDevice(timing="lazy")
    frame = device.allocate(KIB, "frame")
    device.h2d.fill(frame.tensor, 7, writes=["frame"])
    device.close()
    device.close()
    assert (frame.tensor == 7).all()
    with pytest.raises(MoeLightningError, match="closed"):
        device.h2d.synchronize()
