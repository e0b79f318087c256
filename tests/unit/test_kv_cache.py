# SPDX-License-Identifier: Apache-2.0
"""The host KV cache is a view of memory that somebody else allocated."""

import pytest
import torch

from vllm_moe_lightning.kv_cache import HostKvCache, kv_bytes_per_token


def test_the_cache_has_the_sizes_it_was_given_and_shares_the_memory() -> None:
    storage = torch.zeros(5, 2 * 3 * 16 * 8, dtype=torch.bfloat16)
    cache = HostKvCache.over("layer0", storage, num_kv_heads=3, block_size=16, head_dim=8)
    assert (cache.num_blocks, cache.num_kv_heads, cache.block_size, cache.head_dim) == (5, 3, 16, 8)
    assert cache.block_bytes * cache.num_blocks == storage.nbytes
    assert cache.blocks.data_ptr() == storage.data_ptr()


def test_a_block_is_contiguous_with_the_keys_of_a_head_before_its_values() -> None:
    storage = torch.arange(2 * 2 * 2 * 4 * 8, dtype=torch.float32)
    cache = HostKvCache.over("layer0", storage, num_kv_heads=2, block_size=4, head_dim=8)
    assert cache.blocks[1].is_contiguous()
    keys, values = cache.blocks[1, 1, 0], cache.blocks[1, 1, 1]
    assert values.data_ptr() - keys.data_ptr() == 4 * 8 * 4


def test_memory_that_is_not_whole_blocks_is_refused_with_its_shape() -> None:
    with pytest.raises(ValueError, match=r"layer3: shape \(257,\)"):
        HostKvCache.over("layer3", torch.zeros(257), num_kv_heads=1, block_size=16, head_dim=8)


def test_memory_with_holes_is_refused() -> None:
    with pytest.raises(ValueError, match="stride"):
        HostKvCache.over("layer3", torch.zeros(512, 2)[:, 0], num_kv_heads=1, block_size=16, head_dim=8)


def test_memory_that_is_not_on_the_host_is_refused() -> None:
    with pytest.raises(ValueError, match="layer3 must be in host memory, got device meta"):
        HostKvCache.over("layer3", torch.empty(512, device="meta"), num_kv_heads=1, block_size=16, head_dim=8)


def test_a_token_costs_keys_and_values_of_key_value_heads_in_every_layer() -> None:
    # Mixtral-8x7B: 32 layers, 8 key/value heads (of 32 query heads) of 128, bfloat16.
    assert kv_bytes_per_token(num_layers=32, num_kv_heads=8, head_dim=128, element_bytes=2) == 131072
