# SPDX-License-Identifier: Apache-2.0
"""Options become a device, and none is silently ignored."""

from typing import Any

import pytest

from tests.helpers.recording_cuda import RecordingCuda
from vllm_moe_lightning.config import parse_options
from vllm_moe_lightning.device.factory import make_device
from vllm_moe_lightning.errors import PinningError

MIB = 1 << 20


def test_the_emulated_device_has_its_options() -> None:
    options = parse_options({"device_memory_mib": 3, "h2d_gb_per_s": 1, "debug": {"poison": True}})
    device = make_device("emulated", options)
    assert (device.kind, device.memory_budget_bytes, device.poison) == ("emulated", 3 * MIB, True)
    device.close()


def test_the_cuda_device_has_its_options() -> None:
    options = parse_options(
        {"device_memory_mib": 3, "host_memory": "pageable", "debug": {"poison": True, "pin_fail_at": 3}}
    )
    # The first two are the staging buffers, which are pinned in any case.
    device = make_device("cuda", options, runtime=RecordingCuda())
    assert (device.kind, device.memory_budget_bytes, device.poison) == ("cuda", 3 * MIB, True)
    with pytest.raises(PinningError):
        device.allocate_host(MIB, "staging of a step")
    device.close()


@pytest.mark.parametrize(
    ("kind", "raw", "words"),
    [
        ("emulated", {"host_memory": "pinned"}, r"host_memory.*options of CUDA.*drop"),
        ("emulated", {"debug": {"pin_fail_at": 1}}, "pin_fail_at"),
        ("cuda", {"h2d_gb_per_s": 5}, r"h2d_gb_per_s.*options of the emulated device"),
        ("cuda", {"d2h_gb_per_s": 5}, "d2h_gb_per_s"),
        ("cuda", {"debug": {"copy_timing": "lazy"}}, "lazy"),
    ],
)
def test_an_option_that_the_device_would_not_heed_is_refused(kind: Any, raw: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_device(kind, parse_options(raw), runtime=RecordingCuda())
