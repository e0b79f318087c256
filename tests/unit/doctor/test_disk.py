# SPDX-License-Identifier: Apache-2.0
"""What doctor says of the disks."""

from __future__ import annotations

import os
from collections import namedtuple
from pathlib import Path

import pytest

from vllm_moe_lightning.doctor import disk
from vllm_moe_lightning.doctor.finding import State


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    file.write_bytes(os.urandom(3 << 20))
    return file


def test_a_sample_gives_a_speed_and_a_loading_time(shard: Path) -> None:
    finding = disk.read_speed([shard])
    assert finding.state is State.OK
    assert "GB/s" in finding.found or "memory" in finding.found


def test_the_whole_of_a_short_file_is_read_and_a_long_one_is_left_in_time(
    shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes, _, _ = disk._read_sample(shard)
    assert num_bytes == 3 << 20
    monkeypatch.setattr(disk, "SAMPLE_S", 0.0)
    assert disk._read_sample(shard)[0] == 0


def test_a_slow_disk_is_a_warning_with_the_time_that_loading_takes(
    shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "file_system_of", lambda folder, root: "nfs4")
    monkeypatch.setattr(disk, "_read_sample", lambda file: (2 << 20, 2000.0, True))
    finding = disk.read_speed([shard])
    assert finding.state is State.WARNING
    assert "nfs4" in finding.found
    assert "3e+03 s" in finding.found
    assert "local SSD" in finding.cure


def test_memory_and_missing_files_are_not_timed(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no shard" in disk.read_speed([shard.parent / "gone"]).found
    monkeypatch.setattr(disk, "file_system_of", lambda folder, root: "tmpfs")
    assert "which is memory" in disk.read_speed([shard]).found


def test_a_full_disk_is_a_warning_for_a_folder_that_is_yet_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    asked: list[Path] = []

    def disk_usage(folder: Path) -> object:
        asked.append(folder)
        return usage(1 << 40, 1 << 40, 1 << 20)

    monkeypatch.setattr(disk.shutil, "disk_usage", disk_usage)
    finding = disk.free_space("space for caches", tmp_path / "not/yet")
    assert finding.state is State.WARNING
    assert asked == [tmp_path]
