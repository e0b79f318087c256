# SPDX-License-Identifier: Apache-2.0
"""Changes to a written checkpoint that give its routers a wanted behaviour."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FEATURE = 2.0  # value of the constant feature in the residual stream


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Rewrites model.safetensors in `folder` after `change` has been at its tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    return folder


def is_router(name: str) -> bool:
    return name.endswith(".gate.weight")


def give_routers_a_constant(tensors: dict[str, torch.Tensor]) -> None:
    """Makes feature 0 of every router's input a positive number that depends on nothing, and lets no one else see it.

    The embedding puts it in, no later matrix writes or reads it. A router's column 0 then acts as a bias.
    """
    for name, tensor in tensors.items():
        if "embed_tokens" in name:
            tensor[:, 0] = FEATURE
        elif name.endswith("post_attention_layernorm.weight"):
            tensor[0] = 10.0  # so that it stays well above rounding once the other features have grown
        elif name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight")):
            tensor[0, :] = 0.0
        elif tensor.ndim == 2:  # everything else that reads the residual stream, the routers for now included
            tensor[:, 0] = 0.0


def set_router_bias(tensors: dict[str, torch.Tensor], bias: float, experts: slice = slice(None)) -> None:
    """After give_routers_a_constant: adds `bias` times that positive number to the scores of `experts`."""
    for name, tensor in tensors.items():
        if is_router(name):
            tensor[experts, 0] = bias


def repeat_router_rows(tensors: dict[str, torch.Tensor], groups: list[list[int]]) -> None:
    """The experts of a group get the same row, hence exactly equal scores."""
    for name, tensor in tensors.items():
        if is_router(name):
            for first, *others in groups:
                tensor[others] = tensor[first].clone()
