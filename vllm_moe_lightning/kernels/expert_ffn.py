"""The routed experts of a layer on the CPU, from weights as vLLM holds them before packing: read in place.

Checks everything that the C side takes on trust and decides for each expert which way it goes: streamed through our C
kernel (up to 16 tokens at the speed of memory), or through torch.mm where that is faster. Letters in shapes: T tokens,
K choices of each (top_k), E experts, H hidden size, I intermediate size.

Accuracy, relative RMS against float64: streamed 0.0024 in bfloat16 (the product of both gates and the output are
rounded), 0.0003 in float16, 1e-6 in float32; torch.mm rounds every product, 0.0039 in bfloat16.
"""

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import torch

from vllm_moe_lightning.errors import DeviceTaskError, UnsupportedError
from vllm_moe_lightning.kernels import native
from vllm_moe_lightning.kernels.attention import DTYPE_CODES, ISA_BY_NAME, AttentionPool, resolve_isa

SIZE_STEP = 8
TOKENS_PER_PASS = 16
"""Of an expert: what one pass over its weights serves, see csrc/ffn.h."""
TOKENS_PAST_VNNI = 128
"""Of an expert, at which oneDNN's bfloat16 GEMM overtakes our kernel where both use the same dot product (Zen 5)."""


@dataclass(frozen=True)
class GatedActivation:
    """gate * sigmoid(gate_alpha * gate) * (up + up_offset), gate and |up| held to clamp_limit first."""

    gate_alpha: float = 1.0
    clamp_limit: float = math.inf
    up_offset: float = 0.0


ACTIVATIONS = {
    "silu": GatedActivation(),
    "swigluoai": GatedActivation(gate_alpha=1.702, clamp_limit=7.0, up_offset=1.0),
}
"""By vLLM's names."""


def default_max_streamed_tokens(dtype: torch.dtype, isa: str) -> int | None:
    """The most tokens with which an expert is streamed; None: any number.

    By what the CPU has, not by a timing, so that a machine gives the same bits in every run. Only bfloat16 has a GEMM
    in torch that is worth leaving the C kernel for: with AMX from the first token that a pass does not serve, without
    it not before both are bound by arithmetic. float32 is twice as fast streamed (torch.mm on Zen 5), float16 has no
    GEMM to speak of (0.3 GFLOP/s).
    """
    if dtype != torch.bfloat16:
        return None
    if torch.cpu.get_capabilities().get("amx_bf16"):
        return TOKENS_PER_PASS
    return TOKENS_PAST_VNNI if isa == "avx512bf16" else None


@dataclass
class ExpertFfnCounters:
    """Which way the experts of all calls went: one count for each expert with tokens in a call."""

    num_streamed: int = 0
    """Through the C kernel."""
    num_gemm: int = 0
    """Through torch.mm."""
    num_streamed_tokens: int = 0
    num_gemm_tokens: int = 0


class ExpertFfn:
    """The experts of one layer. Owns no weights: what it is given must stay where it is."""

    def __init__(
        self,
        w13: torch.Tensor,  # [E, 2 I, H]: w1's rows (gate), then w3's (up)
        w2: torch.Tensor,  # [E, H, I]
        *,
        w13_bias: torch.Tensor | None = None,  # [E, 2 I], any float dtype: kept in float32
        w2_bias: torch.Tensor | None = None,  # [E, H]
        activation: str | GatedActivation = "silu",
        interleaved: bool = False,  # w13's rows are gate, up, gate, up, ...
        isa: str = "auto",
        max_streamed_tokens: int | None = None,  # experts with more tokens in a call go through torch.mm; None: by CPU
    ) -> None:
        self.num_experts, self.hidden_size, self.intermediate_size = check_weights(w13, w2)
        self.w13, self.w2 = w13, w2
        self.w13_bias = _bias("w13_bias", w13_bias, (self.num_experts, 2 * self.intermediate_size))
        self.w2_bias = _bias("w2_bias", w2_bias, (self.num_experts, self.hidden_size))
        self.activation = find_activation(activation)
        self.interleaved = interleaved
        self.isa = resolve_isa(isa, w13.dtype)
        if max_streamed_tokens is not None and max_streamed_tokens < 1:
            raise ValueError(f"max_streamed_tokens must be at least 1, got {max_streamed_tokens}")
        self.max_streamed_tokens = max_streamed_tokens or default_max_streamed_tokens(w13.dtype, self.isa)
        self.counters = ExpertFfnCounters()

    def run(
        self,
        hidden: torch.Tensor,  # [T, H], of the weights' dtype; any stride between tokens
        topk_ids: torch.Tensor,  # [T, K]; negative: computed elsewhere
        topk_weights: torch.Tensor,  # [T, K]
        output: torch.Tensor | None = None,  # [T, H]; made if not given
        *,
        pool: AttentionPool | None = None,
    ) -> torch.Tensor:
        """Computes on the calling thread: its pool's threads in C, torch's own in torch.mm. Returns the output."""
        topk_ids, topk_weights = topk_ids.to(torch.int32).contiguous(), topk_weights.float().contiguous()
        if output is None:
            output = torch.empty(hidden.shape, dtype=hidden.dtype)
        if topk_ids.numel() and int(topk_ids.max()) >= self.num_experts:
            raise ValueError(f"topk_ids names expert {int(topk_ids.max())} of {self.num_experts}")
        counts = torch.bincount(topk_ids[topk_ids >= 0], minlength=self.num_experts)
        most = self.max_streamed_tokens
        is_gemm = counts > (len(topk_ids) * topk_ids.shape[1] if most is None else most)
        task = ExpertFfnTask(self, hidden, topk_ids, topk_weights, output, pool=pool)
        if most is not None and bool(is_gemm.any()):
            addend = torch.zeros(hidden.shape, dtype=torch.float32)
            for expert in is_gemm.nonzero()[:, 0].tolist():
                self._add_by_gemm(expert, hidden, topk_ids, topk_weights, addend)
            task.leave_out(most, addend)
        task.run()
        self._count(counts, is_gemm)
        return output

    def _count(self, counts: torch.Tensor, is_gemm: torch.Tensor) -> None:
        num_tokens, num_gemm_tokens = int(counts.sum()), int(counts[is_gemm].sum())
        num_experts, num_gemm = int((counts > 0).sum()), int(is_gemm.sum())
        self.counters.num_gemm += num_gemm
        self.counters.num_streamed += num_experts - num_gemm
        self.counters.num_gemm_tokens += num_gemm_tokens
        self.counters.num_streamed_tokens += num_tokens - num_gemm_tokens

    def _add_by_gemm(
        self,
        expert: int,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        total: torch.Tensor,  # [T, H] float32
    ) -> None:
        tokens, choices = (topk_ids == expert).nonzero(as_tuple=True)
        product = torch.mm(hidden[tokens], self.w13[expert].T).float()
        if self.w13_bias is not None:
            product += self.w13_bias[expert]
        gate, up = (product[:, 0::2], product[:, 1::2]) if self.interleaved else product.chunk(2, dim=1)
        act = self.activation
        if act.clamp_limit < math.inf:
            gate, up = gate.clamp(max=act.clamp_limit), up.clamp(-act.clamp_limit, act.clamp_limit)
        inner = torch.sigmoid(gate * act.gate_alpha).mul_(gate).mul_(up + act.up_offset if act.up_offset else up)
        result = torch.mm(inner.to(hidden.dtype), self.w2[expert].T).float()
        if self.w2_bias is not None:
            result += self.w2_bias[expert]
        total.index_add_(0, tokens, result.mul_(topk_weights[tokens, choices][:, None]))


class ExpertFfnTask:
    """One call of mol_expert_ffn for all experts: `HostTaskStream.call(task.function, task.argument, keep_alive=task)`.

    Contents are read when the task runs, and an expert id that does not exist is refused then. An expert with more
    than TOKENS_PER_PASS tokens is computed too, in several passes over its weights of which all but the first hit the
    cache.
    """

    def __init__(
        self,
        experts: ExpertFfn,
        hidden: torch.Tensor,  # [T, H], of the weights' dtype; any stride between tokens
        topk_ids: torch.Tensor,  # [T, K] int32; negative: computed elsewhere
        topk_weights: torch.Tensor,  # [T, K] float32
        output: torch.Tensor,  # [T, H]; hidden itself is refused
        *,
        pool: AttentionPool | None = None,
    ) -> None:
        num_tokens = hidden.shape[0] if hidden.dim() == 2 else -1
        for name, tensor in (("hidden", hidden), ("output", output)):
            _check_rows(name, tensor, (num_tokens, experts.hidden_size), experts.w13.dtype)
        if num_tokens and hidden.data_ptr() == output.data_ptr():
            raise ValueError("output must not be hidden itself: it is written while hidden may still be read")
        top_k = topk_ids.shape[1] if topk_ids.dim() == 2 else 0
        if top_k < 1:
            raise ValueError(f"topk_ids must be [tokens, top_k], got {_show(topk_ids)}")
        _check_plain("topk_ids", topk_ids, (num_tokens, top_k), torch.int32)
        _check_plain("topk_weights", topk_weights, (num_tokens, top_k), torch.float32)
        self._kept: list[object] = [experts, hidden, topk_ids, topk_weights, output, pool]
        self.argument = native.ExpertFfnTask(
            hidden=hidden.data_ptr(),
            output=output.data_ptr(),
            hidden_token_stride=_token_stride(hidden),
            output_token_stride=_token_stride(output),
            w13=experts.w13.data_ptr(),
            w2=experts.w2.data_ptr(),
            w13_bias=None if experts.w13_bias is None else experts.w13_bias.data_ptr(),
            w2_bias=None if experts.w2_bias is None else experts.w2_bias.data_ptr(),
            topk_ids=topk_ids.data_ptr(),
            topk_weights=topk_weights.data_ptr(),
            num_tokens=num_tokens,
            top_k=top_k,
            num_experts=experts.num_experts,
            hidden_size=experts.hidden_size,
            intermediate_size=experts.intermediate_size,
            dtype=DTYPE_CODES[experts.w13.dtype],
            isa=ISA_BY_NAME[experts.isa],
            interleaved=experts.interleaved,
            gate_alpha=experts.activation.gate_alpha,
            clamp_limit=experts.activation.clamp_limit,
            up_offset=experts.activation.up_offset,
            pool=None if pool is None else pool.pointer,
        )
        # The C function itself: a stream's thread calls it without the GIL.
        self.function: Any = native.library().mol_expert_ffn

    def leave_out(self, max_tokens_per_expert: int, addend: torch.Tensor) -> None:
        """Experts with more tokens are not computed: `addend` [T, H] float32 is what they gave."""
        shape = (self.argument.num_tokens, self.argument.hidden_size)
        _check_plain("addend", addend, shape, torch.float32)
        self._kept.append(addend)
        self.argument.addend = addend.data_ptr()
        self.argument.max_tokens_per_expert = max_tokens_per_expert

    def run(self) -> None:
        """Runs the task on the calling thread (and its pool), without the GIL."""
        code = self.function(ctypes.byref(self.argument))
        if code != native.OK:
            raise DeviceTaskError(f"the CPU experts failed: {native.ERROR_NAMES.get(code, f'code {code}')}")


def find_activation(activation: str | GatedActivation) -> GatedActivation:
    if isinstance(activation, GatedActivation):
        numbers = (activation.gate_alpha, activation.up_offset)
        if not all(map(math.isfinite, numbers)) or not activation.clamp_limit > 0:
            raise ValueError(f"gate_alpha and up_offset must be finite, clamp_limit positive: got {activation}")
        return activation
    if activation not in ACTIVATIONS:
        raise UnsupportedError(
            f"CPU experts have no activation {activation!r}, only {', '.join(ACTIVATIONS)}; "
            "keep this model's experts on the device"
        )
    return ACTIVATIONS[activation]


def check_weights(w13: torch.Tensor, w2: torch.Tensor) -> tuple[int, int, int]:
    """num_experts, hidden_size and intermediate_size of weights that the kernels can use."""
    if w13.dim() != 3 or w2.dim() != 3 or w13.shape != (w2.shape[0], 2 * w2.shape[2], w2.shape[1]):
        raise ValueError(
            f"w13 must be [experts, 2 * intermediate, hidden] and w2 [experts, hidden, intermediate], "
            f"got {_show(w13)} and {_show(w2)}"
        )
    if w13.dtype not in DTYPE_CODES or w2.dtype != w13.dtype:
        names = ", ".join(str(dtype) for dtype in DTYPE_CODES)
        raise ValueError(f"w13 and w2 must both be one of {names}, got {w13.dtype} and {w2.dtype}")
    for name, tensor in (("w13", w13), ("w2", w2)):
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.numel() == 0:
            raise ValueError(f"{name} must be contiguous host memory and not empty, got {_show(tensor)}")
    num_experts, hidden_size, intermediate_size = w2.shape
    if hidden_size % SIZE_STEP or intermediate_size % SIZE_STEP:
        raise UnsupportedError(
            f"CPU experts need hidden and intermediate sizes that are multiples of {SIZE_STEP}, "
            f"got {hidden_size} and {intermediate_size}; keep this model's experts on the device"
        )
    return num_experts, hidden_size, intermediate_size


def _bias(name: str, bias: torch.Tensor | None, shape: tuple[int, int]) -> torch.Tensor | None:
    if bias is None:
        return None
    if tuple(bias.shape) != shape or not bias.is_floating_point() or bias.device.type != "cpu":
        raise ValueError(f"{name} must be {list(shape)} of a float dtype on the host, got {_show(bias)}")
    return bias.float().contiguous()


def _check_rows(name: str, tensor: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device.type != "cpu":
        raise ValueError(f"{name} must be {list(shape)} of {dtype} on the host, got {_show(tensor)}")
    if tensor.numel() and not (tensor.stride(1) == 1 and _token_stride(tensor) >= shape[1]):
        raise ValueError(f"{name}: a token's elements must be adjacent, tokens must not overlap, got {_show(tensor)}")


def _token_stride(tensor: torch.Tensor) -> int:
    """Elements from token to token; of a single token torch may report any stride."""
    return tensor.stride(0) if tensor.shape[0] > 1 else tensor.shape[1]


def _check_plain(name: str, tensor: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
    is_right = tuple(tensor.shape) == shape and tensor.dtype == dtype
    if not (is_right and tensor.device.type == "cpu" and tensor.is_contiguous()):
        raise ValueError(f"{name} must be contiguous {dtype} of shape {list(shape)} on the host, got {_show(tensor)}")


def _show(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}, strides {list(tensor.stride())}"
