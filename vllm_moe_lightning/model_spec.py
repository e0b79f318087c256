"""The sizes of a mixture-of-experts model, as far as time and memory depend on them.

Decides how parameters, bytes and FLOPs are counted; reading them from a checkpoint's config.json is model_config's
business. Norms, biases of projections and rotary tables are left out: together under 0.1 % of any model here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.kv_cache_type import QUANTISED_TYPES, quantised_row_bytes
from vllm_moe_lightning.rowwise import larger, smaller

# Gate, up and down projection: every model here has gated experts.
MATRICES_PER_FFN = 3
FLOPS_PER_PARAM = 2  # a multiply and an add per weight and token


@dataclass(frozen=True)
class AttentionSpec:
    """One attention layer. With MLA the cache holds one latent per token, shared by all heads."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    """Of a query head; the query is num_q_heads x head_dim wide, which need not be the hidden size."""
    pre_params: int
    """Q, K and V projections (MLA: both low-rank pairs)."""
    post_params: int
    """Output projection."""
    kv_elements_per_token: int
    q_elements_per_token: int
    """What decode attention needs of a new token beside its K and V (MLA: query in latent space)."""
    out_elements_per_token: int
    """What decode attention gives back for a new token."""
    decode_flops_per_pair: int
    """FLOPs per (new token, cached token): QK^T and PV, both counted."""
    prefill_flops_per_pair: int
    is_latent: bool = False

    @classmethod
    def grouped_query(cls, hidden: int, num_q_heads: int, num_kv_heads: int, head_dim: int) -> AttentionSpec:
        """MHA, GQA and MQA."""
        width = num_q_heads * head_dim
        return cls(
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            pre_params=hidden * (width + 2 * num_kv_heads * head_dim),
            post_params=width * hidden,
            kv_elements_per_token=2 * num_kv_heads * head_dim,
            q_elements_per_token=width,
            out_elements_per_token=width,
            decode_flops_per_pair=4 * width,
            prefill_flops_per_pair=4 * width,
        )

    @classmethod
    def latent(
        cls, hidden: int, num_heads: int, q_lora: int | None, kv_lora: int, nope: int, rope: int, value: int
    ) -> AttentionSpec:
        """Multi-head latent attention: decode works in the latent space (the absorbed form), prefill per head."""
        q_params = (
            hidden * num_heads * (nope + rope) if q_lora is None else q_lora * (hidden + num_heads * (nope + rope))
        )
        kv_params = hidden * (kv_lora + rope) + kv_lora * num_heads * (nope + value)
        return cls(
            num_q_heads=num_heads,
            num_kv_heads=1,
            head_dim=nope + rope,
            pre_params=q_params + kv_params,
            post_params=num_heads * value * hidden,
            kv_elements_per_token=kv_lora + rope,
            q_elements_per_token=num_heads * (kv_lora + rope),
            out_elements_per_token=num_heads * kv_lora,
            decode_flops_per_pair=2 * num_heads * (2 * kv_lora + rope),
            prefill_flops_per_pair=2 * num_heads * (nope + rope + value),
            is_latent=True,
        )

    @property
    def params(self) -> int:
        return self.pre_params + self.post_params


@dataclass(frozen=True)
class WeightWidths:
    """Bytes per parameter in memory, the scales of a quantisation included."""

    expert_bytes: float = 2.0
    """Routed experts."""
    linear_bytes: float = 2.0
    """Projections, dense FFN, shared experts."""
    other_bytes: float = 2.0
    """Embeddings, LM head, router: no quantisation here touches them."""
    activation_bytes: int = 2


@dataclass(frozen=True)
class MoeModelSpec:
    name: str
    model_type: str
    num_layers: int
    num_dense_layers: int
    """Decoder layers with a plain FFN in place of experts."""
    hidden: int
    vocab: int
    num_experts: int
    top_k: int
    expert_intermediate: int
    attention: AttentionSpec
    shared_intermediate: int = 0
    """Of all shared experts of a layer together; 0 without."""
    dense_intermediate: int = 0
    tied_embeddings: bool = False
    expert_biases: bool = False
    num_windowed_layers: int = 0
    """Layers whose attention looks back `window` tokens at most."""
    window: int = 0
    has_sinks: bool = False
    """Attention with a logit per head that has no value."""
    widths: WeightWidths = WeightWidths()
    kv_bytes_per_element: float = 2.0
    max_context: int | None = None

    def __post_init__(self) -> None:
        positive = ("num_layers", "hidden", "vocab", "num_experts", "top_k", "expert_intermediate")
        wrong = {name: getattr(self, name) for name in positive if getattr(self, name) < 1}
        if wrong:
            raise ValueError(f"{self.name}: must be positive: {wrong}")
        if not 0 <= self.num_dense_layers < self.num_layers:
            raise ValueError(
                f"{self.name}: {self.num_dense_layers} dense of {self.num_layers} layers leave no MoE layer"
            )
        if self.top_k > self.num_experts:
            raise ValueError(f"{self.name}: top_k {self.top_k} of only {self.num_experts} experts")

    # Parameters

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers

    @property
    def params_per_expert(self) -> int:
        biases = 2 * self.expert_intermediate + self.hidden if self.expert_biases else 0
        return MATRICES_PER_FFN * self.hidden * self.expert_intermediate + biases

    @property
    def routed_params_per_layer(self) -> int:
        return self.num_experts * self.params_per_expert

    @property
    def shared_params_per_layer(self) -> int:
        return MATRICES_PER_FFN * self.hidden * self.shared_intermediate

    @property
    def router_params_per_layer(self) -> int:
        return self.hidden * self.num_experts

    @property
    def dense_params_per_layer(self) -> int:
        return MATRICES_PER_FFN * self.hidden * self.dense_intermediate

    @property
    def embedding_params(self) -> int:
        """Input embedding and LM head."""
        return self.vocab * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def params_by_part(self) -> Mapping[str, int]:
        return MappingProxyType(
            {
                "routed experts": self.num_moe_layers * self.routed_params_per_layer,
                "shared experts": self.num_moe_layers * self.shared_params_per_layer,
                "router": self.num_moe_layers * self.router_params_per_layer,
                "dense ffn": self.num_dense_layers * self.dense_params_per_layer,
                "attention": self.num_layers * self.attention.params,
                "embeddings": self.embedding_params,
            }
        )

    @property
    def total_params(self) -> int:
        return sum(self.params_by_part.values())

    @property
    def active_params(self) -> int:
        """Used by one token."""
        idle = self.num_moe_layers * (self.num_experts - self.top_k) * self.params_per_expert
        return self.total_params - idle

    # Bytes

    @property
    def expert_layer_bytes(self) -> float:
        """Routed experts of one MoE layer: what is resident or streamed as a whole."""
        return self.routed_params_per_layer * self.widths.expert_bytes

    @property
    def expert_bytes_total(self) -> float:
        return self.num_moe_layers * self.expert_layer_bytes

    @property
    def always_resident_bytes(self) -> float:
        """All weights but the routed experts: they stay on the GPU."""
        parts = self.params_by_part
        linear = parts["attention"] + parts["shared experts"] + parts["dense ffn"]
        other = parts["router"] + parts["embeddings"]
        return linear * self.widths.linear_bytes + other * self.widths.other_bytes

    @property
    def total_bytes(self) -> float:
        return self.expert_bytes_total + self.always_resident_bytes

    @property
    def kv_bytes_per_token_layer(self) -> float:
        return self.attention.kv_elements_per_token * self.kv_bytes_per_element

    @property
    def kv_bytes_per_token(self) -> float:
        """Over all layers. Windowed layers are cached in full too: the engine's pages don't forget."""
        return self.num_layers * self.kv_bytes_per_token_layer

    # Work

    def expected_experts_touched(self, num_tokens: float) -> float:
        """Distinct experts that `num_tokens` tokens choose, routing uniformly: E * (1 - (1 - k/E)^tokens)."""
        idle: float = (1.0 - self.top_k / self.num_experts) ** num_tokens
        return self.num_experts * (1.0 - idle)

    def mean_context_read(self, context: float) -> float:
        """Tokens of KV that decode attention reads per sequence, averaged over the layers."""
        if not self.num_windowed_layers:
            return context
        windowed = min(context, self.window) * self.num_windowed_layers
        return (windowed + context * (self.num_layers - self.num_windowed_layers)) / self.num_layers

    def mean_causal_pairs(self, prompt_len: float) -> float:
        """(query, key) pairs of prefill attention per sequence and layer: half of the square, less what a window
        cuts off."""

        def pairs(window: float) -> float:
            full = smaller(prompt_len, window)
            return full * (full + 1) / 2 + larger(prompt_len - window, 0.0) * window

        windowed = self.num_windowed_layers / self.num_layers
        return (1 - windowed) * pairs(prompt_len) + (windowed * pairs(self.window) if windowed else 0.0)

    def with_kv_bytes_per_element(self, kv_bytes_per_element: float) -> MoeModelSpec:
        return replace(self, kv_bytes_per_element=kv_bytes_per_element)

    def with_kv_cache_dtype(self, name: str) -> MoeModelSpec:
        """With the cache of a type that vLLM's --kv-cache-dtype names, its scales included; "auto" and names of plain
        types leave it the model's own. Raises UnsupportedError where the cache is not one of heads."""
        if name not in QUANTISED_TYPES:
            return self
        if self.attention.is_latent:
            raise UnsupportedError(f"{self.name}: --kv-cache-dtype {name} needs keys and values per head; drop it")
        head_dim = self.attention.head_dim
        return self.with_kv_bytes_per_element(quantised_row_bytes(head_dim) / head_dim)
