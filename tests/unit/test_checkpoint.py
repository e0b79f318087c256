# SPDX-License-Identifier: Apache-2.0
"""Damaged and incomplete checkpoints, on files of a few hundred bytes."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_moe_lightning.checkpoint import INDEX_NAME, check_checkpoint
from vllm_moe_lightning.errors import CheckpointError

Shapes = dict[str, tuple[int, ...]]

HIDDEN, INTERMEDIATE, NUM_EXPERTS = 3, 2, 4
QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 3,
    "num_experts": NUM_EXPERTS,
    "moe_intermediate_size": INTERMEDIATE,
    "intermediate_size": 7,
    "hidden_size": HIDDEN,
    "mlp_only_layers": [1],
    "tie_word_embeddings": False,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "num_hidden_layers": 2,
    "num_local_experts": NUM_EXPERTS,
    "intermediate_size": INTERMEDIATE,
    "hidden_size": HIDDEN,
}
DBRX = {
    "architectures": ["DbrxForCausalLM"],
    "n_layers": 2,
    "d_model": HIDDEN,
    "ffn_config": {"moe_num_experts": NUM_EXPERTS, "ffn_hidden_size": INTERMEDIATE},
}


def per_expert(block: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Shapes:
    wide, tall = (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
    return {
        f"{block}.{expert}.{name}.weight": shape
        for expert in range(NUM_EXPERTS)
        for name, shape in ((gate, wide), (up, wide), (down, tall))
    }


def fused(block: str) -> Shapes:
    return {
        f"{block}.gate_up_proj": (NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        f"{block}.down_proj": (NUM_EXPERTS, HIDDEN, INTERMEDIATE),
    }


def qwen(experts: Callable[[str], Shapes] = per_expert) -> Shapes:
    """Layer 1 is dense."""
    shapes: Shapes = {"model.embed_tokens.weight": (5, HIDDEN), "lm_head.weight": (5, HIDDEN)}
    for layer in range(3):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{part}_proj.weight": (HIDDEN, HIDDEN) for part in "qkvo"}
        if layer == 1:
            shapes |= {f"{prefix}.mlp.{part}_proj.weight": (7, HIDDEN) for part in ("gate", "up", "down")}
        else:
            shapes |= {f"{prefix}.mlp.gate.weight": (NUM_EXPERTS, HIDDEN)} | experts(f"{prefix}.mlp.experts")
    return shapes


def mixtral(experts: Callable[[str], Shapes]) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (5, HIDDEN), "lm_head.weight": (5, HIDDEN)}
    for layer in range(2):
        shapes |= experts(f"model.layers.{layer}.block_sparse_moe.experts")
    return shapes


def dbrx() -> Shapes:
    shapes: Shapes = {"transformer.wte.weight": (5, HIDDEN), "lm_head.weight": (5, HIDDEN)}
    for layer in range(2):
        for part in ("w1", "v1", "w2"):
            name = f"transformer.blocks.{layer}.ffn.experts.mlp.{part}"
            shapes[name] = (NUM_EXPERTS * INTERMEDIATE, HIDDEN)
    return shapes


def write_file(file: Path, shapes: Shapes, *, value: int = 0, dtype: str = "BF16") -> Path:
    header, end = {}, 0
    for name, shape in shapes.items():
        num_bytes = (2 if dtype == "BF16" else 1) * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes([value]) * end)
    return file


def write(folder: Path, shapes: Shapes) -> Path:
    write_file(folder / "model.safetensors", shapes)
    return folder


def write_shards(folder: Path, shapes: Shapes, *, num_shards: int = 3) -> list[Path]:
    names = list(shapes)
    weight_map: dict[str, str] = {}
    files = []
    for shard in range(num_shards):
        part = {name: shapes[name] for name in names[shard::num_shards]}
        files.append(write_file(folder / f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors", part))
        weight_map |= dict.fromkeys(part, files[-1].name)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return files


def without(shapes: Shapes, *names: str) -> Shapes:
    assert set(names) <= shapes.keys()
    return {name: shape for name, shape in shapes.items() if name not in names}


def half_half(block: str) -> Shapes:
    gate_and_up = {name: shape for name, shape in per_expert(block).items() if "down" not in name}
    return {**gate_and_up, f"{block}.down_proj": fused(block)[f"{block}.down_proj"]}


@pytest.mark.parametrize(
    ("shapes", "config"),
    [
        (qwen(), QWEN),
        (qwen(fused), QWEN),
        (qwen(lambda block: fused(block) if ".0." in block else per_expert(block)), QWEN),
        (qwen(half_half), QWEN),
        (without(qwen(), "lm_head.weight"), {**QWEN, "tie_word_embeddings": True}),
        (qwen(), {**QWEN, "tie_word_embeddings": True}),
        ({**qwen(), "model.layers.3.mtp.weight": (1,)}, QWEN),
        (mixtral(lambda block: per_expert(block, "w1", "w3", "w2")), MIXTRAL),
        (mixtral(per_expert), MIXTRAL),
        (dbrx(), DBRX),
        ({"anything": (2,)}, {"architectures": ["SomethingElse"]}),
    ],
    ids=[
        "per-expert", "fused", "layers-of-both", "both-in-a-layer", "tied", "tied-with-head", "more-layers",
        "mixtral", "mixtral-other-names", "dbrx", "unknown-architecture",
    ],
)  # fmt: skip
def test_what_vllm_loads_correctly_passes(tmp_path: Path, shapes: Shapes, config: dict[str, object]) -> None:
    check_checkpoint(write(tmp_path, shapes), config)


@pytest.mark.parametrize(
    ("shapes", "config", "name"),
    [
        (qwen(), QWEN, "model.layers.2.mlp.experts.3.down_proj.weight"),
        (qwen(), QWEN, "model.layers.0.mlp.gate.weight"),
        (qwen(), QWEN, "model.layers.2.self_attn.q_proj.weight"),
        (qwen(), QWEN, "model.embed_tokens.weight"),
        (qwen(), QWEN, "lm_head.weight"),
        (qwen(fused), QWEN, "model.layers.2.mlp.experts.gate_up_proj"),
        (dbrx(), DBRX, "transformer.blocks.1.ffn.experts.mlp.v1"),
        (dbrx(), DBRX, "transformer.wte.weight"),
        (
            mixtral(lambda block: per_expert(block, "w1", "w3", "w2")),
            MIXTRAL,
            "model.layers.1.block_sparse_moe.experts.0.w3.weight",
        ),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, shapes: Shapes, config: dict[str, object], name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"lacks {name};"):
        check_checkpoint(write(tmp_path, without(shapes, name)), config)


def test_a_layer_without_any_expert_is_named(tmp_path: Path) -> None:
    names = per_expert("model.layers.2.mlp.experts")
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.2\.mlp\.experts\.0.* and 7 more"):
        check_checkpoint(write(tmp_path, without(qwen(), *names)), QWEN)


@pytest.mark.parametrize(
    "name",
    ["2.mlp.experts.3.extra_proj.weight", "2.mlp.experts.4.down_proj.weight", "0.mlp.experts.1.up_proj.bias"],
)
def test_an_unknown_expert_tensor_is_an_error(tmp_path: Path, name: str) -> None:
    shapes = {**qwen(), f"model.layers.{name}": (HIDDEN, INTERMEDIATE)}
    with pytest.raises(CheckpointError, match=rf"does not know: model\.layers\.{name}"):
        check_checkpoint(write(tmp_path, shapes), QWEN)


def test_mixtral_experts_in_3d_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="gate_up_proj"):
        check_checkpoint(write(tmp_path, mixtral(fused)), MIXTRAL)


@pytest.mark.parametrize(
    ("shapes", "name", "shape"),
    [
        (qwen(), "model.layers.0.mlp.experts.1.down_proj.weight", (INTERMEDIATE, HIDDEN)),
        (qwen(fused), "model.layers.0.mlp.experts.gate_up_proj", (NUM_EXPERTS - 1, 2 * INTERMEDIATE, HIDDEN)),
        (qwen(fused), "model.layers.2.mlp.experts.down_proj", (NUM_EXPERTS, INTERMEDIATE, HIDDEN)),
    ],
)
def test_an_expert_of_another_shape_is_an_error(
    tmp_path: Path, shapes: Shapes, name: str, shape: tuple[int, ...]
) -> None:
    with pytest.raises(CheckpointError, match=rf"{name} has shape .* config\.json asks for"):
        check_checkpoint(write(tmp_path, {**shapes, name: shape}), QWEN)


def test_experts_of_an_unknown_architecture_must_be_alike(tmp_path: Path) -> None:
    shapes = per_expert("net.layers.0.moe.experts", "a", "b", "c")
    config = {"architectures": ["SomethingElse"]}
    check_checkpoint(write(tmp_path, shapes), config)
    with pytest.raises(CheckpointError, match=r"lacks net\.layers\.0\.moe\.experts\.2\.b\.weight;"):
        check_checkpoint(write(tmp_path, without(shapes, "net.layers.0.moe.experts.2.b.weight")), config)


def test_packed_weights_are_not_judged_by_name(tmp_path: Path) -> None:
    config = {**QWEN, "quantization_config": {"quant_method": "quark"}}
    check_checkpoint(write(tmp_path, {"model.layers.0.mlp.experts.0.gate_proj.qweight": (2, 2)}), config)


def test_experts_of_which_some_are_quantised_are_refused_by_name(tmp_path: Path) -> None:
    """B10."""
    config = {**QWEN, "quantization_config": {"quant_method": "quark"}}
    packed = [f"model.layers.0.mlp.experts.{expert}.up_proj.qweight" for expert in range(3)]
    shapes = dict.fromkeys(packed, (2, 2))
    check_checkpoint(write(tmp_path, shapes), config)
    plain = {packed[2].replace("qweight", "weight"): (2, 2)}
    with pytest.raises(CheckpointError, match=r"lacks .*experts\.2\.up_proj\.qweight"):
        check_checkpoint(write(tmp_path, {**without(shapes, packed[2]), **plain}), config)


GPTQ = {"quant_method": "gptq", "bits": 4, "dynamic": {r"-:.*layers\.0\..*": {}}}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4}
INT8 = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "dynamic": True},
        }
    },
}


def quantised_qwen(parts: tuple[str, ...], plain_layers: tuple[int, ...] = ()) -> dict[str, tuple[int, ...]]:
    """Experts alone: what is beside them is not looked at."""
    return {
        f"model.layers.{layer}.mlp.experts.{expert}.{projection}.{part}": (2, 2)
        for layer in range(QWEN["num_hidden_layers"])
        for expert in range(QWEN["num_experts"])
        for projection in ("gate_proj", "up_proj", "down_proj")
        for part in (("weight",) if layer in plain_layers else parts)
    }


@pytest.mark.parametrize(
    ("raw", "parts", "plain_layers"),
    [
        (GPTQ, ("qweight", "qzeros", "scales"), (0,)),
        (AWQ, ("qweight", "qzeros", "scales"), ()),
        (FP8, ("weight", "weight_scale_inv"), ()),
        (INT8, ("weight", "weight_scale"), ()),
    ],
    ids=["gptq", "awq", "fp8", "int8"],
)
def test_each_tensor_of_a_quantised_expert_must_be_there(
    tmp_path: Path, raw: dict[str, Any], parts: tuple[str, ...], plain_layers: tuple[int, ...]
) -> None:
    """Also one that all experts lack, which no comparison among them shows."""
    config, shapes = {**QWEN, "quantization_config": raw}, quantised_qwen(parts, plain_layers)
    check_checkpoint(write(tmp_path, shapes), config)
    last = QWEN["num_hidden_layers"] - 1
    for part in parts:
        lost = [f"model.layers.{last}.mlp.experts.{n}.down_proj.{part}" for n in range(QWEN["num_experts"])]
        with pytest.raises(CheckpointError, match=re.escape(f"lacks {lost[0]}")):
            check_checkpoint(write(tmp_path, without(shapes, *lost)), config)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "U8", "I8"])
def test_packed_weights_without_a_quantisation_are_refused_by_name_and_type(tmp_path: Path, dtype: str) -> None:
    """B10."""
    write_file(tmp_path / "model.safetensors", qwen(), dtype=dtype)
    with pytest.raises(CheckpointError, match=rf"embed_tokens\.weight.* as {dtype}.* no quantization_config"):
        check_checkpoint(tmp_path, QWEN)
