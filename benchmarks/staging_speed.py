"""What host memory that is not pinned costs: copies through the staging buffer, beside those of pinned pages."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.gpu_device import DeviceKind, make_device
from vllm_moe_lightning.device.base import Device
from vllm_moe_lightning.hardware import MIB

NUM_BYTES = 512 * MIB
REPEATS = 3


def staging_speed() -> dict[str, Any]:
    """Bytes per second of one copy at a time, by kind of memory and direction."""
    rates: dict[str, Any] = {}
    for memory in ("pinned", "pageable"):
        device = make_device(DeviceKind.CUDA, NUM_BYTES, host_memory=memory, pageable_from_bytes=1)
        try:
            rates[memory] = _rates(device, NUM_BYTES)
        finally:
            device.close()
    rates["pageable_over_pinned"] = {
        direction: rates["pageable"][direction] / rates["pinned"][direction] for direction in rates["pinned"]
    }
    return rates


def _rates(device: Device, num_bytes: int) -> dict[str, float]:
    frame, host = device.allocate(num_bytes, "frame"), device.allocate_host(num_bytes, "host")
    rates = {}
    for stream, dst, src in ((device.h2d, frame, host), (device.d2h, host, frame)):
        best_s = float("inf")
        for _ in range(1 + REPEATS):  # the first one finds pages that nobody has touched
            device.synchronize()
            started_s = time.perf_counter()
            stream.copy([dst.tensor], [src.tensor], "staging speed", reads=[src.name], writes=[dst.name])
            stream.synchronize()
            best_s = min(best_s, time.perf_counter() - started_s)
        rates[f"{stream.name}_bytes_per_s"] = num_bytes / best_s
    return rates
