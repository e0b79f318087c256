# SPDX-License-Identifier: Apache-2.0
"""Where the experts of a sweep belong: the CPU's for few tokens, the device's for many."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_struct

from vllm_moe_lightning.experts_place import cpu_expert_layers, fetched_up_to_tokens, tokens_asking_for
from vllm_moe_lightning.hardware_presets import preset_profile
from vllm_moe_lightning.model_config import spec_from_config
from vllm_moe_lightning.workload import HrmPolicy

CONFIGS = Path(__file__).parent / "model_configs"
MIXTRAL = spec_from_config(json.loads((CONFIGS / "mixtral-8x7b.json").read_text()), "mixtral")
POLICY = HrmPolicy(micro_batch_size=32, num_micro_batches=4, prefill_tokens_per_sweep=1)
T4 = preset_profile("t4")


def test_few_tokens_go_to_the_cpu_and_many_to_the_device() -> None:
    table = cpu_expert_layers(MIXTRAL, T4, POLICY, context=200.0, most_tokens=4096)
    assert table[0][0] <= 4
    assert table[0][1] > MIXTRAL.num_moe_layers // 2  # a token touches 2 of 8 experts
    assert [most for most, _ in table] == sorted(most for most, _ in table)
    assert [layers for _, layers in table] == sorted((layers for _, layers in table), reverse=True)
    assert table[-1][0] < 4096


def test_resident_layers_are_not_moved() -> None:
    policy = replace(POLICY, num_resident_layers=30)
    table = cpu_expert_layers(MIXTRAL, T4, policy, context=200.0, most_tokens=64)
    assert all(layers <= 2 for _, layers in table)


def test_a_link_as_fast_as_host_memory_leaves_the_cpu_alone() -> None:
    fast = replace_struct(T4, link=replace_struct(T4.link, h2d_bytes_per_s=1e13))
    assert cpu_expert_layers(MIXTRAL, fast, POLICY, context=200.0, most_tokens=4096) == []


@pytest.mark.parametrize("most_tokens", [1, 5, 64])
def test_the_table_ends_with_the_largest_sweep(most_tokens: int) -> None:
    table = cpu_expert_layers(MIXTRAL, T4, POLICY, context=200.0, most_tokens=most_tokens)
    assert table[-1][0] <= most_tokens


ALL_SLOTS = MIXTRAL.num_moe_layers * MIXTRAL.num_experts


@pytest.mark.parametrize(
    ("num_slots", "least", "most"), [(8, 9, 9), (ALL_SLOTS // 2, 8, 4096), (ALL_SLOTS, 4096, 4096)]
)
def test_sweeps_fetch_as_long_as_that_moves_less(num_slots: int, least: int, most: int) -> None:
    """With a T4's link, 9 tokens ask for 7.4 of 8 experts; with all on the device nothing is ever to be moved."""
    assert least <= fetched_up_to_tokens(MIXTRAL, T4, POLICY, 200.0, num_slots, 4096) <= most


def test_more_slots_never_make_fetching_worth_less() -> None:
    tokens = [fetched_up_to_tokens(MIXTRAL, T4, POLICY, 200.0, slots, 4096) for slots in (8, 32, 64, 128, 192, 256)]
    assert tokens == sorted(tokens)


def test_a_model_whose_layers_all_stay_has_nothing_to_fetch() -> None:
    policy = replace(POLICY, num_resident_layers=MIXTRAL.num_moe_layers)
    assert fetched_up_to_tokens(MIXTRAL, T4, policy, 200.0, 8, 4096) == 0


@pytest.mark.parametrize(("num_experts", "top_k", "expected"), [(8, 2, 2), (128, 8, 10), (4, 4, 0), (60, 4, 10)])
def test_tokens_that_ask_for_half_of_the_experts(num_experts: int, top_k: int, expected: int) -> None:
    assert tokens_asking_for(0.5, num_experts, top_k) == expected
    if expected:
        assert 1 - (1 - top_k / num_experts) ** expected <= 0.5 < 1 - (1 - top_k / num_experts) ** (expected + 1)
