# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time compilation: every chip gets a kernel that fits it. All of them: benchmarks/triton_aot.py."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_moe_lightning.kernels.tile_configs import CONFIGS, SMALL, config_for, configs_of

ROOT = Path(__file__).parents[2]
CHIPS = (75, 80, 86, 89, 90, 100, 120)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("triton")
    path = tmp_path_factory.mktemp("aot") / "aot.json"
    command = [sys.executable, "benchmarks/triton_aot.py", "--size", "small", "--kernel", "gate_up_kernel"]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [*command, "--weights", "float16", "--json", str(path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return json.loads(path.read_text())


def test_every_chip_gets_a_kernel_within_its_limits(result: dict[str, Any]) -> None:
    assert [build["capability"] for build in result["builds"]] == list(CHIPS)
    for build in result["builds"]:
        assert 0 < build["shared_bytes"] <= build["shared_limit_bytes"]
        assert 0 < build["registers"] <= 255
        assert build["spilled_bytes"] == 0


def test_weights_are_loaded_16_bytes_at_a_time(result: dict[str, Any]) -> None:
    for build in result["builds"]:
        assert build["wide_load_ratio"] > 0.8, f"sm_{build['capability']}"


def test_the_recorded_builds_are_of_the_tiles_in_force() -> None:
    recorded = json.loads((ROOT / "benchmarks/results/triton_aot.json").read_text())
    assert recorded["faults"] == {}
    assert {build["capability"] for build in recorded["builds"]} == set(CHIPS)
    for build in recorded["builds"]:
        config = configs_of(build["capability"])[build["size"]]
        assert build["tiles"] == {
            "block_m": config.block_m,
            "block_n": config.block_n,
            "block_k": config.block_k,
            "group_m": config.group_m,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }


def test_a_chip_takes_the_newest_entry_that_is_not_newer() -> None:
    assert configs_of(89) is CONFIGS[86]
    assert configs_of(87) is CONFIGS[86]
    assert configs_of(103) is CONFIGS[100]
    with pytest.raises(ValueError, match="sm_70 is older than sm_75"):
        configs_of(70)


def test_tiles_grow_with_the_tokens_of_an_expert() -> None:
    def block_m(num_tokens: int) -> int:
        return config_for(90, num_tokens, top_k=2, num_experts=8, columns_per_scale=0).block_m

    assert [block_m(n) for n in (1, 64, 65, 256, 257)] == [16, 16, 64, 64, 128]


def test_a_step_over_k_meets_one_block_of_scales() -> None:
    assert config_for(90, 1, 2, 8, columns_per_scale=64).block_k == 64
    assert config_for(90, 1, 2, 8, columns_per_scale=128).block_k == CONFIGS[90][SMALL].block_k
