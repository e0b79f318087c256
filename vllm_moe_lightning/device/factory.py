"""The device that the options ask for: the GPU, or the emulated one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from vllm_moe_lightning.config import MoeLightningConfig
from vllm_moe_lightning.device.base import Device
from vllm_moe_lightning.device.cuda import CudaDevice
from vllm_moe_lightning.device.cuda_runtime import CudaRuntime
from vllm_moe_lightning.device.emulated import EmulatedDevice
from vllm_moe_lightning.hardware import MIB

DeviceKind = Literal["cuda", "emulated"]


def make_device(
    kind: DeviceKind,
    options: MoeLightningConfig,
    cpus: Sequence[int] | None = None,
    *,
    runtime: CudaRuntime | None = None,
) -> Device:
    """cpus: where our threads may run. On CUDA: for the calling thread's current device and stream, `runtime` in CUDA's
    place if given.

    Raises ValueError for an option that this kind of device would not heed, MoeLightningError without a GPU.
    """
    budget = options.device_memory_mib
    memory_budget_bytes = None if budget is None else int(budget * MIB)
    refuse_unheeded(kind, options)
    debug = options.debug
    if kind == "cuda":
        return CudaDevice(
            memory_budget_bytes,
            runtime=runtime,
            host_memory=options.host_memory or "pinned",
            pin_fail_at=debug.pin_fail_at,
            poison=debug.poison,
            check_hazards=debug.check_hazards,
            stall_timeout_s=options.stall_timeout_s,
            cpus=cpus,
        )
    return EmulatedDevice(
        memory_budget_bytes,
        h2d_bytes_per_s=None if options.h2d_gb_per_s is None else options.h2d_gb_per_s * 1e9,
        d2h_bytes_per_s=None if options.d2h_gb_per_s is None else options.d2h_gb_per_s * 1e9,
        timing=debug.copy_timing,
        seed=debug.seed,
        jitter_max_s=debug.jitter_max_ms / 1e3,
        poison=debug.poison,
        check_hazards=debug.check_hazards,
        stall_timeout_s=options.stall_timeout_s,
        cpus=cpus,
    )


def refuse_unheeded(kind: DeviceKind, options: MoeLightningConfig) -> None:
    """Raises ValueError for an option of the other kind of device."""
    debug = options.debug
    of_other: dict[DeviceKind, dict[str, object]] = {
        "emulated": {"host_memory": options.host_memory, "debug.pin_fail_at": debug.pin_fail_at},
        "cuda": {
            "h2d_gb_per_s": options.h2d_gb_per_s,
            "d2h_gb_per_s": options.d2h_gb_per_s,
            "debug.copy_timing": None if debug.copy_timing == "eager" else debug.copy_timing,
        },
    }
    given = {name: value for name, value in of_other[kind].items() if value is not None}
    if given:
        other = "CUDA" if kind == "emulated" else "the emulated device"
        raise ValueError(f"moe_lightning: {given} are options of {other}, and the device is {kind!r}; drop them")
