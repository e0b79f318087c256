# SPDX-License-Identifier: Apache-2.0
"""test_races.py for layers that are not streamed: with each wait of their experts removed, something is seen."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.torch_decoder import DecoderConfig
from tests.helpers.decoder import all_equal, make_engine, plain_run, run
from vllm_moe_lightning.errors import DeviceTaskError, HazardError, MoeLightningError
from vllm_moe_lightning.pipeline.expert_places import ExpertPlaces
from vllm_moe_lightning.pipeline.schedule import SweepShape, make_schedule

CONFIG = DecoderConfig(num_layers=3)
COUNT = 3
LAYERS = frozenset(range(CONFIG.num_layers))
PLACES = {"cpu": ExpertPlaces(on_cpu=LAYERS), "fetched": ExpertPlaces(fetched=LAYERS)}
OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"experts": "cpu"},
    "fetched": {"experts": "fetched", "expert_slots": 3},
}
NAMES = ("cgopipe", "serial", "s2", "s3")
# The residency waits for the arrival of each expert by itself.
COVERED = {"post_experts<-experts_fetch"}
LAZY = {"timing": "lazy", "poison": True}
SHOWS_UNDER_LAZY = ("experts_load<-experts", "post_experts<-experts_load")


def waits_of(place: str, name: str) -> set[str]:
    shape = SweepShape(CONFIG.num_layers, COUNT, (0,) * CONFIG.num_layers, experts=PLACES[place])
    return set(make_schedule(name, shape).wait_names())


def is_right(place: str, name: str, device: dict[str, Any], **options: Any) -> bool:
    engine = make_engine(CONFIG, device=device, schedule=name, num_micro_batches=COUNT, **OPTIONS[place], **options)
    with engine:
        return all_equal(run(engine), plain_run(CONFIG, COUNT, experts=place))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["cpu"])  # fetched in waves sums in another order: see the test below
def test_with_every_wait_in_place_lazy_copies_change_nothing(place: str, name: str) -> None:
    assert is_right(place, name, {**LAZY, "check_hazards": True})


def test_fetched_experts_with_room_for_all_give_the_same_bits_under_lazy_and_jitter() -> None:
    for device in (LAZY, *({"timing": "jitter", "seed": seed, "poison": True} for seed in range(5))):
        engine = make_engine(CONFIG, device=device, num_micro_batches=COUNT, experts="fetched", expert_slots=12)
        with engine:
            assert all_equal(run(engine), plain_run(CONFIG, COUNT, experts="fetched"))


@pytest.mark.parametrize(
    ("place", "name", "wait"),
    [(p, n, w) for p in PLACES for n in NAMES for w in sorted(waits_of(p, n) - COVERED)],
)
def test_a_removed_wait_is_reported_as_a_hazard(place: str, name: str, wait: str) -> None:
    with pytest.raises(HazardError, match=r"nothing orders that after"):
        is_right(place, name, {"check_hazards": True}, debug={"remove_wait": wait})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wait", SHOWS_UNDER_LAZY)
def test_a_removed_wait_changes_the_result_under_lazy(name: str, wait: str) -> None:
    assert not is_right("cpu", name, LAZY, debug={"remove_wait": wait})


@pytest.mark.parametrize("name", NAMES)
def test_the_cpu_refuses_routing_that_is_not_there_yet(name: str) -> None:
    with pytest.raises(DeviceTaskError, match="bad argument"):
        is_right("cpu", name, LAZY, debug={"remove_wait": "experts<-experts_offload"})


@pytest.mark.parametrize("name", NAMES)
def test_experts_fetched_for_routing_that_is_not_there_yet_are_missed(name: str) -> None:
    """What lies in the staging then is poison, which asks for nobody."""
    with pytest.raises(MoeLightningError, match="is not on the device, and its expert got a token"):
        is_right("fetched", name, LAZY, debug={"remove_wait": "experts_fetch<-routing_offload"})
