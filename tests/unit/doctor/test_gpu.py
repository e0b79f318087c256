# SPDX-License-Identifier: Apache-2.0
"""What doctor makes of nvidia-smi's answers and of WSL. No GPU is needed, nor was one at hand."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.helpers.host_root import machine
from vllm_moe_lightning.doctor import gpu
from vllm_moe_lightning.doctor.finding import State
from vllm_moe_lightning.doctor.memory import GIB, Need
from vllm_moe_lightning.hardware_presets import preset_profile
from vllm_moe_lightning.machine_readings import READINGS_VERSION, MeasuredMachine

T4 = "Tesla T4, 550.54.15, 15360, 3, 1, 3, 16, 16\n"
NARROW = "NVIDIA GeForce RTX 4090, 580.65.06, 24564, 9000, 4, 4, 4, 16\n"
NO_PCIE = "NVIDIA GH200 480GB, 580.65.06, 97871, 0, [N/A], [N/A], [N/A], [N/A]\n"


def measured(h2d_bytes_per_s: float) -> MeasuredMachine:
    profile = preset_profile("t4")
    profile = replace(
        profile,
        link=replace(profile.link, h2d_bytes_per_s=h2d_bytes_per_s),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return MeasuredMachine(
        fingerprint="x",
        quick=True,
        load_average=0.0,
        duration_s=1.0,
        readings=(),
        profile=profile,
        warnings=(),
        version=READINGS_VERSION,
    )


def test_no_gpu_on_a_cpu_build_is_a_fact() -> None:
    (finding,) = gpu.devices(False, lambda: None)
    assert finding.state is State.OK
    assert "emulated" in finding.found


def test_no_driver_under_a_torch_for_cuda_fails() -> None:
    (finding,) = gpu.devices(True, lambda: None)
    assert finding.state is State.FAIL
    assert "--gpus all" in finding.cure


def test_a_card_with_an_idle_link_is_ok() -> None:
    card, link = gpu.devices(True, lambda: T4)
    assert card.state is State.OK
    assert "Tesla T4, 15.0 GiB, driver 550.54.15" in card.found
    assert link.state is State.OK
    assert "PCIe 1 x16 now" in link.found
    assert "15.8 GB/s" in link.found
    assert link.limit == "PCIe 3 x16 possible"


def test_missing_lanes_and_used_memory_are_warnings() -> None:
    card, link = gpu.devices(True, lambda: NARROW)
    assert card.state is State.WARNING
    assert "8.8 GiB are in use" in card.found
    assert link.state is State.WARNING
    assert "4 times as long" in link.found


def test_a_link_that_is_no_pcie_is_a_fact() -> None:
    _, link = gpu.devices(True, lambda: NO_PCIE)
    assert link.state is State.OK


def test_a_gpu_that_a_cpu_build_leaves_unused_is_a_warning() -> None:
    card, _ = gpu.devices(False, lambda: T4)
    assert card.state is State.WARNING
    assert "does not use it" in card.found


def test_a_link_that_was_measured_far_below_its_rate_is_a_warning() -> None:
    cards = gpu.gpus_of(T4)
    finding = gpu.measured_link(measured(3e9), cards)
    assert finding.state is State.WARNING
    assert "3 GB/s measured" in finding.found
    assert "15.8 GB/s" in finding.limit
    assert gpu.measured_link(measured(12e9), cards).state is State.OK
    assert gpu.measured_link(measured(12e9), []).state is State.OK
    assert "not measured" in gpu.measured_link(None, cards).found


def test_a_driver_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.ask_driver() is None
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    program.chmod(0o755)
    with pytest.raises(OSError, match="has failed"):
        gpu.ask_driver()
    program.write_text(f"#!/bin/sh\nprintf '{T4.strip()}\\n'\n")
    assert gpu.ask_driver() == T4


@pytest.mark.parametrize(
    ("pinned_gib", "is_cuda", "state"),
    [(10, True, State.OK), (40, True, State.FAIL), (40, False, State.WARNING)],
)
def test_wsl_pins_half_of_the_memory(tmp_path: Path, pinned_gib: int, is_cuda: bool, state: State) -> None:
    version = {"proc/version": "Linux version 5.15.167.4-microsoft-standard-WSL2"}
    root = machine(tmp_path, version)
    need = Need(weight_bytes=0.0, pinned_bytes=pinned_gib * GIB, kv_bytes=0.0, largest_shard_bytes=0)
    finding = gpu.wsl(need, is_cuda, root)
    assert finding.state is state
    assert "32 GiB can be pinned" in finding.found


def test_elsewhere_there_is_no_wsl(tmp_path: Path) -> None:
    assert gpu.wsl(None, True, machine(tmp_path)).found == "no"
