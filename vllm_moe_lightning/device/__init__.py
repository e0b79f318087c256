"""Streams, events, copies and memory of one device.

`base` is the contract; `cuda` implements it on a GPU, `emulated` on any CPU; `hazards` checks that every conflict is
ordered. Nothing here needs CUDA before a CudaDevice is made.
"""

from vllm_moe_lightning.device.base import (
    Buffer,
    ComputeStream,
    CopyStream,
    Device,
    Event,
    HostTaskStream,
    OperationRecord,
    Stream,
    StreamTotals,
)
from vllm_moe_lightning.device.cuda import CudaDevice
from vllm_moe_lightning.device.emulated import EmulatedDevice

__all__ = [
    "Buffer",
    "ComputeStream",
    "CopyStream",
    "CudaDevice",
    "Device",
    "EmulatedDevice",
    "Event",
    "HostTaskStream",
    "OperationRecord",
    "Stream",
    "StreamTotals",
]
