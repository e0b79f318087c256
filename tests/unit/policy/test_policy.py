# SPDX-License-Identifier: Apache-2.0
"""Configured values become numbers that fit the model at hand."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_moe_lightning.config import MoeLightningConfig
from vllm_moe_lightning.policy.policy import (
    MAX_AUTO_PAGE_BYTES,
    MIB,
    MIN_AUTO_PAGE_BYTES,
    evenly_spread,
    fixed_policy,
    page_bytes_for,
)


def test_by_default_every_moe_layer_is_streamed_through_two_slots() -> None:
    policy = fixed_policy(MoeLightningConfig(), [100 * MIB] * 5)
    assert (policy.resident_layers, policy.streamed_layers, policy.num_slots) == ((), (0, 1, 2, 3, 4), 2)


@given(num_layers=st.integers(0, 40), data=st.data())
def test_every_layer_is_either_resident_or_streamed(num_layers: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, num_layers))
    policy = fixed_policy(MoeLightningConfig(num_resident_layers=count), [MIB] * num_layers)
    assert len(policy.resident_layers) == count
    assert sorted(policy.resident_layers + policy.streamed_layers) == list(range(num_layers))


@given(num_layers=st.integers(1, 100), data=st.data())
def test_resident_layers_are_spread_so_that_gaps_differ_by_at_most_one(num_layers: int, data: st.DataObject) -> None:
    resident = evenly_spread(data.draw(st.integers(1, num_layers)), num_layers)
    gaps = [after - before for before, after in pairwise(resident)]
    assert all(0 <= layer < num_layers for layer in resident)
    assert not gaps or (min(gaps) >= 1 and max(gaps) - min(gaps) <= 1)


def test_more_resident_layers_than_the_model_has_are_refused_with_the_range() -> None:
    with pytest.raises(ValueError, match=r"num_resident_layers: 9 is more than .* 8 MoE layers; give 0\.\.8"):
        fixed_policy(MoeLightningConfig(num_resident_layers=9), [MIB] * 8)


def test_a_page_is_a_micro_batch_s_share_of_the_largest_streamed_layer() -> None:
    policy = fixed_policy(MoeLightningConfig(num_micro_batches=4), [40 * MIB, 80 * MIB, 60 * MIB])
    assert policy.page_bytes == 20 * MIB


def test_a_resident_layer_does_not_set_the_size_of_a_page() -> None:
    config = MoeLightningConfig(num_micro_batches=4, num_resident_layers=1)
    assert fixed_policy(config, [8 * MIB, 80 * MIB, 8 * MIB]).page_bytes == 2 * MIB


@given(st.integers(0, 1 << 40), st.integers(1, 64))
def test_an_automatic_page_keeps_to_its_limits_and_to_whole_memory_pages(layer_bytes: int, count: int) -> None:
    page_bytes = page_bytes_for(MoeLightningConfig(num_micro_batches=count), layer_bytes)
    assert MIN_AUTO_PAGE_BYTES <= page_bytes <= MAX_AUTO_PAGE_BYTES
    assert page_bytes % 4096 == 0


@given(st.floats(1e-6, 1000))
def test_a_page_as_configured_is_rounded_up_to_whole_memory_pages(page_mib: float) -> None:
    page_bytes = page_bytes_for(MoeLightningConfig(page_mib=page_mib), 0)
    assert page_bytes % 4096 == 0
    assert 0 <= page_bytes - int(page_mib * MIB) <= 4096


def test_a_policy_can_be_written_as_json() -> None:
    policy = fixed_policy(MoeLightningConfig(schedule="s2", num_resident_layers=1), [MIB] * 3)
    assert json.loads(json.dumps(policy.to_dict()))["schedule"] == "s2"
