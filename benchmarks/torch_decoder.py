"""A mixture-of-experts decoder in plain torch, the engine's model where there is no vLLM.

Between its yields (a layer's entry, attention, and experts that are not at hand) it does what a vLLM model does. Who
pauses it, who computes attention and where experts are is the caller's: the engine (decoder_engine.py), or nobody and a
plain call (`kernel_attention`, `reference_attention`). Letters in shapes: T tokens, H hidden, E experts, K of a token,
I intermediate, Hq query heads, Hk key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from vllm_moe_lightning.kernels import reference
from vllm_moe_lightning.kernels.attention import AttentionPool
from vllm_moe_lightning.kv_cache import HostKvCache
from vllm_moe_lightning.pipeline.attention import AttentionOptions, AttentionRows, attention_task
from vllm_moe_lightning.weights.store import ExpertLayer

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, query [T, Hq, D], key [T, Hk, D], value [T, Hk, D]) -> output [T, Hq, D]"""

Experts = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None]
"""(layer, hidden [T, H], weights float32 [T, K], ids [T, K]) -> output [T, H] of the routed experts, which somebody
else computed; None: they are at hand."""

ROPE_BASE = 10_000.0
CPU = torch.device("cpu")


@dataclass(frozen=True)
class DecoderConfig:
    num_layers: int = 4
    hidden: int = 32
    intermediate: int = 48
    num_experts: int = 4
    top_k: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    vocab_size: int = 64
    dense_layers: tuple[int, ...] = ()
    """Layers with one MLP in place of experts."""
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(scale=self.head_dim**-0.5)

    @property
    def qkv_bytes_per_token(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.dtype.itemsize


class MatrixDrawer:
    """Draws matrices so that outputs are as wide as inputs; the last dimension is the one that is summed over.

    On the generator's device and then to `device`: the same matrices for the same generator.
    """

    def __init__(
        self, config: DecoderConfig, rng: torch.Generator, device: torch.device = CPU, dtype: torch.dtype | None = None
    ) -> None:
        self._config, self._rng, self._device = config, rng, device
        self._drawn_as = dtype or torch.float32

    def __call__(self, *shape: int) -> torch.nn.Parameter:
        data = torch.randn(*shape, generator=self._rng, device=self._rng.device, dtype=self._drawn_as)
        data = data.mul_(shape[-1] ** -0.5).to(self._device, self._config.dtype)
        return torch.nn.Parameter(data, requires_grad=False)


def at_hand(layer: int, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
    """No experts are elsewhere."""


class SparseMlp:
    """Router and experts, with the experts stacked as vLLM stacks them. One expert and no router if dense."""

    def __init__(self, config: DecoderConfig, draw: MatrixDrawer, draw_experts: MatrixDrawer, *, dense: bool) -> None:
        num_experts = 1 if dense else config.num_experts
        self.top_k = 1 if dense else config.top_k
        self.router = None if dense else draw(num_experts, config.hidden)  # [E, H]
        draw_ffn = draw if dense else draw_experts
        self.w13 = draw_ffn(num_experts, 2 * config.intermediate, config.hidden)  # [E, 2I, H]
        self.w2 = draw_ffn(num_experts, config.hidden, config.intermediate)  # [E, H, I]

    def __call__(self, layer: int, x: torch.Tensor, elsewhere: Experts) -> torch.Tensor:
        """x: [T, H] -> [T, H]. Grouped by expert, so that each expert's weights are read once."""
        if self.router is None:
            return self._expert(x, self.w13.data[0], self.w2.data[0])
        probabilities = torch.softmax((x @ self.router.T).float(), dim=-1)
        weights, experts = probabilities.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        if (computed := elsewhere(layer, x, weights, experts)) is not None:
            return computed
        w13, w2 = self.w13.data, self.w2.data
        weights = weights.to(x.dtype)
        if x.is_cuda:
            dense = torch.zeros_like(probabilities, dtype=x.dtype).scatter_(1, experts, weights)
            return self._every_expert(x, w13, w2, dense)
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        tokens = order // self.top_k
        gathered, scale = x[tokens], weights.flatten()[order, None]
        output, begin = torch.zeros_like(x), 0
        for expert, count in enumerate(chosen.bincount(minlength=len(w13)).tolist()):
            if count:
                part = slice(begin, begin + count)
                output.index_add_(0, tokens[part], self._expert(gathered[part], w13[expert], w2[expert]) * scale[part])
                begin += count
        return output

    @staticmethod
    def _every_expert(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Every token through every expert, weights [T, E] zero where it was not chosen: E / top_k times the
        arithmetic, and no wait for the GPU to learn how many tokens an expert has."""
        gate, up = torch.bmm(x.expand(len(w13), -1, -1), w13.transpose(1, 2)).chunk(2, dim=-1)
        output = torch.bmm(F.silu(gate) * up, w2.transpose(1, 2))  # [E, T, H]
        return (output * weights.T[:, :, None]).sum(dim=0)

    @staticmethod
    def _expert(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        gate, up = torch.mm(x, w13.T).chunk(2, dim=-1)
        return torch.mm(F.silu(gate) * up, w2.T)


class DecoderLayer:
    def __init__(self, config: DecoderConfig, index: int, draw: MatrixDrawer, draw_experts: MatrixDrawer) -> None:
        self.config, self.index = config, index
        heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv = draw(heads * config.head_dim, config.hidden)
        self.o_proj = draw(config.hidden, config.num_heads * config.head_dim)
        self.mlp = SparseMlp(config, draw, draw_experts, dense=index in config.dense_layers)

    @property
    def other_bytes(self) -> int:
        """Of everything but experts."""
        mlp = self.mlp
        tensors = [self.qkv, self.o_proj, *([mlp.w13, mlp.w2] if mlp.router is None else [mlp.router])]
        return sum(tensor.nbytes for tensor in tensors)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend, elsewhere: Experts) -> torch.Tensor:
        """x: [T, H], positions: [T] -> [T, H]"""
        config = self.config
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        qkv = (_norm(x) @ self.qkv.T).unflatten(-1, (sum(heads), config.head_dim))
        query, key, value = qkv.split(heads, dim=1)
        attended = attend(self.index, _rotate(query, positions), _rotate(key, positions), value)
        x = x + attended.flatten(1) @ self.o_proj.T
        return x + self.mlp(self.index, _norm(x), elsewhere)


class MoeDecoder:
    """The same weights for the same config, on the CPU unless drawers say otherwise: `draw` for all but the experts."""

    def __init__(
        self, config: DecoderConfig, draw: MatrixDrawer | None = None, draw_experts: MatrixDrawer | None = None
    ) -> None:
        self.config = config
        draw = draw or MatrixDrawer(config, torch.Generator().manual_seed(config.seed))
        self.embedding = draw(config.vocab_size, config.hidden)
        self.layers = [DecoderLayer(config, index, draw, draw_experts or draw) for index in range(config.num_layers)]

    @property
    def other_bytes(self) -> int:
        """Of everything but experts."""
        return self.embedding.nbytes + sum(layer.other_bytes for layer in self.layers)

    def forward(
        self,
        token_ids: torch.Tensor,  # [T]
        positions: torch.Tensor,  # [T]
        attend: Attend,
        pause: Callable[[], None] = lambda: None,
        elsewhere: Experts = at_hand,
    ) -> torch.Tensor:
        """Hidden states [T, H]. `pause` is called at each layer's entry, `elsewhere` where a layer has experts."""
        x = self.embedding.data[token_ids] * self.config.hidden**0.5
        for layer in self.layers:
            pause()
            x = layer(x, positions, attend, elsewhere)
        return _norm(x)

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [T, H] -> token ids [T]"""
        return (hidden @ self.embedding.T).argmax(dim=-1)

    def expert_layers(self) -> list[ExpertLayer]:
        """What the paged store takes over."""
        return [
            ExpertLayer(layer.index, f"layers.{layer.index}.experts", {"w13": layer.mlp.w13, "w2": layer.mlp.w2})
            for layer in self.layers
            if layer.mlp.router is not None
        ]


def _norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


def _rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding. x: [T, heads, D], positions: [T] -> [T, heads, D]"""
    half = x.shape[-1] // 2
    frequencies = ROPE_BASE ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, None, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def kernel_attention(
    config: DecoderConfig, caches: Sequence[HostKvCache], rows: AttentionRows, pool: AttentionPool | None = None
) -> Attend:
    """The engine's kernel, called at once on the calling thread: equal to the engine's output bit by bit."""

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(query)
        attention_task(
            caches[layer],
            rows,
            config.options,
            query=query.contiguous(),
            key=key.contiguous(),
            value=value.contiguous(),
            output=output,
            pool=pool,
        ).run()
        return output

    return attend


def reference_attention(config: DecoderConfig, caches: Sequence[HostKvCache], rows: AttentionRows) -> Attend:
    """Plain torch in float32: right, and equal to the kernel up to rounding."""

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        blocks = caches[layer].blocks
        reference.append(blocks, key, value, rows.slot_mapping)
        output = reference.paged_attention(
            query, blocks, rows.block_table, rows.query_start, rows.seq_lens, scale=config.options.scale
        )
        return output.to(query.dtype)

    return attend
