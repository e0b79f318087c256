"""Which tokens a tile of the grouped GEMM computes: choices sorted by expert, each expert's filled up to whole tiles.

Plain torch, on whichever device the ids are, and without asking the device for a number: the grid is made for the
most tiles that there could be, and the programs of those that there are not end at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SINGLE_CHOICE_SPARSITY = 4
"""With at most one choice for so many experts, an expert rarely has two, and sorting would cost more than it saves."""


@dataclass(frozen=True)
class TokenTiles:
    """A choice is an entry of topk_ids, counted row by row. All tensors int32."""

    choices: torch.Tensor  # [num_tiles_bound * block_m], num_choices where a tile has no more
    tile_experts: torch.Tensor  # [num_tiles_bound]; negative: left out
    num_tiles: torch.Tensor  # [1]: those in use come first
    one_per_tile: bool  # tile i has choice i alone, and `choices` is not read

    @property
    def num_tiles_bound(self) -> int:
        return self.tile_experts.numel()


def tiles_of(topk_ids: torch.Tensor, num_experts: int, block_m: int) -> TokenTiles:
    """topk_ids: [tokens, top_k] integers, negative for choices that are computed elsewhere or not now."""
    num_choices = topk_ids.numel()
    if topk_ids.shape[0] == 1 or num_choices * SINGLE_CHOICE_SPARSITY <= num_experts:
        return _one_per_tile(topk_ids)
    ids = topk_ids.reshape(-1).long()
    device = ids.device
    # Choices that are left out count as those of one more expert, sorted behind all others.
    keys = torch.where(ids < 0, num_experts, ids)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, keys, torch.ones_like(keys))
    padded_ends = ((counts[:-1] + block_m - 1) // block_m * block_m).cumsum(0)
    ends = counts.cumsum(0)
    order = keys.argsort(stable=True)
    sorted_keys = keys[order]
    num_tiles_bound = most_tiles(num_choices, num_experts, block_m)
    num_rows = num_tiles_bound * block_m
    # From an expert's first place in `order` to its first row in the tiles; what is left out goes past the last row.
    padded_begins = torch.cat([padded_ends.new_zeros(1), padded_ends[:-1], padded_ends.new_full((1,), num_rows)])
    places = torch.arange(num_choices, device=device) - (ends - counts)[sorted_keys] + padded_begins[sorted_keys]
    choices = torch.full((num_rows + 1,), num_choices, dtype=torch.int32, device=device)
    choices.scatter_(0, places.clamp_(max=num_rows), order.int())
    tile_begins = torch.arange(num_tiles_bound, device=device) * block_m
    tile_experts = torch.searchsorted(padded_ends, tile_begins, right=True).clamp_(max=num_experts - 1)
    return TokenTiles(choices[:num_rows], tile_experts.int(), (padded_ends[-1:] // block_m).int(), False)


def most_tiles(num_choices: int, num_experts: int, block_m: int) -> int:
    """The most tiles that so many choices can need: each expert that has any may fill its last tile with one only."""
    num_used = min(num_choices, num_experts)
    return (num_choices + num_used * (block_m - 1)) // block_m


def _one_per_tile(topk_ids: torch.Tensor) -> TokenTiles:
    experts = topk_ids.reshape(-1).int().contiguous()
    return TokenTiles(experts, experts, experts, True)
