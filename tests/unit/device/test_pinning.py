# SPDX-License-Identifier: Apache-2.0
"""Pinned host memory: whole or not at all, and never said to be pinned when it is not."""

import logging
import mmap
from pathlib import Path

import pytest
import torch

from tests.helpers.decoder import make_engine
from tests.helpers.recording_cuda import RecordingCuda
from vllm_moe_lightning.device import cuda as cuda_module
from vllm_moe_lightning.device import pinning
from vllm_moe_lightning.device.pinning import is_wsl
from vllm_moe_lightning.errors import PinningError

PAGE = mmap.PAGESIZE


def registered(cuda: RecordingCuda) -> list[int]:
    return [size for what, _, size in cuda.pin_calls if what == "register"]


def mapped(*num_pages: int) -> list[torch.Tensor]:
    """[num_bytes] uint8 each, zeroed, in pages of their own."""
    return [torch.frombuffer(mmap.mmap(-1, number * PAGE), dtype=torch.uint8) for number in num_pages]


def test_memory_is_pinned_piece_by_piece_zeroed_and_page_aligned() -> None:
    cuda = RecordingCuda()
    device = cuda.device(pin_chunk_bytes=4 * PAGE)
    buffer = device.allocate_host(10 * PAGE + 5, "weights").tensor
    assert registered(cuda) == [4 * PAGE, 4 * PAGE, 3 * PAGE]
    assert cuda.pin_calls[1][1] == buffer.data_ptr() + 4 * PAGE
    assert buffer.data_ptr() % PAGE == 0
    assert buffer.shape == (10 * PAGE + 5,)
    assert not buffer.any()
    assert "44.00 KiB pinned" in device.memory_report()
    device.close()
    assert not cuda.pinned


def test_memory_of_others_is_pinned_in_whole_pages_none_of_which_is_in_two_registrations() -> None:
    """As vLLM's KV caches, which begin 64 bytes behind an edge, or share a page with what malloc gave out before."""
    cuda = RecordingCuda()
    device = cuda.device(pin_chunk_bytes=2 * PAGE)
    [buffer] = mapped(9)
    device.pin(buffer[PAGE + 64 : 4 * PAGE + 100], "KV cache 0")  # pages 1 to 4
    device.pin(buffer[7 * PAGE + 1 : 8 * PAGE], "KV cache 2")  # page 7
    device.pin(buffer[4 * PAGE + 100 : 7 * PAGE + 1], "KV cache 1")  # 5 and 6: both ends are pinned already
    device.pin(buffer[64 : 9 * PAGE], "all of them")  # 0 and 8
    pages = [((address - buffer.data_ptr()) / PAGE, size / PAGE) for _, address, size in cuda.pin_calls]
    assert pages == [(1, 2), (3, 2), (7, 1), (5, 2), (0, 1), (8, 1)]
    assert "36.00 KiB pinned" in device.memory_report()
    frame = device.allocate(9 * PAGE - 64, "frame").tensor
    frame.copy_(torch.arange(len(frame)) % 251)
    device.d2h.copy([buffer[64:]], [frame], "down", reads=["frame"], writes=["cache"])
    assert torch.equal(buffer[64:], frame)
    assert [each.target[1] - each.target[0] for each in cuda.copied] == [
        PAGE - 64, 2 * PAGE, 2 * PAGE, 2 * PAGE, PAGE, PAGE
    ]  # fmt: skip
    device.close()
    assert not cuda.pinned


def test_one_copy_is_one_operation_and_no_call_of_it_crosses_a_registration() -> None:
    cuda = RecordingCuda(late=True)
    device = cuda.device(pin_chunk_bytes=PAGE)
    host, frame = device.allocate_host(8 * PAGE, "host").tensor, device.allocate(8 * PAGE, "frame").tensor
    with pytest.raises(RuntimeError, match="crosses an edge"):
        cuda.copy(device.h2d.handle, frame, host)
    host.copy_(torch.arange(len(host)) % 251)
    before = device.totals()["h2d"]
    begin = PAGE // 2
    device.h2d.copy([frame[begin:]], [host[begin:]], "page", reads=["host"], writes=["frame"])
    device.h2d.copy([frame[:begin]], [host[:begin]], "rest", reads=["host"], writes=["frame"])
    assert [each.label for each in cuda.copied] == ["page"] * 8 + ["rest"]
    device.h2d.synchronize()
    assert torch.equal(frame, host)
    after = device.totals()["h2d"]
    assert (after.num_operations - before.num_operations, after.num_bytes - before.num_bytes) == (2, 8 * PAGE)
    device.d2h.fill(host[begin:], 7, writes=["host"])
    device.d2h.synchronize()
    assert (host[begin:] == 7).all()
    assert torch.equal(host[:begin], frame[:begin])
    device.close()


def test_the_staging_of_pageable_memory_is_cut_at_registrations_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_module, "PIECE_BYTES", 3 * PAGE)
    cuda = RecordingCuda(late=True)
    device = cuda.device(host_memory="pageable", pageable_from_bytes=1, pin_chunk_bytes=2 * PAGE)
    source, target = mapped(7, 7)
    for loose in (source, target):
        cuda.treat_as_host(loose)
    source.copy_(torch.arange(len(source)) % 251)
    frame = device.allocate(len(source), "frame").tensor
    device.h2d.copy([frame], [source], "up", reads=["source"], writes=["frame"])
    device.d2h.wait_event(device.h2d.record_event())
    device.d2h.copy([target], [frame], "down", reads=["frame"], writes=["target"])
    assert torch.equal(target, source)
    sizes = [(each.label, (each.target[1] - each.target[0]) // PAGE) for each in cuda.copied]
    assert sizes == [(label, size) for label in ("up", "down") for size in (2, 1, 1, 2, 1)]
    device.close()


def test_nothing_to_pin_is_no_call() -> None:
    cuda = RecordingCuda()
    device = cuda.device()
    assert device.allocate_host(0, "nothing").tensor.numel() == 0
    assert cuda.pin_calls == []
    with pytest.raises(ValueError, match="-1"):
        device.allocate_host(-1, "negative")
    device.close()


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("by_option", [True, False])
def test_a_refused_piece_takes_back_those_before_it_and_names_limits_and_cures(number: int, by_option: bool) -> None:
    cuda = RecordingCuda(refuse_pin=None if by_option else number)
    device = cuda.device(pin_chunk_bytes=PAGE, pin_fail_at=number if by_option else None)
    with pytest.raises(PinningError) as caught:
        device.allocate_host(8 * PAGE, "host pages of layers.0.experts")
    done = f"{(number - 1) * 4}.00 KiB" if number > 1 else "0 bytes"
    for words in (
        "layers.0.experts",
        "32.00 KiB",
        "CUDA error 2 (out of memory)",
        f"for 4.00 KiB after {done}",
        "memlock",
        "num_resident_layers",
        'host_memory: "pageable"',
    ):
        assert words in str(caught.value)
    assert not cuda.pinned
    assert "0 bytes pinned" in device.memory_report()
    device.close()


def test_what_was_pinned_before_stays_and_is_in_the_message() -> None:
    cuda = RecordingCuda()
    device = cuda.device(pin_chunk_bytes=PAGE, pin_fail_at=4)
    kept = device.allocate_host(3 * PAGE, "first").tensor
    with pytest.raises(PinningError, match=r"12.00 KiB of other buffers that are pinned"):
        device.allocate_host(2 * PAGE, "second")
    assert len(cuda.pinned) == 3
    frame = device.allocate(kept.nbytes, "frame").tensor
    device.h2d.copy([frame], [kept], "page", reads=["first"], writes=["frame"])
    device.close()
    assert not cuda.pinned


def test_an_engine_that_cannot_pin_does_not_start_and_leaves_nothing_pinned() -> None:
    cuda = RecordingCuda()
    device = cuda.device(pin_fail_at=6)  # after the caches of four layers and the pages of one
    with pytest.raises(PinningError, match=r"host pages of layers\.1\.experts"):
        make_engine(device=device)
    device.close()
    assert not cuda.pinned


def test_small_buffers_stay_pinned_where_large_ones_are_pageable() -> None:
    cuda = RecordingCuda()
    device = cuda.device(host_memory="pageable", pageable_from_bytes=8 * PAGE)
    before = len(registered(cuda))
    device.allocate_host(4 * PAGE, "staging of a step")
    device.allocate_host(8 * PAGE, "weights")
    assert registered(cuda)[before:] == [4 * PAGE]
    device.close()


def test_memory_is_bound_to_the_gpus_node_before_it_is_pinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bound: list[tuple[int, int, list[int]]] = []

    def interleave(address: int, num_bytes: int, nodes: list[int]) -> None:
        bound.append((address, num_bytes, nodes))
        if len(bound) > 1:
            raise OSError(1, "mbind: not permitted")

    monkeypatch.setattr(pinning, "interleave", interleave)
    cuda = RecordingCuda()
    cuda.node = 1
    device = cuda.device()
    buffer = device.allocate_host(PAGE, "weights").tensor
    assert bound == [(buffer.data_ptr(), PAGE, [1])]
    with caplog.at_level(logging.WARNING):
        assert device.allocate_host(PAGE, "more").tensor.numel() == PAGE
    assert "more is not bound to the GPU's memory node 1" in caplog.text
    device.close()


@pytest.mark.parametrize(
    ("version", "expected"), [("Linux version 5.15.90.1-microsoft-standard-WSL2", True), ("Linux 6.1.0-amd64", False)]
)
def test_wsl_is_known_by_its_kernel(tmp_path: Path, version: str, expected: bool) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/version").write_text(version)
    assert is_wsl(tmp_path) is expected
    assert not is_wsl(tmp_path / "nowhere")
