# SPDX-License-Identifier: Apache-2.0
"""Frames for contexts are made at start, so that a device without room for them is found then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from vllm_moe_lightning.device.emulated import EmulatedDevice
from vllm_moe_lightning.errors import DeviceMemoryError
from vllm_moe_lightning.kv_cache import HostKvCache
from vllm_moe_lightning.pipeline.attention import AttentionRows
from vllm_moe_lightning.pipeline.context_frames import NUM_FRAMES, ContextFrames

BLOCK_SIZE, HEADS, HEAD_DIM, NUM_BLOCKS = 16, 2, 32, 6
CACHE = HostKvCache.over("kv", torch.zeros(20, HEADS, 2, BLOCK_SIZE, HEAD_DIM), HEADS, BLOCK_SIZE, HEAD_DIM)
FRAME_BYTES = NUM_BLOCKS * CACHE.block_bytes


@contextmanager
def frames_on(budget_bytes: int) -> Iterator[tuple[EmulatedDevice, ContextFrames]]:
    device = EmulatedDevice(budget_bytes)
    try:
        yield device, ContextFrames(device, lambda layer: CACHE, NUM_BLOCKS * BLOCK_SIZE)
    finally:
        device.close()


def rows_with(num_blocks: int) -> AttentionRows:
    """One row with a new token and as many blocks of context."""
    seq_len = num_blocks * BLOCK_SIZE
    return AttentionRows(
        block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
        query_start=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([seq_len], dtype=torch.int32),
        slot_mapping=torch.tensor([seq_len - 1]),
    )


def test_no_sweep_makes_a_frame_once_they_were_made() -> None:
    with frames_on(NUM_FRAMES * FRAME_BYTES) as (device, frames):
        frames.allocate()
        assert device.memory_used_bytes == NUM_FRAMES * FRAME_BYTES
        for num_blocks in (1, NUM_BLOCKS):
            frames.begin_sweep({0: rows_with(num_blocks)})
        assert device.memory_used_bytes == NUM_FRAMES * FRAME_BYTES


def test_a_device_without_room_for_the_frames_fails_at_start() -> None:
    with frames_on(NUM_FRAMES * FRAME_BYTES - 1) as (_, frames), pytest.raises(DeviceMemoryError, match="kv_frame"):
        frames.allocate()


def test_a_frame_holds_ordinary_numbers_from_the_start() -> None:
    with frames_on(NUM_FRAMES * FRAME_BYTES) as (device, frames):
        frames.allocate()
        assert all(not device._frames[f"kv_frame[{index}]"].any() for index in range(NUM_FRAMES))
