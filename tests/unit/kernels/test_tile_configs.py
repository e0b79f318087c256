# SPDX-License-Identifier: Apache-2.0
"""Which tiles a chip and a batch get. That they fit the chip: tests/unit/test_triton_aot.py."""

import pytest

from vllm_moe_lightning.kernels.tile_configs import CONFIGS_16_BIT, CONFIGS_FLOAT8, config_for, configs_of


def test_a_chip_takes_the_newest_entry_that_is_not_newer() -> None:
    assert configs_of(89, 2) is CONFIGS_16_BIT[86]
    assert configs_of(87, 2) is CONFIGS_16_BIT[86]
    assert configs_of(103, 2) is CONFIGS_16_BIT[100]
    assert configs_of(89, 1) is CONFIGS_FLOAT8[80]
    with pytest.raises(ValueError, match="sm_70 is older than sm_75"):
        configs_of(70, 2)


def test_tiles_grow_with_the_tokens_of_an_expert() -> None:
    def block_m(num_tokens: int) -> int:
        return config_for(90, 2, num_tokens=num_tokens, top_k=2, num_experts=8).block_m

    assert [block_m(n) for n in (1, 64, 65, 256, 257)] == [16, 16, 64, 64, 128]


def test_few_tokens_of_many_experts_have_one_each() -> None:
    assert config_for(75, 2, num_tokens=4, top_k=8, num_experts=128) == CONFIGS_16_BIT[75].small


def test_a_step_over_k_meets_one_block_of_scales() -> None:
    def block_k(columns_per_scale: int) -> int:
        return config_for(80, 1, num_tokens=1, top_k=2, num_experts=8, columns_per_scale=columns_per_scale).block_k

    assert [block_k(columns) for columns in (0, 64, 128, 256)] == [128, 64, 128, 128]
