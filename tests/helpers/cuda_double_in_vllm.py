# SPDX-License-Identifier: Apache-2.0
"""For `preload`: vLLM's CPU build on our CUDA device, with the recording double in CUDA's place. The runner's tensors
count as the GPU's too, and come down late; frames are attended over as on a GPU."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_moe_lightning.config import MoeLightningConfig
from vllm_moe_lightning.device.base import Buffer, Device

dummy_runs: list[list[int]] = []
"""Tokens of each micro-batch."""


def profile_run(llm: Any) -> list[int]:
    """What vLLM does at its start on CUDA, and its CPU worker not. Tokens of each micro-batch."""
    llm.collective_rpc(lambda worker: worker.model_runner.profile_run())
    return dummy_runs[-1]


def prompts_by_flash_attention() -> None:
    """A stand-in for vLLM's, which needs a GPU."""
    from tests.helpers.varlen_attention import VarlenAttention
    from vllm_moe_lightning.integration import runtime
    from vllm_moe_lightning.integration.flash_attention import FlashPrefill

    kernel = FlashPrefill(VarlenAttention(), torch.clone)
    runtime.prefill_kernel = lambda *_: kernel


def device_is_cuda() -> None:
    """The statistics then say, under "proof", what the log's check trips over: nothing, if every conflict is ordered
    by streams and events alone."""
    from tests.helpers.recording_cuda import RecordingCuda
    from vllm_moe_lightning.device.cuda import CudaDevice
    from vllm_moe_lightning.errors import HazardError
    from vllm_moe_lightning.integration import runtime, step_rows
    from vllm_moe_lightning.pipeline import context_frames
    from vllm_moe_lightning.pipeline.executor import MicroBatch, PipelineExecutor

    cuda = RecordingCuda(late=True)

    def make_device(kind: str, options: MoeLightningConfig, cpus: Sequence[int] | None = None) -> Device:
        return cuda.device(
            poison=options.debug.poison,
            cpus=cpus,
            stall_timeout_s=options.stall_timeout_s,
            pin_chunk_bytes=mmap.PAGESIZE,  # so that blocks and pages lie across the edges of many registrations
        )

    steps_brought_down = 0

    def bring_down(packed: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        nonlocal steps_brought_down
        steps_brought_down += 1
        landing, packed = torch.full_like(packed, 0xFF), packed.clone()
        return landing, lambda: landing.copy_(packed)  # type: ignore[func-returns-value]

    run_sweep, allocate = PipelineExecutor.run_sweep, CudaDevice.allocate
    allocated_in_sweeps: list[str] = []
    is_in_sweep = False

    def allocate_and_note(self: CudaDevice, num_bytes: int, name: str) -> Buffer:
        if is_in_sweep:
            allocated_in_sweeps.append(name)
        return allocate(self, num_bytes, name)

    def run_and_note(self: PipelineExecutor, batches: Sequence[MicroBatch[Any]], **options: Any) -> list[Any]:
        if options.get("is_dummy"):
            dummy_runs.append([batch.num_tokens for batch in batches])
        nonlocal is_in_sweep
        is_in_sweep = True
        try:
            return run_sweep(self, batches, **options)
        finally:
            is_in_sweep = False

    stats = runtime.Runtime.stats

    def stats_and_proof(self: runtime.Runtime) -> dict[str, Any]:
        try:
            cuda.log.check()
            proof = ""
        except HazardError as error:
            proof = str(error)
        return {
            **stats(self),
            "proof": proof,
            "num_calls": len(cuda.log.calls),
            "pinned": sum(cuda.pinned.values()),
            "steps_brought_down": steps_brought_down,
            "allocated_in_sweeps": allocated_in_sweeps,
        }

    context_frames.are_in_host_memory = lambda device: False  # type: ignore[assignment]
    step_rows.is_in_host_memory = lambda tensor: False  # type: ignore[assignment]
    step_rows.bring_down = bring_down
    runtime.make_device = make_device  # type: ignore[assignment]
    CudaDevice.allocate = allocate_and_note  # type: ignore[method-assign]
    PipelineExecutor.run_sweep = run_and_note  # type: ignore[method-assign,assignment]
    runtime.Runtime.stats = stats_and_proof  # type: ignore[method-assign]
