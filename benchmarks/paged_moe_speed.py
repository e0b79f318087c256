"""How fast the page-table MoE kernel is at the layer shapes of Mixtral-8x7B: beside what the device can do, and beside
torch.mm expert by expert, which is told outside of the timing which tokens an expert has."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.check_run import CheckRun, Row
from benchmarks.fp64_checks import relative_error
from benchmarks.gpu_device import DeviceKind, half_types, torch_device
from benchmarks.paged_case import PagedBatch, PagedExperts, PagedShape
from vllm_moe_lightning.hardware import GpuLevel

SHAPES = {
    DeviceKind.CUDA: PagedShape(8, 4096, 14336, 2, {"w13": 2048, "w2": 1024}),
    DeviceKind.EMULATED: PagedShape(8, 64, 96, 2, {"w13": 64, "w2": 32}),
}
NUM_TOKENS = (1, 16, 256, 2048)
REPEATS, CALLS = 5, 10
"""Repeats of so many calls, one behind the other: of few tokens, the launching thread may take longer than the GPU."""
EXPECTED_S = 15.0
MOST_DIFFERENCE = 0.02
"""Of two ways to round to 16 bits."""


def paged_moe_speed(kind: DeviceKind, run: CheckRun, peak: GpuLevel | None) -> list[Row]:
    """peak: as measured; None: it was not."""
    experts = PagedExperts(SHAPES[kind], half_types(kind)[-1], torch_device(kind), "16 bits")
    rows = []
    for num_tokens in NUM_TOKENS:
        name = f"page-table MoE kernel's speed, {num_tokens} tokens"
        if not run.has_time_for(name, EXPECTED_S):
            continue
        attempt = run.attempt(lambda num_tokens=num_tokens: _row(experts, num_tokens, peak))
        if attempt.value is None:
            run.fail(name, attempt.why or "")
        rows.append(attempt.value or {"num_tokens": num_tokens, "why": attempt.why, **(attempt.failure or {})})
        if attempt.value is not None and attempt.value["difference_from_mm"] > MOST_DIFFERENCE:
            run.fail(name, f"it differs from torch.mm by {attempt.value['difference_from_mm']:.2g}")
    return rows


def _row(experts: PagedExperts, num_tokens: int, peak: GpuLevel | None) -> Row:
    shape, device = experts.shape, experts.device
    batch = PagedBatch(experts, num_tokens, shape.num_experts)
    by_mm = _ExpertByExpert(batch)
    difference = relative_error(batch.run().cpu(), by_mm.run().cpu())
    seconds, launch_s = _seconds(batch.run, device)
    mm_s, mm_launch_s = _seconds(by_mm.run, device)
    num_experts_read = batch.ids.unique().numel()
    num_flops = 2.0 * batch.ids.numel() * 3 * shape.hidden_size * shape.intermediate_size
    best_s = min(seconds)
    row: dict[str, Any] = {
        "num_tokens": num_tokens,
        "dtype": str(experts.dtype),
        "kernel": "paged_fused_moe" if device.type == "cuda" else "its reference in plain torch",
        "experts_read": num_experts_read,
        "kernel_s": {"best": best_s, "median": statistics.median(seconds), "launch": launch_s},
        "mm_s": {"best": min(mm_s), "median": statistics.median(mm_s), "launch": mm_launch_s},
        "over_mm": min(mm_s) / best_s,
        "bytes_per_s": num_experts_read * shape.expert_bytes / best_s,
        "flops_per_s": num_flops / best_s,
        "difference_from_mm": difference,
    }
    if peak is not None:
        row["share_of_memory_peak"] = row["bytes_per_s"] / peak.bandwidth_bytes_per_s
        row["share_of_gemm_peak"] = row["flops_per_s"] / peak.flops_per_s
    return row


class _ExpertByExpert:
    """Plain torch over contiguous weights."""

    def __init__(self, batch: PagedBatch) -> None:
        experts, self._hidden = batch.experts, batch.on_device[0]
        self._experts = []
        for expert in batch.ids.unique().tolist():
            tokens, choices = (batch.ids == expert).nonzero(as_tuple=True)
            w13, w2 = (experts.exact[matrix][expert] for matrix in ("w13", "w2"))
            weights = batch.weights[tokens, choices].to(experts.device, experts.dtype)
            self._experts.append((tokens.to(experts.device), weights, w13, w2))

    def run(self) -> torch.Tensor:
        output = torch.zeros_like(self._hidden)
        for tokens, weights, w13, w2 in self._experts:
            gate, up = torch.mm(self._hidden[tokens], w13.T).chunk(2, dim=1)
            result = torch.mm(torch.nn.functional.silu(gate) * up, w2.T)
            output.index_add_(0, tokens, result * weights[:, None])
        return output


def _seconds(run: Callable[[], object], device: torch.device) -> tuple[list[float], float]:
    """(seconds of a call in each repeat, the fewest that the launching thread took for one), once it is warm."""

    def complete() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    run()
    seconds, launch_s = [], float("inf")
    for _ in range(REPEATS):
        complete()
        started_s = time.perf_counter()
        for _ in range(CALLS):
            run()
        launch_s = min(launch_s, (time.perf_counter() - started_s) / CALLS)
        complete()
        seconds.append((time.perf_counter() - started_s) / CALLS)
    return seconds, launch_s
