"""Writes a random mixture-of-experts checkpoint of Mixtral's shape, without a tokenizer: requests are token ids."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

WEIGHT_STD = 0.02


@dataclass(frozen=True)
class CheckpointShape:
    num_layers: int = 8
    hidden: int = 512
    intermediate: int = 768
    num_experts: int = 8
    top_k: int = 2
    num_heads: int = 8
    num_kv_heads: int = 2
    vocab: int = 1024

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads

    @property
    def expert_bytes(self) -> int:
        """Of all layers, in bfloat16."""
        return self.num_layers * self.num_experts * 3 * self.hidden * self.intermediate * 2

    @property
    def kv_bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * 2

    def config(self, max_positions: int) -> dict[str, object]:
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": max_positions,
            "num_attention_heads": self.num_heads,
            "num_experts_per_tok": self.top_k,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "num_local_experts": self.num_experts,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocab,
        }


def write_checkpoint(folder: Path, shape: CheckpointShape, max_positions: int, seed: int = 0) -> None:
    """config.json and model.safetensors, bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def linear(name: str, out_features: int, in_features: int) -> None:
        drawn = torch.randn(out_features, in_features, generator=generator) * WEIGHT_STD
        tensors[f"{name}.weight"] = drawn.to(torch.bfloat16)

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = torch.ones(shape.hidden, dtype=torch.bfloat16)

    hidden, kv_features = shape.hidden, shape.num_kv_heads * shape.head_dim
    linear("model.embed_tokens", shape.vocab, hidden)
    for index in range(shape.num_layers):
        layer = f"model.layers.{index}"
        norm(f"{layer}.input_layernorm")
        norm(f"{layer}.post_attention_layernorm")
        for part, features in (("q", hidden), ("k", kv_features), ("v", kv_features), ("o", hidden)):
            linear(f"{layer}.self_attn.{part}_proj", features, hidden)
        linear(f"{layer}.block_sparse_moe.gate", shape.num_experts, hidden)
        for expert in range(shape.num_experts):
            experts = f"{layer}.block_sparse_moe.experts.{expert}"
            linear(f"{experts}.w1", shape.intermediate, hidden)
            linear(f"{experts}.w3", shape.intermediate, hidden)
            linear(f"{experts}.w2", hidden, shape.intermediate)
    norm("model.norm")
    linear("lm_head", shape.vocab, hidden)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape.config(max_positions), indent=2))
