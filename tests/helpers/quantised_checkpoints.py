# SPDX-License-Identifier: Apache-2.0
"""Random Mixtral checkpoints in the quantised formats that vLLM reads: names, packing and config.json of each.

Quantises what write_checkpoint draws (bfloat16), by plain rounding: the formats' own tools choose better, which is of
no consequence to how their tensors are loaded, packed and paged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoints import write_checkpoint

NUM_EXPERTS, HIDDEN, INTERMEDIATE = 8, 256, 128  # fp8 blocks are 128 wide
GROUP = 64  # inputs that share a scale, in the 4-bit formats
FP8_BLOCK = 128
MXFP4_GROUP = 32
FP8_MAX, INT8_MAX = 448.0, 127.0
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs each nibble of a word holds, lowest first
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_EXPERTS = re.compile(r".*\.(w1|w2|w3)\.weight")
_ATTENTION = re.compile(r".*\.(q_proj|k_proj|v_proj|o_proj)\.weight")
_EXPERTS_AND_ATTENTION = re.compile(r".*\.(w1|w2|w3|q_proj|k_proj|v_proj|o_proj)\.weight")

Tensors = Iterator[tuple[str, torch.Tensor]]


def write_quantised_checkpoint(
    folder: Path, form: str, *, num_layers: int = 3, plain_experts: bool = False, **overrides: Any
) -> Path:
    """`form`: a key of FORMATS. Experts and attention projections are quantised (of fp8_block the experts alone, since
    the CPU build needs AMX for the others); router, embedding and head are not. `plain_experts`: the projections alone
    are (compressed-tensors only)."""
    quantise, config_of = FORMATS[form]
    quantised = _ATTENTION if plain_experts else _EXPERTS if form == "fp8_block" else _EXPERTS_AND_ATTENTION
    sizes = {"num_local_experts": NUM_EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "head_dim": 64}
    write_checkpoint(folder, "mixtral", num_layers=num_layers, dtype=torch.bfloat16, **{**sizes, **overrides})
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if quantised.fullmatch(name):
            prefix = name.removesuffix(".weight")
            parts = quantise(weight.float())  # [out, in]
            tensors.update({f"{prefix}.{part}": tensor.contiguous() for part, tensor in parts})
        else:
            tensors[name] = weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = config_of()
    if form == "fp8_block":
        names = [f"model.layers.{n}.self_attn.{part}_proj" for n in range(num_layers) for part in "qkvo"]
        config["quantization_config"]["modules_to_not_convert"] = names
    if plain_experts:
        config["quantization_config"]["ignore"].append("re:.*experts.*")
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def _fp8_per_tensor(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax() / FP8_MAX
    yield "weight", (weight / scale).to(torch.float8_e4m3fn)
    yield "weight_scale", scale


def _fp8_per_channel(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(-1, keepdim=True) / FP8_MAX  # [out, 1]
    yield "weight", (weight / scale).to(torch.float8_e4m3fn)
    yield "weight_scale", scale


def _fp8_block(weight: torch.Tensor) -> Tensors:
    rows, columns = (size // FP8_BLOCK for size in weight.shape)
    blocks = weight.view(rows, FP8_BLOCK, columns, FP8_BLOCK)
    scale = blocks.abs().amax((1, 3)) / FP8_MAX  # [out / 128, in / 128]
    yield "weight", (blocks / scale[:, None, :, None]).view_as(weight).to(torch.float8_e4m3fn)
    yield "weight_scale_inv", scale


def _int8_per_channel(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(-1, keepdim=True) / INT8_MAX  # [out, 1]
    yield "weight", (weight / scale).round().to(torch.int8)
    yield "weight_scale", scale


def _grouped(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values 0..15 around 8 [out, in], and scales [out, in / GROUP]."""
    groups = weight.view(weight.shape[0], -1, GROUP)
    scale = (groups.abs().amax(-1) / 7).to(torch.bfloat16)
    values = (groups / scale.float()[..., None]).round().clamp(-8, 7) + 8
    return values.view_as(weight).to(torch.int64), scale


def _packed(values: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight values of the last dimension in each 32-bit word, `order[i]` at bit 4 i."""
    words = values.view(*values.shape[:-1], -1, 8)
    packed = sum(words[..., source] << (4 * place) for place, source in enumerate(order))
    return packed.to(torch.int32)  # wraps, as it should


def _int4_compressed_tensors(weight: torch.Tensor) -> Tensors:
    values, scale = _grouped(weight)
    yield "weight_packed", _packed(values)  # [out, in / 8]
    yield "weight_scale", scale
    yield "weight_shape", torch.tensor(weight.shape, dtype=torch.int64)


def _gptq(weight: torch.Tensor) -> Tensors:
    values, scale = _grouped(weight)
    num_inputs = weight.shape[1]
    yield "qweight", _packed(values).T  # [in / 8, out]
    yield "scales", scale.T  # [in / GROUP, out]
    yield "qzeros", _packed(torch.full_like(scale.T, 7, dtype=torch.int64))  # zero points less one: [in / GROUP, out/8]
    yield "g_idx", torch.arange(num_inputs, dtype=torch.int32) // GROUP


def _awq(weight: torch.Tensor) -> Tensors:
    values, scale = _grouped(weight)
    yield "qweight", _packed(values.T.contiguous(), _AWQ_ORDER)  # [in, out / 8]
    yield "scales", scale.T  # [in / GROUP, out]
    yield "qzeros", _packed(torch.full_like(scale.T, 8, dtype=torch.int64), _AWQ_ORDER)  # [in / GROUP, out / 8]


def mxfp4(weight: torch.Tensor) -> Tensors:
    """For tests/helpers/gpt_oss_checkpoint.py, which has names of its own for these."""
    groups = weight.view(weight.shape[0], -1, MXFP4_GROUP)
    exponent = (groups.abs().amax(-1) / 6).log2().ceil()  # of two: [out, in / 32]
    scaled = groups / exponent.exp2()[..., None]
    magnitude = (scaled.abs()[..., None] - _E2M1).abs().argmin(-1)  # nearest code
    codes = (magnitude + 8 * (scaled < 0)).view(weight.shape[0], -1, 2)
    yield "weight", (codes[..., 0] + 16 * codes[..., 1]).to(torch.uint8)  # [out, in / 2]
    yield "weight_scale", (exponent + 127).to(torch.uint8)


def _compressed_tensors(form: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*gate"],
    }


_CHANNELS = {"strategy": "channel", "symmetric": True, "dynamic": False}
_TOKENS = {"strategy": "token", "symmetric": True, "dynamic": True}
_FLOAT8, _INT8 = {"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "int"}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True, "dynamic": False}

FORMATS: dict[str, tuple[Callable[[torch.Tensor], Tensors], Callable[[], dict[str, Any]]]] = {
    "fp8_per_tensor": (_fp8_per_tensor, lambda: {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8_per_channel": (
        _fp8_per_channel,
        lambda: _compressed_tensors("float-quantized", _FLOAT8 | _CHANNELS, _FLOAT8 | _TOKENS),
    ),
    "fp8_block": (
        _fp8_block,
        lambda: {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        },
    ),
    "int8": (
        _int8_per_channel,
        lambda: _compressed_tensors("int-quantized", _INT8 | _CHANNELS, _INT8 | _TOKENS),
    ),
    "int4": (_int4_compressed_tensors, lambda: _compressed_tensors("pack-quantized", _INT4, None)),
    "gptq": (
        _gptq,
        lambda: {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    ),
    "awq": (
        _awq,
        lambda: {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    ),
}
