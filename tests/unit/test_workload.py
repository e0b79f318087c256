# SPDX-License-Identifier: Apache-2.0
"""KV caches in whole blocks, as an engine lays them out."""

import pytest

from vllm_moe_lightning.workload import KvBlocks


def test_without_blocks_a_cache_is_as_long_as_its_sequences() -> None:
    assert KvBlocks().num_blocks(10, 77.5) == 775.0


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (127.2, 1), (128, 1), (128.5, 2), (640, 5)])
def test_a_sequence_takes_whole_blocks(tokens: float, blocks: int) -> None:
    assert KvBlocks(tokens_per_block=128).blocks_of(tokens) == blocks


def test_a_cache_holds_the_longest_sequence_and_the_block_that_nobody_gets() -> None:
    blocks = KvBlocks(tokens_per_block=32, unused_blocks=1, least_usable_blocks=8)
    assert blocks.num_blocks(2, 96) == 8 + 1
    assert blocks.num_blocks(3, 96) == 9 + 1


def test_a_fixed_cache_does_not_grow_with_the_batch() -> None:
    blocks = KvBlocks(tokens_per_block=32, unused_blocks=1, least_usable_blocks=8, fixed_blocks=5)
    assert blocks.num_blocks(100, 96) == 5
