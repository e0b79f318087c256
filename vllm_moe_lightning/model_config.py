"""Reads a `MoeModelSpec` from a Hugging Face config.json on disk: no download, no transformers.

Each family has a reader of a few lines. A missing figure is refused with its name: a default guessed here would turn
into a wrong plan there. Extra layers for multi-token prediction are not counted, since vLLM loads them only on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.model_spec import AttentionSpec, MoeModelSpec, WeightWidths
from vllm_moe_lightning.weight_quantisation import MXFP4_METHODS, attention_projection, expert_projection, leaves_out

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4, "auto": 2}


class _Config:
    """A config.json with errors that name the key that is missing or of the wrong kind."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is there."""
        for name in names:
            value = self.raw.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{self.where}: {name} must be a count, got {value!r}")
            return value
        if default is None:
            raise ValueError(f"{self.where}: {names[0]} is missing; it is needed to plan memory and time")
        return default

    def positive(self, *names: str, default: int | None = None) -> int:
        value = self.integer(*names, default=default)
        if value < 1:
            raise ValueError(f"{self.where}: {names[0]} must be at least 1, got {value}")
        return value

    def flag(self, name: str) -> bool:
        return bool(self.raw.get(name, False))

    def part(self, name: str) -> _Config:
        raw = self.raw.get(name)
        if not isinstance(raw, Mapping):
            raise ValueError(f"{self.where}: {name} is missing or no object")
        return _Config(raw, f"{self.where}: {name}")


def _grouped_query(config: _Config) -> AttentionSpec:
    hidden = config.positive("hidden_size")
    heads = config.positive("num_attention_heads")
    return AttentionSpec.grouped_query(
        hidden,
        heads,
        config.positive("num_key_value_heads"),
        config.positive("head_dim", default=hidden // heads),
    )


def _latent(config: _Config) -> AttentionSpec:
    return AttentionSpec.latent(
        config.positive("hidden_size"),
        config.positive("num_attention_heads"),
        config.integer("q_lora_rank", default=0) or None,
        config.positive("kv_lora_rank"),
        config.positive("qk_nope_head_dim"),
        config.positive("qk_rope_head_dim"),
        config.positive("v_head_dim"),
    )


def _common(config: _Config) -> dict[str, Any]:
    return {
        "num_layers": config.positive("num_hidden_layers"),
        "hidden": config.positive("hidden_size"),
        "vocab": config.positive("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings"),
        "max_context": config.integer("max_position_embeddings", default=0) or None,
    }


def _mixtral(config: _Config) -> dict[str, Any]:
    """Mixtral and Phi-3.5-MoE."""
    return _common(config) | {
        "num_dense_layers": 0,
        "num_experts": config.positive("num_local_experts"),
        "top_k": config.positive("num_experts_per_tok"),
        "expert_intermediate": config.positive("intermediate_size"),
        "attention": _grouped_query(config),
    }


def _dbrx(config: _Config) -> dict[str, Any]:
    attention, ffn = config.part("attn_config"), config.part("ffn_config")
    hidden, heads = config.positive("d_model"), config.positive("n_heads")
    return {
        "num_layers": config.positive("n_layers"),
        "num_dense_layers": 0,
        "hidden": hidden,
        "vocab": config.positive("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings"),
        "max_context": config.integer("max_seq_len", default=0) or None,
        "num_experts": ffn.positive("moe_num_experts"),
        "top_k": ffn.positive("moe_top_k"),
        "expert_intermediate": ffn.positive("ffn_hidden_size"),
        "attention": AttentionSpec.grouped_query(hidden, heads, attention.positive("kv_n_heads"), hidden // heads),
    }


def _olmoe(config: _Config) -> dict[str, Any]:
    return _common(config) | {
        "num_dense_layers": 0,
        "num_experts": config.positive("num_experts", "num_local_experts"),  # transformers 5 writes the latter
        "top_k": config.positive("num_experts_per_tok"),
        "expert_intermediate": config.positive("intermediate_size"),
        "attention": _grouped_query(config),
    }


def _qwen_moe(config: _Config) -> dict[str, Any]:
    """Qwen2-MoE (one shared expert, with its own width) and Qwen3-MoE (none)."""
    common = _common(config)
    num_layers = common["num_layers"]
    step = config.positive("decoder_sparse_step", default=1)
    dense_only = set(config.raw.get("mlp_only_layers") or ())
    num_moe = sum((i + 1) % step == 0 and i not in dense_only for i in range(num_layers))
    return common | {
        "num_dense_layers": num_layers - num_moe,
        "num_experts": config.positive("num_experts", "num_local_experts"),  # transformers 5 writes the latter
        "top_k": config.positive("num_experts_per_tok"),
        "expert_intermediate": config.positive("moe_intermediate_size"),
        "shared_intermediate": config.integer("shared_expert_intermediate_size", default=0),
        "dense_intermediate": config.integer("intermediate_size", default=0),
        "attention": _grouped_query(config),
    }


def _first_layers_dense(config: _Config) -> dict[str, Any]:
    """GLM-4.5 and DeepSeek: the first layers dense, shared experts of the routed experts' width."""
    expert = config.positive("moe_intermediate_size")
    return _common(config) | {
        "num_dense_layers": config.integer("first_k_dense_replace", default=0),
        "num_experts": config.positive("n_routed_experts"),
        "top_k": config.positive("num_experts_per_tok"),
        "expert_intermediate": expert,
        "shared_intermediate": expert * config.integer("n_shared_experts", default=0),
        "dense_intermediate": config.positive("intermediate_size"),
        "attention": _latent(config) if "kv_lora_rank" in config.raw else _grouped_query(config),
    }


def _gpt_oss(config: _Config) -> dict[str, Any]:
    common = _common(config)
    window = config.integer("sliding_window", default=0)
    layer_types = config.raw.get("layer_types")
    windowed = (
        sum(kind == "sliding_attention" for kind in layer_types)
        if isinstance(layer_types, list)
        else common["num_layers"] // 2
    )
    return common | {
        "num_dense_layers": 0,
        "num_experts": config.positive("num_local_experts"),
        "top_k": config.positive("num_experts_per_tok", "experts_per_token"),
        "expert_intermediate": config.positive("intermediate_size"),
        "expert_biases": True,
        "has_sinks": True,
        "attention": _grouped_query(config),
        "num_windowed_layers": windowed if window else 0,
        "window": window,
    }


def _llama4(config: _Config) -> dict[str, Any]:
    """Text part. One shared expert of the routed experts' width; attention in chunks except where there is no RoPE."""
    text = config.part("text_config") if "text_config" in config.raw else config
    common = _common(text)
    num_layers = common["num_layers"]
    num_moe = num_layers // text.positive("interleave_moe_layer_step", default=1)
    expert = text.positive("intermediate_size")
    chunk = text.integer("attention_chunk_size", default=0)
    return common | {
        "num_dense_layers": num_layers - num_moe,
        "num_experts": text.positive("num_local_experts"),
        "top_k": text.positive("num_experts_per_tok"),
        "expert_intermediate": expert,
        "shared_intermediate": expert,
        "dense_intermediate": text.positive("intermediate_size_mlp"),
        "attention": _grouped_query(text),
        "num_windowed_layers": num_layers - num_layers // 4 if chunk else 0,
        "window": chunk,
    }


FAMILIES: dict[str, Callable[[_Config], dict[str, Any]]] = {
    "mixtral": _mixtral,
    "phimoe": _mixtral,
    "dbrx": _dbrx,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "glm4_moe": _first_layers_dense,
    "deepseek_v2": _first_layers_dense,
    "deepseek_v3": _first_layers_dense,
    "gpt_oss": _gpt_oss,
    "llama4": _llama4,
    "llama4_text": _llama4,
}


def _dtype_bytes(config: _Config) -> int:
    nested = config.raw.get("text_config")
    raw = nested if isinstance(nested, Mapping) else {}
    sources = (config.raw, raw)
    name = next((s[key] for s in sources for key in ("dtype", "torch_dtype") if s.get(key)), "bfloat16")
    if name not in DTYPE_BYTES:
        raise ValueError(f"{config.where}: unknown dtype {name!r}; known are {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]


def _grouped_bytes(bits: float, group: int, scale_bits: float = 16) -> float:
    """Integer weights with a scale and a zero point per group. group <= 0: per channel, where the scales vanish."""
    return (bits + ((scale_bits + bits) / group if group > 0 else 0.0)) / 8


def _widths(config: _Config) -> WeightWidths:
    """Weight widths under the checkpoint's quantisation, scales included."""
    plain = _dtype_bytes(config)
    raw = config.raw.get("quantization_config")
    if raw is None:
        return WeightWidths(plain, plain, plain, plain)
    quantisation = _Config(raw, f"{config.where}: quantization_config")
    method = str(raw.get("quant_method", "")).lower()
    if method in MXFP4_METHODS:  # blocks of 32 four-bit floats and one scale byte; experts only
        return WeightWidths((4 + 8 / 32) / 8, plain, plain, plain)
    if method in ("fp8", "fbgemm_fp8"):
        block = raw.get("weight_block_size")
        width = (8 + 32 / (block[0] * block[1])) / 8 if block else 1.0
    elif method in ("awq", "gptq", "awq_marlin", "gptq_marlin"):
        width = _grouped_bytes(quantisation.positive("bits"), raw.get("group_size", 128))
    elif method == "bitsandbytes":
        width = (4 + 32 / 64) / 8 if raw.get("load_in_4bit") else 1.0
    elif method == "compressed-tensors":
        groups = quantisation.part("config_groups").raw
        weights = _Config(next(iter(groups.values())), quantisation.where).part("weights")
        width = _grouped_bytes(weights.positive("num_bits"), weights.raw.get("group_size") or 0)
    else:
        raise UnsupportedError(
            f"{config.where}: quantisation {method!r} is not known to the planner; plan with the plain checkpoint"
        )

    def width_of(projection: str) -> float:
        return plain if leaves_out(raw, projection) else width

    return WeightWidths(
        width_of(expert_projection(config.raw)), width_of(attention_projection(config.raw)), plain, plain
    )


def spec_from_config(raw: Mapping[str, Any], name: str) -> MoeModelSpec:
    """The parsed config.json -> spec. Raises ValueError for a missing figure, UnsupportedError for a family that
    we don't know."""
    model_type = raw.get("model_type")
    reader = FAMILIES.get(str(model_type))
    if reader is None:
        raise UnsupportedError(f"{name}: model_type {model_type!r} is none of {', '.join(sorted(FAMILIES))}")
    config = _Config(raw, name)
    widths = _widths(config)
    return MoeModelSpec(
        name=name,
        model_type=str(model_type),
        widths=widths,
        kv_bytes_per_element=float(widths.activation_bytes),
        **reader(config),
    )


def read_model_spec(path: Path) -> MoeModelSpec:
    """From a config.json or a folder that holds one (and nothing else is needed)."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"no config.json at {path}; give the folder of a local checkpoint")
    try:
        raw = msgspec.json.decode(file.read_bytes())
    except msgspec.DecodeError as error:
        raise ValueError(f"{file}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file}: must be a JSON object, got {type(raw).__name__}")
    return spec_from_config(raw, path.name if path.is_dir() else path.stem)
