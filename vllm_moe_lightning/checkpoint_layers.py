# SPDX-License-Identifier: Apache-2.0
"""Which tensors an unquantised checkpoint must have, by name and shape, for the models that vLLM loads blindly.

Exact for the architectures in `LAYOUTS`, which says what vLLM's own loaders take. Other architectures are held to one
rule: numbered experts are complete and alike.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]  # of all tensors, by name
_NUMBERED_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Layout:
    """Names inside a layer. `{}` stands for the expert; a name without it holds all experts."""

    experts: str
    projections: tuple[tuple[str, ...], ...]
    """Each must be there under one of its names."""
    sizes: Mapping[str, tuple[str, ...]]
    """Shape of each name: E experts, I intermediate, H hidden."""
    stack: str = "model.layers"
    embedding: str = "model.embed_tokens.weight"


_PER_EXPERT_SIZES = {
    "{}.gate_proj.weight": ("I", "H"),
    "{}.up_proj.weight": ("I", "H"),
    "{}.down_proj.weight": ("H", "I"),
}
_QWEN = Layout(
    experts="mlp.experts",
    projections=(
        ("{}.gate_proj.weight", "gate_up_proj"),
        ("{}.up_proj.weight", "gate_up_proj"),
        ("{}.down_proj.weight", "down_proj"),
    ),
    sizes={**_PER_EXPERT_SIZES, "gate_up_proj": ("E", "2I", "H"), "down_proj": ("E", "H", "I")},
)
_MIXTRAL = Layout(  # one tensor per expert only: vLLM 0.32 accepts 3-D ones without a word and answers differently
    experts="block_sparse_moe.experts",
    projections=(
        ("{}.w1.weight", "{}.gate_proj.weight"),
        ("{}.w3.weight", "{}.up_proj.weight"),
        ("{}.w2.weight", "{}.down_proj.weight"),
    ),
    sizes={
        **_PER_EXPERT_SIZES,
        "{}.w1.weight": ("I", "H"),
        "{}.w3.weight": ("I", "H"),
        "{}.w2.weight": ("H", "I"),
    },
)
_DBRX = Layout(
    experts="ffn.experts.mlp",
    projections=(("w1",), ("v1",), ("w2",)),
    sizes={"w1": ("EI", "H"), "v1": ("EI", "H"), "w2": ("EI", "H")},
    stack="transformer.blocks",
    embedding="transformer.wte.weight",
)
LAYOUTS: Mapping[str, Layout] = {
    "MixtralForCausalLM": _MIXTRAL,
    "Qwen2MoeForCausalLM": _QWEN,
    "Qwen3MoeForCausalLM": _QWEN,
    "OlmoeForCausalLM": _QWEN,
    "DbrxForCausalLM": _DBRX,
}


@dataclass(frozen=True)
class _Model:
    """What config.json says, under one name for all architectures."""

    layout: Layout
    num_layers: int
    num_experts: int
    intermediate: int
    hidden: int
    dense_layers: frozenset[int]

    @staticmethod
    def of(config: Mapping[str, Any]) -> _Model | None:
        """None for an architecture that is not in LAYOUTS."""
        layout = LAYOUTS.get(next(iter(config.get("architectures") or ()), ""))
        if layout is None:
            return None
        flat = {**config, **(config.get("ffn_config") or {})}

        def first(*keys: str) -> int:
            return next(int(flat[key]) for key in keys if flat.get(key) is not None)

        num_layers = first("num_hidden_layers", "n_layers")
        dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
        return _Model(
            layout,
            num_layers,
            first("num_local_experts", "num_experts", "moe_num_experts"),
            first("moe_intermediate_size", "ffn_hidden_size", "intermediate_size"),
            first("hidden_size", "d_model"),
            frozenset(layer for layer in range(num_layers) if layer in dense or (layer + 1) % step),
        )

    def expand(self, name: str) -> list[str]:
        return [name.format(expert) for expert in range(self.num_experts)] if "{}" in name else [name]

    def shape(self, name: str) -> tuple[int, ...]:
        sizes = {"E": self.num_experts, "I": self.intermediate, "H": self.hidden}
        sizes |= {"2I": 2 * self.intermediate, "EI": self.num_experts * self.intermediate}
        return tuple(sizes[size] for size in self.layout.sizes[name])

    def experts_of(self, shapes: Shapes) -> dict[int, dict[str, str]]:
        """Of each layer with experts: their names inside the block -> whole names."""
        found: dict[int, dict[str, str]] = {n: {} for n in range(self.num_layers) if n not in self.dense_layers}
        prefix = re.compile(rf"{re.escape(self.layout.stack)}\.(\d+)\.{re.escape(self.layout.experts)}\.(.+)")
        for name in shapes:
            if (match := prefix.fullmatch(name)) and int(match[1]) in found:
                found[int(match[1])][match[2]] = name
        return found


def missing_at_top(shapes: Shapes, config: Mapping[str, Any]) -> list[str]:
    """The embedding, and the output head unless it is tied."""
    model = _Model.of(config)
    if model is None:
        return []
    wanted = [model.layout.embedding] + ([] if config.get("tie_word_embeddings") else ["lm_head.weight"])
    return [name for name in wanted if name not in shapes]


def unknown_experts(shapes: Shapes, config: Mapping[str, Any]) -> list[str]:
    """Tensors among the experts that vLLM's loader would skip."""
    model = _Model.of(config)
    if model is None:
        return []
    known = {name for template in model.layout.sizes for name in model.expand(template)}
    return [full for stored in model.experts_of(shapes).values() for name, full in stored.items() if name not in known]


def incomplete_layers(shapes: Shapes, config: Mapping[str, Any]) -> list[str]:
    """Missing expert tensors, and other weights that a layer lacks and another one of its kind has."""
    model = _Model.of(config)
    if model is None:
        return unlike_experts(shapes)
    missing = []
    for layer, stored in model.experts_of(shapes).items():
        prefix = f"{model.layout.stack}.{layer}.{model.layout.experts}."
        missing += [prefix + name for name in _missing_experts(stored, model)]
    return missing + _missing_beside_experts(shapes, model)


def incomplete_experts(
    shapes: Shapes, config: Mapping[str, Any], parts_of: Callable[[str], tuple[str, ...]]
) -> list[str]:
    """What the experts of a quantised checkpoint lack. `parts_of` a projection ("...experts.0.up_proj"): the names of
    its tensors in place of `weight`; none where they are not known."""
    model = _Model.of(config)
    if model is None:
        return []
    missing = []
    for layer, stored in model.experts_of(shapes).items():
        if any(not name[0].isdigit() for name in stored):  # all experts in one tensor: names of its own
            continue
        prefix = f"{model.layout.stack}.{layer}.{model.layout.experts}."
        a_projection = model.layout.projections[0][0].format(0).removesuffix(".weight")
        for part in parts_of(prefix + a_projection):
            as_plain = {name.removesuffix(part) + "weight": name for name in stored if name.endswith(f".{part}")}
            absent = _missing_experts(as_plain, model)
            missing += [prefix + name.removesuffix("weight") + part for name in absent]
    return missing


def wrong_shapes(shapes: Shapes, config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Expert tensors that are not as large as config.json says, with the expected shape."""
    model = _Model.of(config)
    if model is None:
        return
    expected = {name: model.shape(template) for template in model.layout.sizes for name in model.expand(template)}
    for stored in model.experts_of(shapes).values():
        yield from ((full, expected[name]) for name, full in stored.items() if shapes[full] != expected[name])


def _missing_experts(stored: Mapping[str, str], model: _Model) -> list[str]:
    is_fused = any(not name[0].isdigit() for name in stored)
    missing: dict[str, None] = {}  # in order, without repeats
    for alternatives in model.layout.projections:
        absent = {name: [n for n in model.expand(name) if n not in stored] for name in alternatives}
        if all(absent.values()):
            # Most likely meant: the alternative that is there in part, else the one of the other projections' kind.
            meant = max(
                alternatives,
                key=lambda name: (len(absent[name]) < len(model.expand(name)), ("{}" not in name) == is_fused),
            )
            missing |= dict.fromkeys(absent[meant])
    return list(missing)


def _missing_beside_experts(shapes: Shapes, model: _Model) -> list[str]:
    """Attention, router, shared expert, dense MLP: layers of a kind have the same, and a damaged file has less."""
    stack, experts = f"{model.layout.stack}.", f"{model.layout.experts}."
    names: dict[int, set[str]] = {layer: set() for layer in range(model.num_layers)}
    for name in shapes:
        number, _, rest = name.removeprefix(stack).partition(".")
        is_ours = name.startswith(stack) and number.isdigit() and int(number) in names
        if is_ours and rest.endswith((".weight", ".bias")) and not rest.startswith(experts):
            names[int(number)].add(rest)
    kinds: dict[bool, set[str]] = defaultdict(set)
    for layer, found in names.items():
        kinds[layer in model.dense_layers] |= found
    return [
        f"{stack}{layer}.{name}"
        for layer, found in names.items()
        for name in sorted(kinds[layer in model.dense_layers] - found)
    ]


def unlike_experts(shapes: Shapes) -> list[str]:
    """What an expert lacks and another one of its layer has: damage, or experts of which only some are quantised."""
    blocks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in shapes:
        if match := _NUMBERED_EXPERT.fullmatch(name):
            blocks[match[1]][int(match[2])].add(match[3])
    return [
        f"{block}.{expert}.{name}"
        for block, experts in blocks.items()
        for expert in range(max(experts) + 1)
        for name in sorted(set().union(*experts.values()) - experts.get(expert, set()))
    ]
