"""Tile sizes of paged_fused_moe per chip and batch: plain data, checked by benchmarks/triton_aot.py against each chip.

Chosen by what fits, not by a timing on the chip: shared memory, 255 registers without spills, and enough programs to
fill the chip at one token. Letters as in kernels/paged_moe.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TileConfig:
    """What one program computes: block_m tokens of one expert by block_n columns of silu(gate) * up, twice as many of
    the down projection (which has one weight matrix where the other has two)."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int  # tiles that go through an N-tile's weights one after the other: an expert's are neighbours
    num_warps: int
    num_stages: int  # of loads in flight; without effect before sm_80


@dataclass(frozen=True)
class ChipConfigs:
    """small: bound by reading weights, so all that counts is bytes in flight; large: by arithmetic."""

    small: TileConfig
    medium: TileConfig
    large: TileConfig


# By compute capability. A chip takes the newest entry that is not newer than itself.
CONFIGS_16_BIT = {
    # No asynchronous copies; and Triton 3.9 leaves its tensor cores alone, so a tile's unused rows take time too.
    75: ChipConfigs(
        small=TileConfig(4, 64, 64, 4, 4, 1),
        medium=TileConfig(16, 64, 32, 4, 4, 1),
        large=TileConfig(64, 32, 32, 8, 8, 1),
    ),
    80: ChipConfigs(
        small=TileConfig(16, 32, 128, 4, 4, 4),
        medium=TileConfig(64, 64, 64, 4, 4, 3),
        large=TileConfig(128, 64, 64, 8, 8, 3),
    ),
    # 99 KiB of shared memory: fewer or shorter stages than sm_80.
    86: ChipConfigs(
        small=TileConfig(16, 32, 128, 4, 4, 3),
        medium=TileConfig(64, 64, 32, 4, 4, 4),
        large=TileConfig(128, 64, 32, 8, 8, 4),
    ),
    90: ChipConfigs(
        small=TileConfig(16, 32, 128, 4, 4, 4),
        medium=TileConfig(64, 64, 64, 4, 4, 4),
        large=TileConfig(128, 128, 64, 8, 8, 3),
    ),
    100: ChipConfigs(
        small=TileConfig(16, 32, 128, 4, 4, 4),
        medium=TileConfig(64, 64, 64, 4, 4, 4),
        large=TileConfig(128, 128, 64, 8, 8, 3),
    ),
    120: ChipConfigs(
        small=TileConfig(16, 32, 128, 4, 4, 3),
        medium=TileConfig(64, 64, 32, 4, 4, 4),
        large=TileConfig(128, 64, 32, 8, 8, 4),
    ),
}

# Conversion takes registers, and so do sums that wait for a block's scale: fewer columns, or more warps.
CONFIGS_FLOAT8 = {
    75: CONFIGS_16_BIT[75],
    80: ChipConfigs(
        small=TileConfig(16, 32, 128, 4, 4, 4),
        medium=TileConfig(64, 32, 64, 4, 4, 4),
        large=TileConfig(128, 32, 64, 8, 8, 3),
    ),
    90: ChipConfigs(
        small=TileConfig(16, 32, 64, 4, 4, 5),
        medium=TileConfig(64, 64, 64, 4, 4, 4),
        large=TileConfig(128, 64, 64, 8, 8, 3),
    ),
    100: ChipConfigs(
        small=TileConfig(16, 32, 64, 4, 4, 5),
        medium=TileConfig(64, 64, 64, 4, 8, 4),
        large=TileConfig(128, 32, 128, 8, 8, 3),
    ),
    120: ChipConfigs(
        small=TileConfig(16, 32, 128, 4, 4, 3),
        medium=TileConfig(64, 32, 64, 4, 4, 4),
        large=TileConfig(128, 32, 128, 8, 8, 3),
    ),
}


def configs_of(capability: int, weight_bytes: int) -> ChipConfigs:
    """capability: 10 major + minor, as in sm_90; weight_bytes: of one weight, 1 or 2.

    Raises ValueError for a chip older than all entries.
    """
    table = CONFIGS_FLOAT8 if weight_bytes == 1 else CONFIGS_16_BIT
    entries = [entry for entry in table if entry <= capability]
    if not entries:
        raise ValueError(f"sm_{capability} is older than sm_{min(table)}, the oldest chip of paged_fused_moe")
    return table[max(entries)]


def config_for(
    capability: int,
    weight_bytes: int,
    *,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    columns_per_scale: int = 0,  # of block scales, of which a step over K may meet only one; 0: one for all columns
) -> TileConfig:
    """The smallest tile that takes the tokens which an expert has if all are equally liked."""
    configs = configs_of(capability, weight_bytes)
    num_choices = num_tokens * top_k
    tokens_per_expert = num_choices / max(1, min(num_experts, num_choices))
    fitting = (config for config in (configs.small, configs.medium) if tokens_per_expert <= config.block_m)
    config = next(fitting, configs.large)
    if columns_per_scale and columns_per_scale < config.block_k:
        return replace(config, block_k=columns_per_scale)
    return config
