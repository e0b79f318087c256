"""The device that gpu_check.py is about: the GPU, or in small the emulated one."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import torch

from vllm_moe_lightning.device import CudaDevice, Device, EmulatedDevice

STALL_TIMEOUT_S = 60.0
FIRST_WITH_BFLOAT16 = (8, 0)  # compute capability


class DeviceKind(StrEnum):
    CUDA = "cuda"
    EMULATED = "emulated"


def make_device(kind: DeviceKind, memory_bytes: int | None, **of_cuda: Any) -> Device:
    """memory_bytes: None: what is free on the GPU; of_cuda: more arguments of CudaDevice."""
    if kind is DeviceKind.EMULATED:
        return EmulatedDevice(memory_bytes, stall_timeout_s=STALL_TIMEOUT_S)
    return CudaDevice(memory_bytes, stall_timeout_s=STALL_TIMEOUT_S, **of_cuda)


def half_types(kind: DeviceKind) -> list[torch.dtype]:
    """Of 16 bits, as far as the device has them; the last is the one to measure with."""
    if kind is DeviceKind.EMULATED:
        return [torch.bfloat16]
    has_bfloat16 = torch.cuda.get_device_capability() >= FIRST_WITH_BFLOAT16
    return [torch.float16, torch.bfloat16] if has_bfloat16 else [torch.float16]


def torch_device(kind: DeviceKind) -> torch.device:
    if kind is DeviceKind.EMULATED:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def describe_gpu(kind: DeviceKind) -> dict[str, Any]:
    if kind is DeviceKind.EMULATED:
        return {"gpu": "none: the device is emulated"}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "gpu_memory_gb": properties.total_memory / 1e9,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }
