"""Random expert layers for the CPU, with traps around them.

Weights of experts without tokens and the gaps between tokens hold NaN, memory that must not be written a sentinel.
"""

from dataclasses import dataclass

import torch

from tests.helpers.attention_batch import SENTINEL, nan_bytes
from vllm_moe_lightning.kernels import reference_ffn
from vllm_moe_lightning.kernels.attention import AttentionPool
from vllm_moe_lightning.kernels.expert_ffn import ExpertFfn, find_activation

GUARD = 64  # elements between tokens, before the first and behind the last


@dataclass(frozen=True)
class Case:
    num_tokens: int = 4
    top_k: int = 2
    num_experts: int = 4
    hidden_size: int = 64
    intermediate_size: int = 96
    dtype: torch.dtype = torch.bfloat16
    activation: str = "silu"
    interleaved: bool = False
    has_bias: bool = False
    num_used_experts: int | None = None  # tokens go to the first of the experts alone
    seed: int = 0


class Layer:
    """One case's tensors."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = torch.Generator().manual_seed(case.seed)
        experts, width, size = case.num_experts, case.hidden_size, case.intermediate_size
        used = case.num_used_experts or experts
        scores = torch.rand(case.num_tokens, used, generator=self.rng)
        self.topk_ids = scores.topk(case.top_k).indices.to(torch.int32)
        self.topk_weights = torch.rand(case.num_tokens, case.top_k, generator=self.rng)
        self.hidden = self._spread_rows(torch.randn(case.num_tokens, width, generator=self.rng))
        self.w13 = nan_bytes((experts, 2 * size, width), case.dtype)
        self.w2 = nan_bytes((experts, width, size), case.dtype)
        self.w13_bias = torch.full((experts, 2 * size), torch.nan) if case.has_bias else None
        self.w2_bias = torch.full((experts, width), torch.nan) if case.has_bias else None
        for expert in self.topk_ids.unique().tolist():
            self.w13[expert] = torch.randn(2 * size, width, generator=self.rng) / width**0.5
            self.w2[expert] = torch.randn(width, size, generator=self.rng) / size**0.5
            if self.w13_bias is not None and self.w2_bias is not None:
                self.w13_bias[expert] = torch.randn(2 * size, generator=self.rng)
                self.w2_bias[expert] = torch.randn(width, generator=self.rng)

    def _spread_rows(self, rows: torch.Tensor) -> torch.Tensor:
        spread = nan_bytes((len(rows), rows.shape[1] + GUARD), self.case.dtype)
        spread[:, : rows.shape[1]] = rows
        return spread[:, : rows.shape[1]]

    def expected(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        activation = find_activation(self.case.activation)
        return reference_ffn.expert_ffn(
            self.hidden,
            self.w13,
            self.w2,
            self.topk_ids,
            self.topk_weights,
            w13_bias=self.w13_bias,
            w2_bias=self.w2_bias,
            gate_alpha=activation.gate_alpha,
            clamp_limit=activation.clamp_limit,
            up_offset=activation.up_offset,
            interleaved=self.case.interleaved,
            dtype=dtype,
        )

    def experts(self, isa: str = "auto", max_streamed_tokens: int | None = None) -> ExpertFfn:
        return ExpertFfn(
            self.w13,
            self.w2,
            w13_bias=self.w13_bias,
            w2_bias=self.w2_bias,
            activation=self.case.activation,
            interleaved=self.case.interleaved,
            isa=isa,
            max_streamed_tokens=max_streamed_tokens,
        )

    def run(self, experts: ExpertFfn, pool: AttentionPool | None = None) -> torch.Tensor:
        """The output, once it is sure that nothing else was written."""
        num_tokens, width = self.case.num_tokens, self.case.hidden_size
        stride = width + GUARD
        buffer = torch.full((GUARD + num_tokens * stride,), SENTINEL, dtype=self.case.dtype)
        rows = buffer[GUARD:].view(num_tokens, stride)
        experts.run(self.hidden, self.topk_ids, self.topk_weights, rows[:, :width], pool=pool)
        assert (buffer[:GUARD] == SENTINEL).all()
        assert (rows[:, width:] == SENTINEL).all()
        return rows[:, :width].clone()


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the errors, over that of what is expected."""
    return float((actual.double() - expected).norm() / expected.norm())
