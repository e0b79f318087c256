"""Profiles: strict JSON, believable readings only (field report B30), and a source for every preset figure."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_moe_lightning.hardware import (
    BELIEVABLE,
    GIB,
    HardwareProfile,
    HostLink,
    profile_from_dict,
    profile_from_json,
    profile_to_json,
    read_profile,
    write_profile,
)
from vllm_moe_lightning.hardware_presets import GPU_PRESETS, HOST_PRESETS, preset_profile

NO_DEADLINE = settings(deadline=None)  # of a busy machine
WANTED_GPUS = {"t4", "l4", "a10", "a100-40", "a100-80", "h100", "h200", "rtx3090", "rtx4090", "rtx5090"}


def raw_profile() -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(profile_to_json(preset_profile("l4")))
    return raw


def with_figure(path: str, value: object) -> dict[str, Any]:
    raw = raw_profile()
    level, field = path.split(".")
    raw["disk"] = {"name": "nvme", "capacity_bytes": 1 << 40, "read_bytes_per_s": 3e9}
    raw[level][field] = value
    return raw


def test_there_is_a_preset_for_every_card_we_name() -> None:
    assert set(GPU_PRESETS) == WANTED_GPUS


@pytest.mark.parametrize("host", HOST_PRESETS)
@pytest.mark.parametrize("gpu", GPU_PRESETS)
def test_every_preset_figure_has_a_source(gpu: str, host: str) -> None:
    sources = preset_profile(gpu, host).sources
    figures = {
        path
        for path in BELIEVABLE
        if path.split(".")[0] in ("gpu", "cpu", "link") and path not in ("gpu.num_gpus", "cpu.num_threads")
    }
    assert figures <= set(sources)
    assert all(sources.values())


@pytest.mark.parametrize("gpu", GPU_PRESETS)
def test_a_profile_survives_json(gpu: str, tmp_path: Path) -> None:
    profile = preset_profile(gpu, num_gpus=2)
    file = tmp_path / "profile.json"
    write_profile(profile, file)
    assert read_profile(file) == profile


def test_unknown_keys_are_refused_by_name() -> None:
    raw = raw_profile()
    raw["gpu"]["bandwith"] = 1
    with pytest.raises(ValueError, match="bandwith"):
        profile_from_dict(raw)


POSITIVE = [path for path in BELIEVABLE if BELIEVABLE[path][0] > 0]
COUNTS = [path for path in POSITIVE if path.endswith(("memory_bytes", "capacity_bytes", "num_gpus", "num_threads"))]


@pytest.mark.parametrize("path", POSITIVE)
@pytest.mark.parametrize("value", [0, -1, 10**18])
def test_an_absurd_reading_is_refused_by_name(path: str, value: int) -> None:
    reading = value if path in COUNTS else float(value) * 1e12
    with pytest.raises(ValueError, match=path):
        profile_from_dict(with_figure(path, reading))


@pytest.mark.parametrize("path", [path for path in POSITIVE if path not in COUNTS])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reading_that_is_no_number_is_refused_by_name(path: str, value: float) -> None:
    with pytest.raises(ValueError, match=path):
        profile_from_dict(with_figure(path, value))


@pytest.mark.parametrize("word", ["NaN", "Infinity"])
def test_nan_in_a_file_is_refused(word: str) -> None:
    text = profile_to_json(preset_profile("t4")).replace("320000000000.0", word)
    assert word in text
    with pytest.raises(ValueError, match="not JSON"):
        profile_from_json(text, "p.json")


def test_the_refusal_says_where_the_reading_came_from() -> None:
    raw = with_figure("link.h2d_bytes_per_s", 0.0)
    raw["sources"]["link.h2d_bytes_per_s"] = "copy test of 2024"
    with pytest.raises(ValueError, match="copy test of 2024"):
        profile_from_dict(raw)


def test_a_cgroup_limit_caps_host_memory() -> None:
    raw = raw_profile()
    raw["limits"] = {"cgroup_memory_bytes": 16 * GIB}
    assert profile_from_dict(raw).host_memory_bytes == 16 * GIB
    raw["limits"] = {"cgroup_memory_bytes": 1 << 45}
    assert profile_from_dict(raw).host_memory_bytes == raw["cpu"]["memory_bytes"]


def test_several_gpus_add_up_but_share_the_link() -> None:
    one, four = preset_profile("t4"), preset_profile("t4", num_gpus=4)
    assert four.gpu.total_memory_bytes == 4 * one.gpu.total_memory_bytes
    assert four.gpu.total_flops_per_s == 4 * one.gpu.total_flops_per_s
    assert four.link == one.link


@pytest.mark.parametrize(("gpu", "host"), [("t5", None), ("t4", "my-laptop")])
def test_an_unknown_preset_is_refused_with_the_known_ones(gpu: str, host: str | None) -> None:
    with pytest.raises(ValueError, match="there are"):
        preset_profile(gpu, host)


@NO_DEADLINE
@given(st.floats(0.5, 1.0), st.floats(0.01, 10.0), st.floats(0.01, 10.0))
def test_both_directions_take_longer_than_one_and_less_than_both_in_turn(
    share: float, first_s: float, second_s: float
) -> None:
    extra = HostLink(h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9, bidirectional_share=share).slowdown_per_opposite_s
    together_s = max(first_s + extra * second_s, second_s + extra * first_s)
    assert max(first_s, second_s) <= together_s <= (first_s + second_s) * (1 + 1e-9)


def test_a_profile_can_be_as_small_as_an_emulated_device() -> None:
    raw = raw_profile()
    raw["gpu"] |= {"memory_bytes": 8 << 20, "bandwidth_bytes_per_s": 5e9, "flops_per_s": 2e10}
    assert isinstance(profile_from_dict(raw), HardwareProfile)
