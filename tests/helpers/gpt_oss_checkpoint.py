# SPDX-License-Identifier: Apache-2.0
"""A random gpt-oss checkpoint: mxfp4 experts in one tensor per layer, biases, attention sinks and windows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.helpers.checkpoints import VOCAB_SIZE, Draw, write_tokenizer
from tests.helpers.quantised_checkpoints import HIDDEN, INTERMEDIATE, MXFP4_GROUP, NUM_EXPERTS, mxfp4

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64


def write_gpt_oss(folder: Path, *, num_layers: int = 3, seed: int = 0) -> Path:
    draw = Draw(seed)
    tensors: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": draw.embedding("embed", VOCAB_SIZE, HIDDEN),
        "model.norm.weight": draw.norm("norm", HIDDEN),
        "lm_head.weight": draw.linear("lm_head", VOCAB_SIZE, HIDDEN),
    }
    for index in range(num_layers):
        layer = f"model.layers.{index}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = draw.norm(f"{index}{name}", HIDDEN)
        width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        for part, rows, columns in (
            ("q", width, HIDDEN),
            ("k", kv_width, HIDDEN),
            ("v", kv_width, HIDDEN),
            ("o", HIDDEN, width),
        ):
            name = f"{layer}.self_attn.{part}_proj"
            tensors[f"{name}.weight"] = draw.linear(name, rows, columns)
            tensors[f"{name}.bias"] = draw.bias(f"{name}.bias", rows)
        tensors[f"{layer}.self_attn.sinks"] = draw.normal(f"{layer}.sinks", HEADS)
        tensors[f"{layer}.mlp.router.weight"] = draw.router(f"{layer}.router", NUM_EXPERTS, HIDDEN)
        tensors[f"{layer}.mlp.router.bias"] = draw.bias(f"{layer}.router.bias", NUM_EXPERTS)
        # Gate and up projection take turns, row by row.
        for name, rows, columns in (("gate_up_proj", 2 * INTERMEDIATE, HIDDEN), ("down_proj", HIDDEN, INTERMEDIATE)):
            experts = f"{layer}.mlp.experts.{name}"
            parts = dict(mxfp4(draw.linear(experts, NUM_EXPERTS * rows, columns)))
            blocks = (NUM_EXPERTS, rows, columns // MXFP4_GROUP)
            tensors[f"{experts}_blocks"] = parts["weight"].view(*blocks, MXFP4_GROUP // 2)
            tensors[f"{experts}_scales"] = parts["weight_scale"].view(blocks)
            tensors[f"{experts}_bias"] = draw.bias(f"{experts}.bias", NUM_EXPERTS * rows).view(NUM_EXPERTS, rows)
    stored = {n: t.contiguous() if t.dtype == torch.uint8 else t.bfloat16() for n, t in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(num_layers), indent=2))
    write_tokenizer(folder)
    return folder


def _config(num_layers: int) -> dict[str, Any]:
    kinds = ("sliding_attention", "full_attention")
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "layer_types": [kinds[layer % 2] for layer in range(num_layers)],
        "attention_bias": True,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "swiglu_limit": 7.0,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        },
    }
