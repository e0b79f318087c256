# SPDX-License-Identifier: Apache-2.0
"""The weight of a new token against a context token, from the cost model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from vllm_moe_lightning.hardware_presets import preset_profile
from vllm_moe_lightning.model_config import read_model_spec
from vllm_moe_lightning.pipeline.batching import QUERY_TOKEN_COST
from vllm_moe_lightning.row_costs import query_token_cost
from vllm_moe_lightning.workload import HrmPolicy, SweepLoad, Workload, steady_load

MIXTRAL = read_model_spec(Path(__file__).parent / "model_configs" / "mixtral-8x7b.json")
T4 = preset_profile("t4")
POLICY = HrmPolicy(micro_batch_size=64, num_micro_batches=8)
LOAD = steady_load(Workload(512, 128), POLICY)


def test_slower_attention_makes_context_weigh_more() -> None:
    half = msgspec.structs.replace(T4.cpu, bandwidth_bytes_per_s=T4.cpu.bandwidth_bytes_per_s / 2)
    slower = msgspec.structs.replace(T4, cpu=half)
    cost = query_token_cost(MIXTRAL, T4, POLICY, LOAD)
    assert query_token_cost(MIXTRAL, slower, POLICY, LOAD) < cost
    assert cost > 1


def test_what_a_micro_batch_costs_anyway_weighs_nothing() -> None:
    """Launches and the reading of the weights are the same for a micro-batch of any size."""
    overheads = msgspec.structs.replace(T4.overheads, gpu_task_s=1.0)
    slow_launches = msgspec.structs.replace(T4, overheads=overheads)
    cost = query_token_cost(MIXTRAL, T4, POLICY, LOAD)
    assert query_token_cost(MIXTRAL, slow_launches, POLICY, LOAD) == pytest.approx(cost, abs=1)


def test_prompts_on_the_cpu_change_nothing_of_a_context_token_that_a_decode_token_reads() -> None:
    on_cpu = replace(POLICY, prompts_on_gpu=False)
    assert query_token_cost(MIXTRAL, T4, on_cpu, LOAD) == query_token_cost(MIXTRAL, T4, POLICY, LOAD)


@pytest.mark.parametrize("load", [SweepLoad(prefill_seqs=8, prefill_len=100), SweepLoad()])
def test_without_context_the_default_stands(load: SweepLoad) -> None:
    assert query_token_cost(MIXTRAL, T4, POLICY, load) == QUERY_TOKEN_COST
