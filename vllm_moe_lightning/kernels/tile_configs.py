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
    group_m: int  # tiles that go through an N-tile's weights one after the other
    num_warps: int
    num_stages: int  # of loads in flight; without effect before sm_80


SMALL = "small"  # up to 16 tokens per expert: reads each weight once, so all that counts is bytes in flight
MEDIUM = "medium"  # up to 64
LARGE = "large"

# By compute capability. A chip takes the newest entry that is not newer than itself.
CONFIGS: dict[int, dict[str, TileConfig]] = {
    # No asynchronous copies, so one stage; 64 KiB for all blocks of a multiprocessor.
    75: {
        SMALL: TileConfig(16, 32, 64, 1, 4, 1),
        MEDIUM: TileConfig(32, 64, 32, 4, 4, 1),
        LARGE: TileConfig(64, 64, 32, 8, 8, 1),
    },
    80: {
        SMALL: TileConfig(16, 32, 128, 1, 4, 4),
        MEDIUM: TileConfig(64, 64, 64, 4, 4, 3),
        LARGE: TileConfig(128, 64, 64, 8, 8, 3),
    },
    # 99 KiB: fewer stages than sm_80.
    86: {
        SMALL: TileConfig(16, 32, 128, 1, 4, 3),
        MEDIUM: TileConfig(64, 64, 32, 4, 4, 4),
        LARGE: TileConfig(128, 64, 32, 8, 8, 4),
    },
    90: {
        SMALL: TileConfig(16, 32, 128, 1, 4, 4),
        MEDIUM: TileConfig(64, 64, 64, 4, 4, 4),
        LARGE: TileConfig(128, 128, 64, 8, 8, 3),
    },
    100: {
        SMALL: TileConfig(16, 32, 128, 1, 4, 4),
        MEDIUM: TileConfig(64, 64, 64, 4, 4, 4),
        LARGE: TileConfig(128, 128, 64, 8, 8, 3),
    },
    120: {
        SMALL: TileConfig(16, 32, 128, 1, 4, 3),
        MEDIUM: TileConfig(64, 64, 32, 4, 4, 4),
        LARGE: TileConfig(128, 64, 32, 8, 8, 4),
    },
}


def configs_of(capability: int) -> dict[str, TileConfig]:
    """capability: 10 major + minor, as in sm_90. Raises ValueError for a chip older than all entries."""
    entries = [entry for entry in CONFIGS if entry <= capability]
    if not entries:
        raise ValueError(f"sm_{capability} is older than sm_{min(CONFIGS)}, the oldest chip of paged_fused_moe")
    return CONFIGS[max(entries)]


def config_for(capability: int, num_tokens: int, top_k: int, num_experts: int, columns_per_scale: int) -> TileConfig:
    """By the tokens that an expert has on average, were all equally liked.

    columns_per_scale: of block scales, of which a step over K may meet only one; 0: one for all columns.
    """
    num_choices = num_tokens * top_k
    tokens_per_expert = num_choices / max(1, min(num_experts, num_choices))
    size = SMALL if tokens_per_expert <= 16 else MEDIUM if tokens_per_expert <= 64 else LARGE
    config = configs_of(capability)[size]
    if columns_per_scale and columns_per_scale < config.block_k:
        return replace(config, block_k=columns_per_scale)
    return config
