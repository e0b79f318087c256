# SPDX-License-Identifier: Apache-2.0
"""Pinned host memory: whole or not at all, and never said to be pinned when it is not."""

import logging
import mmap
from pathlib import Path

import pytest

from tests.helpers.decoder import make_engine
from tests.helpers.recording_cuda import RecordingCuda
from vllm_moe_lightning.device import pinning
from vllm_moe_lightning.device.pinning import is_wsl
from vllm_moe_lightning.errors import PinningError

PAGE = mmap.PAGESIZE


def registered(cuda: RecordingCuda) -> list[int]:
    return [size for what, _, size in cuda.pin_calls if what == "register"]


def test_memory_is_pinned_piece_by_piece_zeroed_and_page_aligned() -> None:
    cuda = RecordingCuda()
    device = cuda.device(pin_chunk_bytes=4 * PAGE)
    buffer = device.allocate_host(10 * PAGE + 5, "weights").tensor
    assert registered(cuda) == [4 * PAGE, 4 * PAGE, 2 * PAGE + 5]
    assert cuda.pin_calls[1][1] == buffer.data_ptr() + 4 * PAGE
    assert buffer.data_ptr() % PAGE == 0
    assert buffer.shape == (10 * PAGE + 5,)
    assert not buffer.any()
    assert "40.00 KiB pinned" in device.memory_report()
    device.close()
    assert not cuda.pinned


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
