"""The competitors of benchmarks/cpu_ffn.py over one layer of experts, and the check that they compute the same."""

from __future__ import annotations

import importlib.util
import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from benchmarks.ffn_shapes import HUGE_PAGES, Setting
from benchmarks.round_figures import reads
from vllm_moe_lightning.kernels import reference_ffn
from vllm_moe_lightning.kernels.attention import AttentionPool, available_isas
from vllm_moe_lightning.kernels.expert_ffn import ExpertFfn
from vllm_moe_lightning.kernels.read_probe import read_once

OURS, TORCH_MM = "ours", "torch.mm"
# Random values are drawn for this many weights and repeated: drawing gigabytes would take longer than measuring.
DRAWN_WEIGHTS = 1 << 24
# Relative root mean square of a token's error: three times what roundings to bfloat16 explain.
TOKEN_TOLERANCE = 0.012
HUGE_PAGE_BYTES = 2 << 20
OTHER_ISAS = ("avx512", "avx2")


@dataclass(frozen=True)
class Arm:
    """run() computes all tokens and returns the output [num_tokens, hidden_size], or None if it only does a part of
    the work. Without run: why this machine or package cannot."""

    run: Callable[[], torch.Tensor | None] | None
    null_reason: str = ""
    note: str = ""


class Layer:
    """One Shape's weights, in 4 KB pages as the engine's host memory has them, or in huge ones."""

    def __init__(self, setting: Setting) -> None:
        self.shape = shape = setting.shape
        size = shape.weight_bytes
        if setting.group == HUGE_PAGES:
            mapping = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            mapping.madvise(mmap.MADV_HUGEPAGE)
        else:
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.weights = torch.frombuffer(mapping, dtype=shape.dtype, count=size // shape.dtype.itemsize)
        experts, width, inner = shape.num_experts, shape.hidden_size, shape.intermediate_size
        num_w13 = 2 * experts * inner * width
        self.w13 = self.weights[:num_w13].view(experts, 2 * inner, width)
        self.w2 = self.weights[num_w13:].view(experts, width, inner)
        rng = torch.Generator().manual_seed(0)
        drawn = torch.randn(min(DRAWN_WEIGHTS, self.weights.numel()), generator=rng)
        for part, scale in ((self.w13, width), (self.w2, inner)):
            numbers = (drawn / scale**0.5).to(shape.dtype)
            for piece in part.view(-1).split(len(numbers)):
                piece.copy_(numbers[: len(piece)])


class Batch:
    """Tokens for all experts of a layer, as many for each."""

    def __init__(self, layer: Layer, tokens_per_expert: int) -> None:
        self.layer, self.tokens_per_expert = layer, tokens_per_expert
        shape = layer.shape
        num_tokens = shape.num_tokens(tokens_per_expert)
        rng = torch.Generator().manual_seed(1)
        self.hidden = torch.randn(num_tokens, shape.hidden_size, generator=rng).to(shape.dtype)
        choices = torch.arange(num_tokens * shape.top_k) % shape.num_experts
        order = torch.randperm(shape.num_experts, generator=rng)
        self.topk_ids = order[choices].view(num_tokens, shape.top_k).to(torch.int32)
        self.topk_weights = torch.rand(num_tokens, shape.top_k, generator=rng)

    def expected(self, tokens: list[int]) -> torch.Tensor:
        return reference_ffn.expert_ffn(
            self.hidden[tokens], self.layer.w13, self.layer.w2, self.topk_ids[tokens], self.topk_weights[tokens]
        )


def read_passes(layer: Layer, pool: AttentionPool | None) -> dict[str, Callable[[], object]]:
    """The bound of few tokens: each pattern reads the very weights that our kernel reads."""
    return reads(lambda pattern: lambda: read_once(layer.weights, pattern, pool=pool))


def our_arms(batch: Batch, pool: AttentionPool | None, has_other_isas: bool) -> dict[str, Arm]:
    """As the entry point decides; and where it may go the other way, both ways by force."""
    layer = batch.layer
    ours = ExpertFfn(layer.w13, layer.w2)
    arms = {OURS: _our_arm(batch, ours, pool)}
    most = ours.max_streamed_tokens
    if most is not None and batch.tokens_per_expert > 16:
        arms["ours streamed"] = _our_arm(batch, ExpertFfn(layer.w13, layer.w2, max_streamed_tokens=1 << 30), pool)
        arms["ours by torch.mm"] = _our_arm(batch, ExpertFfn(layer.w13, layer.w2, max_streamed_tokens=1), pool)
    for isa in OTHER_ISAS if has_other_isas else ():
        name = f"ours {isa}"
        if isa == ours.isa:
            arms[name] = Arm(None, "this is what ours runs anyway")
        elif isa not in available_isas():
            arms[name] = Arm(None, f"this CPU has no {isa}")
        else:
            arms[name] = _our_arm(batch, ExpertFfn(layer.w13, layer.w2, isa=isa), pool)
    return arms


def _our_arm(batch: Batch, experts: ExpertFfn, pool: AttentionPool | None) -> Arm:
    output = torch.empty_like(batch.hidden)
    most = experts.max_streamed_tokens
    way = "streamed" if most is None or batch.tokens_per_expert <= most else TORCH_MM
    return Arm(
        lambda: experts.run(batch.hidden, batch.topk_ids, batch.topk_weights, output, pool=pool),
        note=f"{way}, {experts.isa}",
    )


def torch_mm_arm(batch: Batch) -> Arm:
    """The bound of many tokens: the products alone, on tokens that are already gathered."""
    layer, shape = batch.layer, batch.layer.shape
    hidden = torch.randn(batch.tokens_per_expert, shape.hidden_size).to(shape.dtype)
    inner = torch.randn(batch.tokens_per_expert, shape.intermediate_size).to(shape.dtype)

    def run() -> None:
        for expert in range(shape.num_experts):
            torch.mm(hidden, layer.w13[expert].T)
            torch.mm(inner, layer.w2[expert].T)

    return Arm(run)


class VllmWeights:
    """The layer's weights as vLLM's CPU experts want them packed; `isa` "amx" or "vec"."""

    def __init__(self, layer: Layer, isa: str) -> None:
        from vllm import _custom_ops as ops

        self.ops, self.isa = ops, isa
        self.w13 = ops.cpu_prepack_moe_weight(layer.w13, isa)
        self.w2 = ops.cpu_prepack_moe_weight(layer.w2, isa)

    def arm(self, batch: Batch) -> Arm:
        output = torch.empty_like(batch.hidden)

        def run() -> torch.Tensor:
            self.ops.cpu_fused_moe(
                output,
                batch.hidden,
                self.w13,
                self.w2,
                None,
                None,
                batch.topk_weights,
                batch.topk_ids,
                "silu",
                self.isa,
            )
            return output

        return Arm(run)


def vllm_weights(layer: Layer) -> dict[str, VllmWeights | str]:
    """Both of vLLM's x86 kernels: packed weights, or why there are none."""
    found: dict[str, VllmWeights | str] = {}
    for isa in ("amx", "vec"):
        if importlib.util.find_spec("vllm") is None:
            found[f"vllm {isa}"] = "vLLM is not installed"
        elif isa == "amx" and not torch.cpu._is_amx_tile_supported():
            found[f"vllm {isa}"] = "this CPU has no AMX tiles"
        elif isa == "amx" and not torch.cpu._init_amx():
            found[f"vllm {isa}"] = "the operating system grants no AMX tiles"
        else:
            found[f"vllm {isa}"] = VllmWeights(layer, isa)
    return found


def token_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of a token; NaN if there is one."""
    difference = (output.float() - expected.float()).norm(dim=-1)
    return float((difference / expected.float().norm(dim=-1)).max())


def check_agreement(batch: Batch, arms: Mapping[str, Arm]) -> dict[str, float]:
    """Largest relative errors of the first and the last token, to the fp32 reference.

    Raises ValueError when an arm computes something else, so that nobody compares speeds with it.
    """
    tokens = sorted({0, len(batch.hidden) - 1})
    expected = batch.expected(tokens)
    errors = {}
    for name, arm in arms.items():
        output = arm.run() if arm.run is not None else None
        if output is not None:
            errors[name] = token_error(output[tokens], expected)
            if not errors[name] <= TOKEN_TOLERANCE:  # NaN is refused too
                raise ValueError(
                    f"{batch.layer.shape}, {batch.tokens_per_expert} tokens per expert: {name!r} is off by "
                    f"{errors[name]:.2g} of a token, more than rounding explains"
                )
    assert not math.isnan(sum(errors.values()))
    return errors
