# SPDX-License-Identifier: Apache-2.0
"""What stock vLLM would do, by the same model: fits or not, and how fast."""

from pathlib import Path

import pytest

from vllm_moe_lightning.hardware_presets import preset_profile
from vllm_moe_lightning.model_config import read_model_spec
from vllm_moe_lightning.policy.limits import PlanLimits
from vllm_moe_lightning.stock_vllm import stock_runs
from vllm_moe_lightning.workload import Workload

CONFIGS = Path(__file__).parent / "model_configs"
MIXTRAL, OLMOE = (read_model_spec(CONFIGS / f"{name}.json") for name in ("mixtral-8x7b", "olmoe-1b-7b"))
WORKLOAD = Workload(512, 128)


def test_a_model_larger_than_the_device_can_only_be_offloaded() -> None:
    runs = stock_runs(MIXTRAL, preset_profile("t4"), WORKLOAD, PlanLimits())
    assert runs.on_device is None
    assert runs.offload is not None
    assert runs.offload.num_resident_layers < MIXTRAL.num_moe_layers


@pytest.mark.parametrize("gpu", ["l4", "a100-40", "h200"])
def test_weights_and_cache_on_the_device_fit_it(gpu: str) -> None:
    machine = preset_profile(gpu)
    run = stock_runs(OLMOE, machine, WORKLOAD, PlanLimits()).on_device
    assert run is not None
    assert run.num_resident_layers == OLMOE.num_moe_layers
    assert run.kv_bytes == run.num_seqs * 640 * OLMOE.kv_bytes_per_token
    assert run.weight_bytes == OLMOE.total_bytes
    assert run.weight_bytes + run.kv_bytes <= machine.gpu_memory_budget_bytes


def test_a_given_batch_is_the_one_that_is_compared() -> None:
    run = stock_runs(OLMOE, preset_profile("h200"), WORKLOAD, PlanLimits(max_num_seqs=33, fill_max_num_seqs=True))
    assert run.on_device is not None
    assert run.on_device.num_seqs == 33


def test_a_model_larger_than_device_and_host_runs_nowhere() -> None:
    big = read_model_spec(CONFIGS / "deepseek-v3.json")
    runs = stock_runs(big, preset_profile("t4"), WORKLOAD, PlanLimits())
    assert (runs.on_device, runs.offload) == (None, None)
