# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time compilation: every chip gets a kernel that fits it. All of them: benchmarks/triton_aot.py."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from vllm_moe_lightning.kernels.tile_configs import configs_of

ROOT = Path(__file__).parents[2]
CHIPS = (75, 80, 86, 89, 90, 100, 120)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("triton")
    path = tmp_path_factory.mktemp("aot") / "aot.json"
    command = [sys.executable, "benchmarks/triton_aot.py", "--size", "small", "--kernel", "gate_up_kernel"]
    command += ["--variant", "sorted tokens"]
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
        assert build["load_bytes"] == 16, f"sm_{build['capability']}"


def test_the_recorded_builds_are_of_the_tiles_in_force() -> None:
    recorded = json.loads((ROOT / "benchmarks/results/triton_aot.json").read_text())
    assert recorded["faults"] == {}
    assert {build["capability"] for build in recorded["builds"]} == set(CHIPS)
    for build in recorded["builds"]:
        weight_bytes = 1 if build["weights"].startswith("float8") else 2
        config = getattr(configs_of(build["capability"], weight_bytes), build["size"])
        assert build["tiles"] == asdict(config)
