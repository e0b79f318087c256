# SPDX-License-Identifier: Apache-2.0
"""For `preload`: vLLM's CPU build on our CUDA device, with the recording double in CUDA's place."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

from vllm_moe_lightning.config import MoeLightningConfig
from vllm_moe_lightning.device.base import Device


def device_is_cuda() -> None:
    """The statistics then say, under "proof", what the log's check trips over: nothing, if every conflict is ordered
    by streams and events alone."""
    from tests.helpers.recording_cuda import RecordingCuda
    from vllm_moe_lightning.errors import HazardError
    from vllm_moe_lightning.integration import runtime

    cuda = RecordingCuda(late=True)

    def make_device(kind: str, options: MoeLightningConfig, cpus: Sequence[int] | None = None) -> Device:
        return cuda.device(
            poison=options.debug.poison,
            cpus=cpus,
            stall_timeout_s=options.stall_timeout_s,
            pin_chunk_bytes=mmap.PAGESIZE,  # so that blocks and pages lie across the edges of many registrations
        )

    stats = runtime.Runtime.stats

    def stats_and_proof(self: runtime.Runtime) -> dict[str, Any]:
        try:
            cuda.log.check()
            proof = ""
        except HazardError as error:
            proof = str(error)
        return {**stats(self), "proof": proof, "num_calls": len(cuda.log.calls), "pinned": sum(cuda.pinned.values())}

    runtime.make_device = make_device  # type: ignore[assignment]
    runtime.Runtime.stats = stats_and_proof  # type: ignore[method-assign]
