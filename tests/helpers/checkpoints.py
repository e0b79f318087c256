# SPDX-License-Identifier: Apache-2.0
"""Random Hugging Face MoE checkpoints of any shape, in a fraction of a second.

Decides names, shapes and draws of every tensor; the tensors are a function of (seed, tensor name), so one seed gives
the same model whatever the shard size or the expert layout. Weights are drawn wide: at the usual standard deviation of
0.02 a random model answers everything with one repeated token, and its parity proves nothing.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ARCHITECTURES = ("mixtral", "dbrx", "qwen3_moe", "qwen2_moe", "olmoe")
EXPERT_LAYOUTS = ("per_expert", "fused", "mixed", "fused_swapped")

NUM_BYTES = 256
BOS_TOKEN_ID, EOS_TOKEN_ID = 256, 257
VOCAB_SIZE = 258

# A linear layer of base width (128) draws with standard deviation 0.2; other widths are scaled so that activations
# (hence routing entropy, attention sharpness and rounding error) look the same at every width.
WEIGHT_STD, BASE_WIDTH = 0.2, 128

# Exact equality in float32 is a fair demand only without near ties: of the best two logits at a step, or of the last
# expert chosen and the next one. Over the 64 standard prompts these seeds keep the former 2e-4 apart and the latter
# 1e-5, at the default number of layers and at 4, while two correct implementations differ by 6e-5 at most in
# log-probabilities. Other shapes: look at OracleResult.smallest_gap and smallest_router_gap.
DEFAULT_SEEDS = {"mixtral": 3, "dbrx": 1, "qwen3_moe": 4, "qwen2_moe": 1, "olmoe": 0}

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}
_LLAMA_LIKE = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
_QWEN = {
    "num_hidden_layers": 3,
    "intermediate_size": 96,  # of the dense layers that mlp_only_layers names
    "moe_intermediate_size": 48,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
}

# config.json as the field reports describe the models, plus DBRX and OLMoE in the same spirit.
_CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        **_LLAMA_LIKE,
        "num_hidden_layers": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        **_LLAMA_LIKE,
        **_QWEN,
        "head_dim": 64,  # not hidden_size / num_attention_heads
        "norm_topk_prob": True,
        "attention_bias": False,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        **_LLAMA_LIKE,
        **_QWEN,
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": False,
        "qkv_bias": True,
    },
    "olmoe": {
        "architectures": ["OlmoeForCausalLM"],
        **_LLAMA_LIKE,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,  # vLLM's OLMoE never renormalises, whatever the config says
        "clip_qkv": None,  # vLLM's OLMoE ignores it
        "attention_bias": False,
    },
    "dbrx": {
        "architectures": ["DbrxForCausalLM"],
        "d_model": 128,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 512,
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {
            "ffn_hidden_size": 96,
            "moe_num_experts": 8,
            "moe_top_k": 2,
            "moe_normalize_expert_weights": 1.0,
        },
    },
}


def write_checkpoint(
    folder: Path | str,
    arch: str,
    *,
    num_layers: int | None = None,
    seed: int | None = None,
    dtype: torch.dtype = torch.float32,
    max_shard_size: int | str | None = None,
    experts_layout: str = "per_expert",
    write_lm_head: bool | None = None,
    **overrides: Any,
) -> Path:
    """Writes config.json, tokenizer and safetensors into `folder` and returns it.

    `overrides` are keys of config.json (`hidden_size=256`, `sliding_window=32`, `tie_word_embeddings=True`,
    `num_experts=60`; nested dicts are merged). `max_shard_size` ("200KB" or bytes) gives an index and shards.
    `experts_layout`: one tensor per expert, "fused" 3-D tensors [experts, 2 * intermediate, hidden], "mixed" (odd
    layers fused), or "fused_swapped" (gate and up exchanged: a negative control). `write_lm_head` overrules the default
    of writing the output head unless it is tied to the embedding; a head beside tied embeddings holds other values.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch must be one of {ARCHITECTURES}, got {arch!r}")
    if experts_layout not in EXPERT_LAYOUTS:
        raise ValueError(f"experts_layout must be one of {EXPERT_LAYOUTS}, got {experts_layout!r}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = make_config(arch, num_layers=num_layers, **overrides)
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    seed = DEFAULT_SEEDS[arch] if seed is None else seed
    if write_lm_head is None:
        write_lm_head = not config["tie_word_embeddings"]

    draw = Draw(seed)
    make_tensors = _dbrx_tensors if arch == "dbrx" else _llama_like_tensors
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in make_tensors(config, draw, experts_layout)}
    if write_lm_head:
        hidden_size = config["d_model" if arch == "dbrx" else "hidden_size"]
        tensors["lm_head.weight"] = draw.linear("lm_head.weight", config["vocab_size"], hidden_size).to(dtype)

    _write_tensors(folder, tensors, _parse_size(max_shard_size))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_tokenizer(folder, vocab_size=config["vocab_size"])
    return folder


def make_config(arch: str, *, num_layers: int | None = None, **overrides: Any) -> dict[str, Any]:
    """config.json of `arch`; `overrides` replace its keys, dicts in it are merged."""
    config: dict[str, Any] = {"model_type": arch, **_COMMON, **_CONFIGS[arch]}
    if num_layers is not None:
        config["n_layers" if arch == "dbrx" else "num_hidden_layers"] = num_layers
    for key, value in overrides.items():
        merge = isinstance(value, dict) and isinstance(config.get(key), dict)
        config[key] = {**config[key], **value} if merge else value
    return config


class Draw:
    """Random tensors; each depends on the seed and its own name only, not on the order of calls."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def normal(self, name: str, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed}/{name}".encode()))
        return torch.randn(shape, generator=generator)

    def linear(self, name: str, *shape: int) -> torch.Tensor:
        """[..., out_features, in_features]"""
        return self.normal(name, *shape) * (WEIGHT_STD * math.sqrt(BASE_WIDTH / shape[-1]))

    def embedding(self, name: str, *shape: int) -> torch.Tensor:
        return self.normal(name, *shape) * WEIGHT_STD

    def norm(self, name: str, size: int) -> torch.Tensor:
        return 1.0 + 0.1 * self.normal(name, size)

    def bias(self, name: str, size: int) -> torch.Tensor:
        return 0.2 * self.normal(name, size)

    def router(self, name: str, num_experts: int, hidden_size: int) -> torch.Tensor:
        """Rows of equal length and, in blocks of `hidden_size`, orthogonal: no expert is starved by a short row."""
        blocks = []
        for start in range(0, num_experts, hidden_size):
            rows = min(hidden_size, num_experts - start)
            q, _ = torch.linalg.qr(self.normal(f"{name}/{start}", hidden_size, rows))
            blocks.append(q.T)
        return torch.cat(blocks) * (WEIGHT_STD * math.sqrt(BASE_WIDTH))


def _llama_like_tensors(config: dict[str, Any], draw: Draw, experts_layout: str) -> Iterator[tuple[str, torch.Tensor]]:
    arch, hidden = config["model_type"], config["hidden_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    moe_block = "block_sparse_moe" if arch == "mixtral" else "mlp"

    def linear(name: str, *shape: int) -> tuple[str, torch.Tensor]:
        return name, draw.linear(name, *shape)

    def norm(name: str, size: int) -> tuple[str, torch.Tensor]:
        return name, draw.norm(name, size)

    yield "model.embed_tokens.weight", draw.embedding("embed_tokens", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        attn = f"{layer}.self_attn"
        yield norm(f"{layer}.input_layernorm.weight", hidden)
        yield norm(f"{layer}.post_attention_layernorm.weight", hidden)
        for part, part_heads in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield linear(f"{attn}.{part}_proj.weight", part_heads * head_dim, hidden)
            if config.get("qkv_bias") or config.get("attention_bias"):
                bias = f"{attn}.{part}_proj.bias"
                yield bias, draw.bias(bias, part_heads * head_dim)
        yield linear(f"{attn}.o_proj.weight", hidden, heads * head_dim)
        if arch == "qwen3_moe":  # per head
            yield norm(f"{attn}.q_norm.weight", head_dim)
            yield norm(f"{attn}.k_norm.weight", head_dim)
        elif arch == "olmoe":  # over all heads together
            yield norm(f"{attn}.q_norm.weight", heads * head_dim)
            yield norm(f"{attn}.k_norm.weight", kv_heads * head_dim)

        if index in config.get("mlp_only_layers", ()):
            for part, shape in _mlp_shapes(config["intermediate_size"], hidden):
                yield linear(f"{layer}.mlp.{part}_proj.weight", *shape)
            continue
        block = f"{layer}.{moe_block}"
        num_experts = config["num_local_experts" if arch == "mixtral" else "num_experts"]
        yield f"{block}.gate.weight", draw.router(f"{block}.gate", num_experts, hidden)
        intermediate = config.get("moe_intermediate_size") or config["intermediate_size"]
        fused = experts_layout.startswith("fused") or (experts_layout == "mixed" and index % 2 == 1)
        gate_up = draw.linear(f"{block}.gate_up", num_experts, 2 * intermediate, hidden)
        down = draw.linear(f"{block}.down", num_experts, hidden, intermediate)
        if fused:
            if experts_layout == "fused_swapped":
                gate_up = gate_up.roll(intermediate, dims=1)
            yield f"{block}.experts.gate_up_proj", gate_up
            yield f"{block}.experts.down_proj", down
        else:
            names = ("w1", "w3", "w2") if arch == "mixtral" else ("gate_proj", "up_proj", "down_proj")
            for expert in range(num_experts):
                gate, up = gate_up[expert].chunk(2)
                for name, weight in zip(names, (gate, up, down[expert]), strict=True):
                    yield f"{block}.experts.{expert}.{name}.weight", weight
        if arch == "qwen2_moe":
            for part, shape in _mlp_shapes(config["shared_expert_intermediate_size"], hidden):
                yield linear(f"{block}.shared_expert.{part}_proj.weight", *shape)
            yield linear(f"{block}.shared_expert_gate.weight", 1, hidden)
    yield norm("model.norm.weight", hidden)


def _mlp_shapes(intermediate: int, hidden: int) -> list[tuple[str, tuple[int, int]]]:
    return [("gate", (intermediate, hidden)), ("up", (intermediate, hidden)), ("down", (hidden, intermediate))]


def _dbrx_tensors(config: dict[str, Any], draw: Draw, experts_layout: str) -> Iterator[tuple[str, torch.Tensor]]:
    if experts_layout != "per_expert":
        raise ValueError("DBRX has one layout of its own (all experts' rows in one 2-D tensor); leave experts_layout")
    hidden, heads = config["d_model"], config["n_heads"]
    head_dim = hidden // heads
    qkv_size = (heads + 2 * config["attn_config"]["kv_n_heads"]) * head_dim
    num_experts, intermediate = (config["ffn_config"][key] for key in ("moe_num_experts", "ffn_hidden_size"))

    yield "transformer.wte.weight", draw.embedding("wte", config["vocab_size"], hidden)
    for index in range(config["n_layers"]):
        block = f"transformer.blocks.{index}"
        attn = f"{block}.norm_attn_norm"
        for name in (f"{attn}.norm_1.weight", f"{attn}.norm_2.weight"):
            yield name, draw.norm(name, hidden)
        for name, rows in ((f"{attn}.attn.Wqkv.weight", qkv_size), (f"{attn}.attn.out_proj.weight", hidden)):
            yield name, draw.linear(name, rows, hidden)
        yield f"{block}.ffn.router.layer.weight", draw.router(f"{block}.router", num_experts, hidden)
        for part in ("w1", "v1"):
            name = f"{block}.ffn.experts.mlp.{part}"
            yield name, draw.linear(name, num_experts * intermediate, hidden)
        # w2 multiplies from the right: [intermediate, hidden] per expert, so its fan-in is the rows of one expert.
        name = f"{block}.ffn.experts.mlp.w2"
        w2 = draw.linear(name, num_experts, hidden, intermediate).transpose(1, 2)
        yield name, w2.reshape(num_experts * intermediate, hidden)
    yield "transformer.norm_f.weight", draw.norm("norm_f", hidden)


def _parse_size(size: int | str | None) -> int | None:
    if not isinstance(size, str):
        return size
    for suffix, factor in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size.endswith(suffix):
            return int(float(size.removesuffix(suffix)) * factor)
    return int(size)


def _write_tensors(folder: Path, tensors: dict[str, torch.Tensor], max_shard_bytes: int | None) -> None:
    if max_shard_bytes is None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    shards: list[dict[str, torch.Tensor]] = [{}]
    shard_bytes = 0
    for name, tensor in tensors.items():
        if shards[-1] and shard_bytes + tensor.nbytes > max_shard_bytes:
            shards.append({})
            shard_bytes = 0
        shards[-1][name] = tensor
        shard_bytes += tensor.nbytes
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file_name))
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def byte_alphabet() -> list[str]:
    """The printable character that byte-level BPE gives to each byte (GPT-2's table), in byte order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    extra = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte if byte in printable else next(extra)) for byte in range(NUM_BYTES)]


def write_tokenizer(folder: Path, *, vocab_size: int = VOCAB_SIZE) -> None:
    """One token per byte (id = byte), then <s>, </s>, then unreachable fillers up to `vocab_size`; adds no bos."""
    if vocab_size < VOCAB_SIZE:
        raise ValueError(f"vocab_size must be at least {VOCAB_SIZE} (256 bytes, bos, eos), got {vocab_size}")
    vocab = {char: byte for byte, char in enumerate(byte_alphabet())}
    vocab |= {f"<unused{token}>": token for token in range(VOCAB_SIZE, vocab_size)}
    vocab |= {"<s>": BOS_TOKEN_ID, "</s>": EOS_TOKEN_ID}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
