"""The page-table MoE kernel on a device against float64: pages in no order, experts without tokens, 16-bit and float8
weights, and batches of 1 to 2048 tokens, so that each size of tile is one's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple
from unittest import mock

import torch

from benchmarks.check_run import CheckRun
from benchmarks.fp64_checks import TOLERANCE, relative_error
from benchmarks.gpu_device import DeviceKind, half_types, torch_device
from benchmarks.paged_case import PagedBatch, PagedExperts, PagedShape, Weights
from vllm_moe_lightning.kernels import paged_moe_launch
from vllm_moe_lightning.kernels.reference_ffn import expert_ffn
from vllm_moe_lightning.kernels.torch_experts import torch_experts

# No divisors: experts begin and end inside of pages. One expert gets no token.
SHAPE = PagedShape(8, 256, 448, 2, {"w13": 100, "w2": 60})
NUM_ASKED_FOR = 7
# One choice a tile, small, medium and large tiles.
NUM_TOKENS = (1, 37, 256, 2048)
EXPECTED_S = 10.0
"""Of a case whose kernels have not been compiled yet."""


class Case(NamedTuple):
    dtype: torch.dtype
    num_tokens: int
    weights: Weights = "16 bits"
    by_bits: bool = False
    """float8 as chips convert it that have no instruction for it."""

    def __str__(self) -> str:
        return f"{self.dtype}, {self.weights}{' by bits' if self.by_bits else ''}, {self.num_tokens} tokens"


def cases(kind: DeviceKind) -> Iterator[Case]:
    """Those that most depends on first: time may run out, since each has kernels of its own to compile."""
    *others, measured = half_types(kind)
    yield from (Case(measured, num_tokens) for num_tokens in NUM_TOKENS)
    for weights in ("float8 per tensor", "float8 per block"):
        yield from (Case(measured, num_tokens, weights) for num_tokens in NUM_TOKENS if num_tokens != 37)
    yield Case(measured, 37, "float8 per tensor", by_bits=True)
    yield from (Case(dtype, num_tokens) for dtype in others for num_tokens in (1, 2048))


def paged_moe_checks(kind: DeviceKind, run: CheckRun, reserve_s: float) -> None:
    """Each case by itself; those of 16-bit weights are never dropped. Without triton on a GPU each of them fails.

    reserve_s: what later parts take.
    """
    device = torch_device(kind)
    for index, case in enumerate(cases(kind)):
        name = f"{'paged_fused_moe' if kind is DeviceKind.CUDA else 'its reference'} {case}"
        if index < len(NUM_TOKENS) or run.has_time_for(name, EXPECTED_S, reserve_s):
            run.check("page_table_moe", name, lambda case=case: _error(case, device), TOLERANCE[case.dtype])


def torch_experts_checks(kind: DeviceKind, run: CheckRun) -> None:
    """What takes the kernel's place on chips before sm_80, over the same experts."""
    device = torch_device(kind)
    for dtype in half_types(kind):
        run.check(
            "torch_experts", f"torch_experts {dtype}", lambda dtype=dtype: _torch_error(dtype, device), TOLERANCE[dtype]
        )


def _torch_error(dtype: torch.dtype, device: torch.device) -> float:
    experts = PagedExperts(SHAPE, dtype, device, "16 bits")
    batch = PagedBatch(experts, 37, NUM_ASKED_FOR)
    return _off(batch, torch_experts(*batch.on_device, experts.exact["w13"], experts.exact["w2"]))


def _error(case: Case, device: torch.device) -> float:
    experts = PagedExperts(SHAPE, case.dtype, device, case.weights)
    batch = PagedBatch(experts, case.num_tokens, NUM_ASKED_FOR)
    no_chip = mock.patch.object(paged_moe_launch, "FIRST_WITH_FLOAT8", 1000)
    with no_chip if case.by_bits else nullcontext():
        return _off(batch, batch.run())


def _off(batch: PagedBatch, got: torch.Tensor) -> float:
    w13, w2 = (batch.experts.exact[matrix].cpu() for matrix in ("w13", "w2"))
    return relative_error(got.cpu(), expert_ffn(batch.hidden, w13, w2, batch.ids, batch.weights, dtype=torch.float64))
