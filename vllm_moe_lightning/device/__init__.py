"""Streams, events, copies and memory of one device.

`base` is the contract; `emulated` implements it on any CPU; `hazards` checks that every conflict is ordered.
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
from vllm_moe_lightning.device.emulated import EmulatedDevice

__all__ = [
    "Buffer",
    "ComputeStream",
    "CopyStream",
    "Device",
    "EmulatedDevice",
    "Event",
    "HostTaskStream",
    "OperationRecord",
    "Stream",
    "StreamTotals",
]
