"""How a checkpoint stores the weights of its routed experts: read from config.json, and named for whoever must refuse.

Decides which kind of kernel the experts need, what tensors each projection must have, and which modules were left as
they were. Whether there is such a kernel here is vLLM's to say (integration/quantised_experts.py), and the bytes of a
weight are model_config's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from vllm_moe_lightning.checkpoint_layers import LAYOUTS

FP8_BLOCK = [128, 128]  # the block that vLLM's CPU kernel is written for
MXFP4_METHODS = ("mxfp4", "gpt_oss_mxfp4")  # the second is what vLLM renames the first to, in its own configuration
_PACKED, _SCALED = ("qweight", "qzeros", "scales"), ("weight", "weight_scale")


class ExpertScheme(Enum):
    """What a kernel must be able to read."""

    FP8_BLOCK = auto()
    INT8 = auto()
    INT4 = auto()
    MXFP4 = auto()
    OTHER = auto()
    """None that the CPU build has a kernel for: fp8 without blocks, act-order, weight-only int8 and the like."""
    UNKNOWN = auto()
    """A method that may stand for any of these."""


@dataclass(frozen=True)
class ExpertFormat:
    name: str
    """As the user knows it."""
    scheme: ExpertScheme
    tensors: tuple[str, ...] = ()
    """In place of each projection's `weight`; empty where this is not known."""
    group_size: int = 0
    """Inputs that share a scale; 0 for all of them."""


def expert_format(config: Mapping[str, Any]) -> ExpertFormat | None:
    """`config`: the model's config.json. None if the experts are not quantised."""
    raw = config.get("quantization_config")
    return None if not raw or leaves_out(raw, expert_projection(config)) else format_of(raw)


def format_of(raw: Mapping[str, Any]) -> ExpertFormat:
    """`raw`: a quantization_config, of which this looks at all but the exceptions (`leaves_out`)."""
    method = str(raw.get("quant_method", "")).lower()
    if method == "fp8":
        return _fp8(raw)
    if method == "compressed-tensors":
        return _compressed_tensors(raw)
    if method in MXFP4_METHODS:
        return ExpertFormat("mxfp4", ExpertScheme.MXFP4)
    if method in ("awq", "awq_marlin", "auto_awq"):
        parts = _PACKED if raw.get("zero_point", True) else ("qweight", "scales")
        return _integers("AWQ", raw.get("bits", raw.get("w_bit")), parts, raw.get("group_size"))
    if method in ("gptq", "gptq_marlin", "auto_gptq"):
        form = _integers("GPTQ", raw.get("bits"), _PACKED, raw.get("group_size"))
        is_reordered = bool(raw.get("desc_act"))
        return replace(form, name=f"{form.name} with desc_act", scheme=ExpertScheme.OTHER) if is_reordered else form
    if method == "modelopt":
        return ExpertFormat(f"modelopt {raw.get('quant_algo', '')}".rstrip(), ExpertScheme.OTHER)
    return ExpertFormat(method or "an unnamed quantisation", ExpertScheme.UNKNOWN)


def leaves_out(raw: Mapping[str, Any], name: str) -> bool:
    """Whether a quantization_config excepts the module `name`, by the rules that vLLM 0.32 reads it with: each method
    has its own, and all but compressed-tensors ask for the experts of a layer as one module."""
    method = str(raw.get("quant_method", "")).lower()
    module, found, _ = name.partition(".experts.")
    module += found.removesuffix(".")
    if method.startswith(("gptq", "auto_gptq")):
        rules = raw.get("dynamic") or ()
        return any(rule.startswith("-:") and re.match(rule.removeprefix("-:"), module) for rule in rules)
    entries = raw.get("ignore") or raw.get("ignored_layers") or raw.get("modules_to_not_convert") or ()
    if method == "compressed-tensors":
        patterns = [entry.removeprefix("re:") for entry in entries if entry.startswith("re:")]
        return name in entries or any(re.match(pattern, name) for pattern in patterns)
    if method.startswith(("awq", "auto_awq")):
        return any(entry in module for entry in entries)
    return any(entry == module or entry.startswith(f"{module}.") for entry in entries)


def expert_projection(config: Mapping[str, Any]) -> str:
    """One of an expert in the last layer: the first layers of some models have none."""
    layout = LAYOUTS.get(next(iter(config.get("architectures") or ()), ""))
    last = int(config.get("num_hidden_layers") or config.get("n_layers") or 1) - 1
    if layout is None or "{}" not in layout.projections[0][0]:
        return f"model.layers.{last}.mlp.experts.0.gate_proj"
    projection = layout.projections[0][0].format(0).removesuffix(".weight")
    return f"{layout.stack}.{last}.{layout.experts}.{projection}"


def attention_projection(config: Mapping[str, Any]) -> str:
    """Of the last layer."""
    layer = expert_projection(config).partition(".mlp.")[0].partition(".block_sparse_moe.")[0]
    return f"{layer}.self_attn.o_proj"


def cpu_build_bytes(form: ExpertFormat | None) -> float | None:
    """Per weight, as vLLM's CPU build packs it; None where that is what the checkpoint has.

    Its 4-bit kernels (convert_weight_packed_scale_zp) keep, for each output and group, a float32 scale, an int8 zero
    point and a 32-bit compensation beside the weights.
    """
    if form is None or form.scheme is not ExpertScheme.INT4:
        return None
    return 0.5 + (9 / form.group_size if form.group_size else 0.0)


def _fp8(raw: Mapping[str, Any]) -> ExpertFormat:
    block = raw.get("weight_block_size")
    if block is None:
        return ExpertFormat("fp8 with a scale per tensor", ExpertScheme.OTHER, _SCALED)
    scheme = ExpertScheme.FP8_BLOCK if list(block) == FP8_BLOCK else ExpertScheme.OTHER
    return ExpertFormat(f"fp8 in blocks of {block[0]} x {block[1]}", scheme, ("weight", "weight_scale_inv"))


def _compressed_tensors(raw: Mapping[str, Any]) -> ExpertFormat:
    groups = list((raw.get("config_groups") or {}).values())
    if len(groups) != 1:
        return ExpertFormat("compressed-tensors of several kinds", ExpertScheme.UNKNOWN)
    weights, activations = (groups[0].get(part) or {} for part in ("weights", "input_activations"))
    kind, bits, strategy = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
    if (kind, bits) == ("int", 4) and not activations:
        return _integers("compressed-tensors", 4, ("weight_packed", "weight_scale"), weights.get("group_size"))
    if (kind, bits, strategy) == ("int", 8, "channel") and activations.get("dynamic"):
        return ExpertFormat("compressed-tensors int8", ExpertScheme.INT8, _SCALED)
    name = f"compressed-tensors {'fp' if kind == 'float' else kind}{bits}"
    if (kind, bits) == ("float", 8):
        is_known = strategy == "block" and list(weights.get("block_structure") or ()) == FP8_BLOCK
        scheme = ExpertScheme.FP8_BLOCK if is_known else ExpertScheme.OTHER
        return ExpertFormat(f"{name} with a scale per {strategy}", scheme, _SCALED)
    return ExpertFormat(f"{name} of format {raw.get('format')}", ExpertScheme.OTHER)


def _integers(family: str, bits: object, tensors: tuple[str, ...], group_size: object) -> ExpertFormat:
    size = group_size if isinstance(group_size, int) and group_size > 0 else 0
    scheme = ExpertScheme.INT4 if bits == 4 else ExpertScheme.OTHER
    return ExpertFormat(f"{family} int{bits}", scheme, tensors, size)
