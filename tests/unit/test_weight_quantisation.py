# SPDX-License-Identifier: Apache-2.0
"""What the quantization_config of a checkpoint says of its experts."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_moe_lightning.weight_quantisation import (
    ExpertScheme,
    cpu_build_bytes,
    expert_format,
    leaves_out,
)

MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_hidden_layers": 4}


def compressed(bits: int, kind: str, strategy: str, activations: bool, **more: Any) -> dict[str, Any]:
    group = {
        "weights": {"num_bits": bits, "type": kind, "strategy": strategy, **more},
        "input_activations": {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True}
        if activations
        else None,
    }
    return {"quant_method": "compressed-tensors", "format": "f", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("raw", "scheme", "name"),
    [
        ({"quant_method": "fp8"}, ExpertScheme.OTHER, "fp8 with a scale per tensor"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            ExpertScheme.FP8_BLOCK,
            "fp8 in blocks of 128 x 128",
        ),
        ({"quant_method": "fp8", "weight_block_size": [32, 32]}, ExpertScheme.OTHER, "fp8 in blocks of 32 x 32"),
        ({"quant_method": "gptq", "bits": 4, "desc_act": False}, ExpertScheme.INT4, "GPTQ int4"),
        (
            {"quant_method": "gptq", "bits": 4, "desc_act": True},
            ExpertScheme.OTHER,
            "GPTQ int4 with desc_act",
        ),
        ({"quant_method": "gptq", "bits": 8}, ExpertScheme.OTHER, "GPTQ int8"),
        ({"quant_method": "awq", "bits": 4}, ExpertScheme.INT4, "AWQ int4"),
        ({"quant_method": "mxfp4"}, ExpertScheme.MXFP4, "mxfp4"),
        ({"quant_method": "quark"}, ExpertScheme.UNKNOWN, "quark"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ExpertScheme.OTHER, "modelopt NVFP4"),
        (compressed(8, "int", "channel", True), ExpertScheme.INT8, "compressed-tensors int8"),
        (compressed(8, "int", "channel", False), ExpertScheme.OTHER, "compressed-tensors int8 of format f"),
        (compressed(4, "int", "group", True), ExpertScheme.OTHER, "compressed-tensors int4 of format f"),
        (compressed(4, "int", "group", False, group_size=32), ExpertScheme.INT4, "compressed-tensors int4"),
        (
            compressed(8, "float", "channel", True),
            ExpertScheme.OTHER,
            "compressed-tensors fp8 with a scale per channel",
        ),
        (
            compressed(8, "float", "block", True, block_structure=[128, 128]),
            ExpertScheme.FP8_BLOCK,
            "compressed-tensors fp8 with a scale per block",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {}, "group_1": {}}},
            ExpertScheme.UNKNOWN,
            "compressed-tensors of several kinds",
        ),
        (compressed(4, "float", "group", False), ExpertScheme.OTHER, "compressed-tensors fp4 of format f"),
    ],
)
def test_formats_are_told_apart_and_named(raw: dict[str, Any], scheme: ExpertScheme, name: str) -> None:
    form = expert_format(MIXTRAL | {"quantization_config": raw})
    assert form is not None
    assert (form.scheme, form.name) == (scheme, name)


def test_a_checkpoint_without_a_quantisation_has_plain_experts() -> None:
    assert expert_format(MIXTRAL) is None


@pytest.mark.parametrize(
    ("method", "entry"),
    [
        ("compressed-tensors", "re:.*experts.*"),
        ("compressed-tensors", "model.layers.3.block_sparse_moe.experts.0.w1"),
        ("fp8", "model.layers.3.block_sparse_moe.experts"),
        ("fp8", "model.layers.3.block_sparse_moe.experts.0.w1"),
        ("awq", "experts"),
        ("gptq", r"-:.*experts"),
    ],
)
def test_experts_that_the_quantisation_leaves_out_are_plain(method: str, entry: str) -> None:
    raw = {"quant_method": method, "ignore": [entry], "dynamic": {entry: {}}, "bits": 4}
    assert expert_format(MIXTRAL | {"quantization_config": raw}) is None


@pytest.mark.parametrize(
    ("method", "entry"),
    [
        ("compressed-tensors", "lm_head"),
        ("compressed-tensors", "re:.*gate$"),
        ("compressed-tensors", "model.layers.3.block_sparse_moe.experts"),  # there, only a module's own name counts
        ("fp8", "experts"),
        ("fp8", "model.layers.3.self_attn.q_proj"),
        ("awq", "self_attn"),
        ("awq", "w1"),  # vLLM asks for all experts of a layer at once
        ("gptq", "-:.*self_attn"),
        ("gptq", "+:.*experts"),
    ],
)
def test_what_it_leaves_out_elsewhere_is_no_matter(method: str, entry: str) -> None:
    raw = {"quant_method": method, "modules_to_not_convert": [entry], "dynamic": {entry: {}}}
    assert not leaves_out(raw, "model.layers.3.block_sparse_moe.experts.0.w1")


@pytest.mark.parametrize(("group_size", "expected"), [(64, 0.640625), (128, 0.5703125), (-1, 0.5)])
def test_int4_is_as_large_as_the_cpu_build_packs_it(group_size: int, expected: float) -> None:
    """Read off vLLM 0.32: 1152 bytes for 32 outputs of 64 inputs, beside 32 float32 scales and 32 int8 zero points."""
    raw = {"quant_method": "gptq", "bits": 4, "group_size": group_size}
    assert cpu_build_bytes(expert_format(MIXTRAL | {"quantization_config": raw})) == expected


def test_other_formats_are_as_large_as_in_the_checkpoint() -> None:
    assert cpu_build_bytes(expert_format(MIXTRAL | {"quantization_config": {"quant_method": "mxfp4"}})) is None
    assert cpu_build_bytes(None) is None
