# SPDX-License-Identifier: Apache-2.0
"""The plain decoder with its experts, and the attention of its prompts, where the options put them."""

from typing import Any

import pytest

from benchmarks.torch_decoder import DecoderConfig
from tests.helpers.decoder import all_close, all_equal, make_engine, plain_run, run
from vllm_moe_lightning.pipeline.expert_places import ALL_STREAMED, ExpertPlaces

CONFIG = DecoderConfig(num_layers=3, dense_layers=(1,))
DEVICE = {"poison": True, "check_hazards": True}
COUNT = 3


@pytest.mark.parametrize("options", [{"experts": "cpu"}, {"experts": "fetched", "expert_slots": 8}], ids=str)
def test_experts_that_are_not_streamed_give_the_bits_of_their_own_kernel(options: dict[str, Any]) -> None:
    with make_engine(CONFIG, device=DEVICE, num_micro_batches=COUNT, **options) as engine:
        results = run(engine)
        assert engine.executor.ring.pages_moved == 0
        assert (engine.executor.residency_counters.pages_moved > 0) == (options["experts"] == "fetched")
    assert all_equal(results, plain_run(CONFIG, COUNT, experts=options["experts"]))
    assert all_close(results, plain_run(CONFIG, reference=True))


def test_one_slot_for_all_experts_is_enough() -> None:
    with make_engine(CONFIG, device=DEVICE, num_micro_batches=COUNT, experts="fetched", expert_slots=1) as engine:
        assert all_close(run(engine), plain_run(CONFIG, COUNT, experts="fetched"))
        assert engine.executor.residency_counters.num_waves > engine.executor.residency_counters.num_steps


def test_places_may_change_between_sweeps_and_large_sweeps_stream() -> None:
    options: dict[str, Any] = {"experts": "fetched", "fetched_up_to_tokens": 8}
    with make_engine(CONFIG, device=DEVICE, num_micro_batches=COUNT, **options) as engine:
        assert all_close(run(engine), plain_run(CONFIG, reference=True))
        places = [sweep.experts for sweep in engine.executor.recent_sweeps]
        fetched = ExpertPlaces(fetched=frozenset((0, 2)))
        assert places == [ALL_STREAMED, ALL_STREAMED, fetched, fetched]
        with pytest.raises(ValueError, match="expert_slots: 3, but there are 4"):
            engine.place_experts("fetched", 3)
        with pytest.raises(ValueError, match="'auto' takes a plan"):
            engine.place_experts("auto")


@pytest.mark.parametrize(
    ("options", "brought_up"),
    [({"prefill_attention": "device"}, False), ({"prefill_context": "link"}, True)],
    ids=["prompts", "context"],
)
def test_prompts_are_attended_to_on_the_device(options: dict[str, Any], brought_up: bool) -> None:
    with make_engine(CONFIG, device=DEVICE, num_micro_batches=COUNT, **options) as engine:
        assert all_close(run(engine), plain_run(CONFIG, reference=True))
        assert any(sweep.context for sweep in engine.executor.recent_sweeps) == brought_up


def test_sweeps_that_stream_nothing_leave_the_layer_that_was_sent_ahead() -> None:
    device = {**DEVICE, "timing": "lazy"}
    lens = ((9, 9), (1, 1), (9, 9), (1, 1), (1, 1), (9, 9))
    with make_engine(
        CONFIG, device=device, num_micro_batches=2, experts="fetched", fetched_up_to_tokens=2, expert_slots=8
    ) as engine:
        assert all_close(run(engine, lens), plain_run(CONFIG, lens=lens, reference=True))
        assert engine.executor.counters.refills == 1
        assert (
            engine.executor.ring.pages_moved == 3 * engine.store.sweep_pages() + engine.executor.pages_of_first_layer()
        )
