# SPDX-License-Identifier: Apache-2.0
"""Tiles hold each choice once, of one expert each, and never more tiles are needed than the grid has."""

import pytest
import torch

from vllm_moe_lightning.kernels.token_tiles import TokenTiles, most_tiles, tiles_of


def check(topk_ids: torch.Tensor, num_experts: int, block_m: int) -> TokenTiles:
    tiles = tiles_of(topk_ids, num_experts, block_m)
    assert not tiles.one_per_tile
    num_choices, flat = topk_ids.numel(), topk_ids.view(-1).tolist()
    used = int(tiles.num_tiles)
    assert used <= tiles.num_tiles_bound == most_tiles(num_choices, num_experts, block_m)
    rows = tiles.choices.view(-1, block_m).tolist()
    seen = []
    for tile, expert in zip(rows[:used], tiles.tile_experts.tolist(), strict=False):
        choices = [choice for choice in tile if choice < num_choices]
        assert choices, "a tile without a choice"
        assert all(flat[choice] == expert for choice in choices)
        seen += choices
    assert sorted(seen) == [choice for choice in range(num_choices) if flat[choice] >= 0]
    return tiles


@pytest.mark.parametrize("block_m", [1, 16, 64])
@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts"), [(2, 2, 3), (40, 8, 60), (129, 2, 8), (300, 1, 4)])
def test_each_choice_is_in_one_tile_of_its_expert(num_tokens: int, top_k: int, num_experts: int, block_m: int) -> None:
    rng = torch.Generator().manual_seed(num_tokens)
    ids = torch.rand(num_tokens, num_experts, generator=rng).topk(top_k).indices
    check(ids, num_experts, block_m)
    left_out = torch.rand(ids.shape, generator=rng) < 0.5
    check(torch.where(left_out, -1, ids), num_experts, block_m)
    check(torch.full_like(ids, -1), num_experts, block_m)
    check(torch.full_like(ids, num_experts - 1), num_experts, block_m)


def test_one_choice_more_than_whole_tiles_for_every_expert_still_fits_the_grid() -> None:
    ids = torch.arange(8).repeat(17).view(-1, 1)  # 17 of each: two tiles of 16
    tiles = check(ids, 8, 16)
    assert int(tiles.num_tiles) == 16 == tiles.num_tiles_bound


def test_choices_of_an_expert_keep_their_order() -> None:
    tiles = check(torch.tensor([[1, 0], [0, 1], [1, 0]]), 2, 4)
    assert tiles.choices[:8].tolist() == [1, 2, 5, 6, 0, 3, 4, 6]


def test_a_single_token_is_not_sorted() -> None:
    tiles = tiles_of(torch.tensor([[5, -1, 2]]), 8, 16)
    assert tiles.one_per_tile
    assert tiles.tile_experts.tolist() == [5, -1, 2]


def test_few_tokens_of_many_experts_are_not_sorted() -> None:
    ids = torch.zeros(4, 8, dtype=torch.int64)
    assert tiles_of(ids, 128, 16).one_per_tile
    assert not tiles_of(ids, 127, 16).one_per_tile
