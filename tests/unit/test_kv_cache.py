# SPDX-License-Identifier: Apache-2.0
"""The host KV cache is a view of memory that somebody else allocated."""

import pytest
import torch

from vllm_moe_lightning.kernels.attention import AttentionTask
from vllm_moe_lightning.kernels.quantised_cache import QuantisedCache
from vllm_moe_lightning.kv_cache import HostKvCache, kv_bytes_per_token
from vllm_moe_lightning.kv_cache_type import ElementKind

all_kinds = pytest.mark.parametrize("kind", ["int8", "fp8"])


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


def test_a_quantised_token_costs_a_byte_per_element_and_a_scale_per_head() -> None:
    found = kv_bytes_per_token(num_layers=32, num_kv_heads=8, head_dim=128, element_bytes=2, kind="int8")
    assert found == 32 * 2 * 8 * (128 + 4)


@all_kinds
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_a_quantised_cache_takes_the_storage_for_bytes_of_elements_and_scales(
    kind: ElementKind, dtype: torch.dtype
) -> None:
    storage = torch.zeros(5, 3, 16, 2 * (8 + 4), dtype=dtype)
    cache = HostKvCache.over("layer0", storage, num_kv_heads=3, block_size=16, head_dim=8, kind=kind)
    assert (cache.num_blocks, cache.num_kv_heads, cache.block_size, cache.head_dim) == (5, 3, 16, 8)
    assert cache.block_bytes == 3 * 2 * 16 * (8 + 4)
    view = cache.for_kernels
    assert isinstance(view, QuantisedCache)
    assert view.kind == kind
    assert view.blocks.data_ptr() == storage.data_ptr()


@all_kinds
def test_blocks_copied_as_bytes_are_the_same_cache_elsewhere(kind: ElementKind) -> None:
    storage = torch.zeros(4 * 2 * 2 * 16 * (8 + 4), dtype=torch.uint8)
    cache = HostKvCache.over("layer0", storage, num_kv_heads=2, block_size=16, head_dim=8, kind=kind)
    key, value = torch.randn(2, 20, 2, 8, generator=torch.Generator().manual_seed(0))
    AttentionTask(cache.for_kernels, key=key, value=value, slot_mapping=torch.arange(16, 36)).run()
    copied = cache.over_copy(cache.bytes_of_blocks[1:3].clone().view(-1))
    assert copied.num_blocks == 2
    whole, part = cache.for_kernels, copied.for_kernels
    assert isinstance(whole, QuantisedCache)
    assert isinstance(part, QuantisedCache)
    assert torch.equal(part.dequantised(), whole.dequantised()[1:3])
    assert whole.dequantised()[1:3].abs().max() > 0


def test_storage_of_the_models_type_is_not_whole_quantised_blocks() -> None:
    with pytest.raises(ValueError, match=r"layer3: .* is not whole blocks of 1 heads x 2 x 16 tokens x 64 in fp8"):
        HostKvCache.over("layer3", torch.zeros(2 * 16 * 64), num_kv_heads=1, block_size=16, head_dim=64, kind="fp8")
