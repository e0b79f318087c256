# SPDX-License-Identifier: Apache-2.0
"""A rank's share of model and machine: slices where vLLM slices, and nothing of the host counted twice."""

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_struct

from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.hardware import EMULATED_GPU_NAME
from vllm_moe_lightning.hardware_presets import preset_profile
from vllm_moe_lightning.model_config import read_model_spec
from vllm_moe_lightning.model_spec import AttentionSpec, MoeModelSpec
from vllm_moe_lightning.tensor_parallel import machine_of_rank, model_of_rank

MIXTRAL = read_model_spec(Path(__file__).parent / "model_configs/mixtral-8x7b.json")


def with_kv_heads(num_kv_heads: int) -> MoeModelSpec:
    return replace(MIXTRAL, attention=AttentionSpec.grouped_query(4096, 32, num_kv_heads, 128))


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_together_hold_the_model_once(num_ranks: int) -> None:
    rank = model_of_rank(MIXTRAL, num_ranks)
    assert rank.expert_layer_bytes * num_ranks == MIXTRAL.expert_layer_bytes
    assert rank.kv_bytes_per_token * num_ranks == MIXTRAL.kv_bytes_per_token
    assert rank.attention.params * num_ranks == MIXTRAL.attention.params
    assert rank.router_params_per_layer == MIXTRAL.router_params_per_layer  # whole on every rank


def test_fewer_key_value_heads_than_ranks_are_copied() -> None:
    rank = model_of_rank(with_kv_heads(2), 4)
    assert (rank.attention.num_q_heads, rank.attention.num_kv_heads) == (8, 1)


@pytest.mark.parametrize(
    ("spec", "what", "value"),
    [
        (replace(MIXTRAL, expert_intermediate=47), "intermediate size of an expert", "47"),
        (with_kv_heads(3), "key-value heads", "3"),
        (replace(MIXTRAL, attention=AttentionSpec.grouped_query(4095, 9, 1, 455)), "attention heads", "9"),
    ],
)
def test_a_size_that_ranks_cannot_share_is_refused_with_the_number(spec: MoeModelSpec, what: str, value: str) -> None:
    with pytest.raises(UnsupportedError, match=what) as refusal:
        model_of_rank(spec, 2)
    assert value in str(refusal.value)
    assert "2 tensor-parallel ranks" in str(refusal.value)
    assert "--tensor-parallel-size" in str(refusal.value)


def test_one_rank_has_it_all() -> None:
    odd = replace(MIXTRAL, expert_intermediate=47)
    assert model_of_rank(odd, 1) is odd


def test_host_and_link_are_split_and_each_rank_has_one_gpu() -> None:
    whole = preset_profile("t4", num_gpus=4)
    rank = machine_of_rank(whole, 4)
    assert (rank.gpu.num_gpus, rank.gpu.memory_bytes) == (1, whole.gpu.memory_bytes)
    assert rank.cpu.memory_bytes * 4 == pytest.approx(whole.cpu.memory_bytes)
    assert rank.cpu.bandwidth_bytes_per_s * 4 == whole.cpu.bandwidth_bytes_per_s
    assert rank.cpu.num_threads * 4 == whole.cpu.num_threads
    assert rank.link.h2d_bytes_per_s * 4 == whole.link.h2d_bytes_per_s


def test_a_cgroup_limit_is_split_too() -> None:
    whole = preset_profile("t4", num_gpus=2)
    limited = replace_struct(whole, limits=replace_struct(whole.limits, cgroup_memory_bytes=8 << 30))
    assert machine_of_rank(limited, 2).host_memory_bytes == 4 << 30


def test_the_emulated_device_is_a_part_of_the_host_and_split_like_it() -> None:
    whole = preset_profile("t4")
    emulated = replace_struct(whole, gpu=replace_struct(whole.gpu, name=EMULATED_GPU_NAME))
    assert machine_of_rank(emulated, 2).gpu.memory_bytes * 2 == emulated.gpu.memory_bytes
