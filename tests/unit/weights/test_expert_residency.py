# SPDX-License-Identifier: Apache-2.0
"""Experts come when they are asked for and stay while they are hot, and no step ever meets another expert's weights."""

import mmap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.helpers.expert_host import Batch, HostedExperts, run_resident
from tests.helpers.recording_cuda import RecordingCuda
from vllm_moe_lightning.device import EmulatedDevice
from vllm_moe_lightning.errors import DeviceMemoryError, HazardError
from vllm_moe_lightning.kernels.page_table import ExpertPages
from vllm_moe_lightning.kernels.reference_ffn import expert_ffn
from vllm_moe_lightning.kernels.reference_paged_moe import ReferencePagedMoeStep
from vllm_moe_lightning.weights.expert_residency import ExpertResidency, ExpertSource
from vllm_moe_lightning.weights.expert_scores import ExpertScores

NUM_LAYERS, NUM_EXPERTS = 3, 8
Make = Callable[..., HostedExperts]


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """On matrices this small, torch's pool spends longer in meeting than in working."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make() -> Iterator[Make]:
    devices = []

    def build(num_slots: int, timing: str = "lazy", seed: int = 0, **options: Any) -> HostedExperts:
        device = EmulatedDevice(timing=timing, seed=seed, jitter_max_s=2e-4, poison=True, check_hazards=True)  # type: ignore[arg-type]
        devices.append(device)
        options = {"num_layers": NUM_LAYERS, "num_experts": NUM_EXPERTS, **options}
        return HostedExperts(device, num_slots=num_slots, **options)

    yield build
    for device in devices:
        device.synchronize()
        device.close()


def step(experts: HostedExperts, layer: int, chosen: list[int], num_tokens: int = 1) -> None:
    """Each token chooses all of `chosen`; the output must be right."""
    batch = experts.batch(num_tokens, len(chosen), seed=layer, experts=chosen)
    output = experts.run(layer, batch)
    torch.testing.assert_close(output, experts.expected(layer, batch), rtol=1e-4, atol=1e-5)


def moved(experts: HostedExperts) -> list[str]:
    """The experts that came over the link since the last call, by the labels of their copies."""
    experts.device.synchronize()
    records = experts.device.drain_records()
    return sorted(record.label for record in records if record.stream == "h2d" and record.num_bytes)


@pytest.mark.parametrize("num_slots", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("timing", ["eager", "lazy", "jitter"])
def test_a_prefill_of_all_experts_is_right_for_every_number_of_slots(make: Make, num_slots: int, timing: str) -> None:
    """Field report B04: a page just loaded must not become the victim of the next miss of the same step."""
    experts = make(num_slots, timing)
    for seed, num_tokens in enumerate((64, 1, 3, 64, 1)):
        for layer in range(NUM_LAYERS):
            batch = experts.batch(num_tokens, top_k=2, seed=seed)
            if num_tokens == 64:
                assert batch.topk_ids.unique().numel() == NUM_EXPERTS
            output = experts.run(layer, batch)
            torch.testing.assert_close(output, experts.expected(layer, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_on_cuda_calls_alone_every_page_is_ordered(num_slots: int) -> None:
    """The recording double: copies run as late as the events that were recorded allow."""
    cuda = RecordingCuda(late=True)
    device = cuda.device(poison=True, pin_chunk_bytes=mmap.PAGESIZE)
    experts = HostedExperts(device, num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, num_slots=num_slots)
    for num_tokens in (1, 20, 2):
        for layer in range(NUM_LAYERS):
            batch = experts.batch(num_tokens, top_k=2, seed=layer)
            output = experts.run(layer, batch)
            torch.testing.assert_close(output, experts.expected(layer, batch), rtol=1e-4, atol=1e-5)
    device.synchronize()
    device.close()
    cuda.log.check()


@pytest.mark.parametrize("num_slots", [0, -1])
def test_fewer_slots_than_one_are_refused_with_what_is_needed_and_what_there_is(make: Make, num_slots: int) -> None:
    with pytest.raises(ValueError, match=rf"need 1 at least, have {num_slots}; the largest expert has 4,608 bytes"):
        make(num_slots)


def test_only_the_experts_that_were_asked_for_are_moved(make: Make) -> None:
    experts = make(num_slots=6)
    experts.device.set_recording(1000)
    step(experts, 1, [2, 5])
    assert moved(experts) == ["expert(1,2)", "expert(1,5)"]
    step(experts, 1, [5, 7])
    assert moved(experts) == ["expert(1,7)"]
    step(experts, 1, [2, 7])
    assert moved(experts) == []
    assert [wave.is_whole_step for wave in experts.residency.waves(1, torch.tensor([7, 2]))] == [True]
    counters = experts.residency.counters
    assert (counters.num_steps, counters.num_waves) == (4, 4)
    assert (counters.num_hits, counters.num_misses, counters.num_evictions) == (5, 3, 0)
    expert_bytes = experts.layers[0].shape.expert_bytes
    assert counters.bytes_moved == experts.device.totals()["h2d"].num_bytes == 3 * expert_bytes
    assert counters.pages_moved == 3 * ExpertPages(experts.layers[0].shape, 512).num_pages


def test_more_experts_than_slots_come_in_waves_the_present_ones_first(make: Make) -> None:
    experts = make(num_slots=4)
    step(experts, 0, [2, 5])
    waves = []
    for wave in experts.residency.waves(0, torch.arange(NUM_EXPERTS)):
        waves.append(wave.experts)
        assert not wave.is_whole_step
        with experts.residency.use(wave, "experts(0)"):
            pass
    assert waves[0] == (2, 5)
    assert sorted(expert for wave in waves for expert in wave) == list(range(NUM_EXPERTS))
    assert len(waves) == 1 + 6  # a quarter of the slots each


def test_hot_experts_stay_while_cold_ones_pass_through(make: Make) -> None:
    experts = make(num_slots=4)
    for _ in range(5):
        step(experts, 0, [1, 6])
    experts.device.set_recording(1000)
    for cold in (0, 2, 3, 4, 5, 7, 0, 2, 3):
        step(experts, 0, [1, 6, cold])
    assert not {"expert(0,1)", "expert(0,6)"} & set(moved(experts))


def test_what_was_hot_long_ago_makes_room(make: Make) -> None:
    experts = make(num_slots=2, half_life_steps=2.0)
    for _ in range(20):
        step(experts, 0, [0, 1])
    for _ in range(10):
        step(experts, 0, [2, 3])
    assert experts.residency.is_resident(0, 2)
    assert not experts.residency.is_resident(0, 0)


def test_a_long_prompt_does_not_drive_out_the_hot_experts(make: Make) -> None:
    experts = make(num_slots=5)
    for _ in range(20):
        step(experts, 0, [1, 6])
    step(experts, 0, list(range(NUM_EXPERTS)), num_tokens=100)
    assert experts.residency.is_resident(0, 1)
    assert experts.residency.is_resident(0, 6)


def test_sweeps_over_more_experts_than_fit_still_find_some(make: Make) -> None:
    """Where the one used longest ago goes first, a sweep over the layers finds none."""
    experts = make(num_slots=4)
    for _ in range(6):
        for layer in range(NUM_LAYERS):
            step(experts, layer, [0, 1])
    assert experts.residency.counters.num_hits >= 5


def test_frames_go_from_layer_to_layer_whatever_their_sizes(make: Make) -> None:
    device = make(1).device
    rng = torch.Generator().manual_seed(0)
    layers = []
    for layer, (hidden_size, intermediate_size) in enumerate(((32, 24), (64, 16), (16, 80))):
        w13 = torch.randn(4, 2 * intermediate_size, hidden_size, generator=rng).half()
        w2 = torch.randn(4, hidden_size, intermediate_size, generator=rng).half()
        layers.append(ExpertSource(layer, f"mixed[{layer}]", w13, w2))
    residency = ExpertResidency(layers, device, num_slots=2, page_bytes=272, name="mixed")
    for _ in range(3):
        for source in layers:
            hidden = torch.randn(3, source.shape.hidden_size, generator=rng).half()
            ids = torch.rand(3, 4, generator=rng).topk(3).indices.int()
            weights = torch.rand(3, 3, generator=rng)
            output = run_resident(residency, source.layer, Batch(hidden, weights, ids, ids))
            expected = expert_ffn(hidden, source.w13, source.w2, ids, weights)
            torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-2)


def test_addresses_of_evicted_experts_are_zero(make: Make) -> None:
    experts = make(num_slots=1)
    step(experts, 0, [3])
    step(experts, 0, [4])
    for wave in experts.residency.waves(0, torch.tensor([4])):
        with experts.residency.use(wave, "experts(0)") as table:
            pages_per_expert = table.w13.addresses.numel() // NUM_EXPERTS
            held = table.w13.addresses.view(NUM_EXPERTS, pages_per_expert) != 0
    assert held.all(dim=1).tolist() == [expert == 4 for expert in range(NUM_EXPERTS)]
    assert held.any(dim=1).tolist() == [expert == 4 for expert in range(NUM_EXPERTS)]


def test_without_the_wait_for_an_arrival_a_hazard_is_reported(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = make(num_slots=2)
    monkeypatch.setattr(experts.device.compute, "wait_event", lambda event: None)
    with pytest.raises(HazardError, match=r"reads it, and nothing orders that after 'expert\(0,1\)'"):
        step(experts, 0, [1])


def test_without_the_wait_for_the_last_use_a_hazard_is_reported(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = make(num_slots=1)
    step(experts, 0, [1])
    monkeypatch.setattr(experts.device.h2d, "wait_event", lambda event: None)
    with pytest.raises(HazardError, match=r"nothing orders that after 'experts\(0\)' on stream 'compute'"):
        step(experts, 0, [2])


def test_a_wave_that_is_held_is_not_evicted_by_another(make: Make) -> None:
    experts = make(num_slots=2)
    held = experts.residency.waves(0, torch.tensor([0, 1]))
    first = next(held)
    with pytest.raises(DeviceMemoryError, match=r"a wave need .* frames, have .*, of which other waves hold"):
        next(experts.residency.waves(1, torch.tensor([5])))
    with experts.residency.use(first, "experts(0)"):
        pass
    held.close()
    step(experts, 1, [5])


def test_a_step_that_is_given_up_holds_nothing_back(make: Make) -> None:
    experts = make(num_slots=2)
    for wave in experts.residency.waves(0, torch.tensor([0, 1])):
        assert wave.experts == (0, 1)
        break  # never used: the forward failed
    step(experts, 1, [5, 6])
    step(experts, 0, [0, 1])


def test_a_step_that_fails_holds_nothing_back_even_while_its_error_is_kept(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = make(num_slots=2)
    batch = experts.batch(1, 2, seed=0, experts=[0, 1])
    with monkeypatch.context() as patch:
        patch.setattr(ReferencePagedMoeStep, "add", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError) as kept:
            experts.run(0, batch)
    step(experts, 1, [5, 6])
    step(experts, 0, [0, 1])
    assert kept.tb is not None


@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_a_copy_that_fails_costs_neither_a_frame_nor_a_pin(
    make: Make, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    experts = make(num_slots=4)
    step(experts, 0, [0])
    copy, number = experts.device.h2d.copy, 0

    def copy_until(*arguments: Any, **options: Any) -> None:
        nonlocal number
        number += 1
        if number == failing:
            raise RuntimeError("no copy")
        copy(*arguments, **options)

    for _ in range(3):
        number = 0
        with monkeypatch.context() as patch:
            patch.setattr(experts.device.h2d, "copy", copy_until)
            with pytest.raises(RuntimeError, match="no copy"):
                [step(experts, layer, [0, 1, 2, 3]) for layer in (1, 2)]
    step(experts, 0, [4, 5, 6, 7])
    step(experts, 1, [0, 1, 2, 3])


def test_a_wave_is_of_no_use_after_the_next_was_asked_for(make: Make) -> None:
    experts = make(num_slots=1)
    waves = list(experts.residency.waves(0, torch.tensor([0, 1])))
    with pytest.raises(AssertionError, match="used after its wave"), experts.residency.use(waves[0], "experts(0)"):
        pass


def test_negative_ids_ask_for_nothing(make: Make) -> None:
    experts = make(num_slots=1)
    assert list(experts.residency.waves(0, torch.tensor([-1, -1]))) == []
    assert experts.residency.counters.num_misses == 0


def test_two_layers_of_one_name_are_refused(make: Make) -> None:
    experts = make(num_slots=1)
    with pytest.raises(ValueError, match=r"layers must differ in `layer`, got \[0, 0\]"):
        ExpertResidency([experts.layers[0]] * 2, experts.device, num_slots=1, name="again")


def test_an_expert_that_does_not_exist_is_refused(make: Make) -> None:
    experts = make(num_slots=1)
    with pytest.raises(ValueError, match="expert 8 of 8 in layer 2"):
        next(experts.residency.waves(2, torch.tensor([8])))


def test_more_slots_than_the_device_holds_are_refused() -> None:
    device = EmulatedDevice(memory_budget_bytes=10_000)
    with pytest.raises(DeviceMemoryError, match="do not fit"):
        HostedExperts(device, num_layers=1, num_experts=8, num_slots=4)
    device.close()


def test_all_device_memory_is_given_back(make: Make) -> None:
    experts = make(num_slots=2)
    step(experts, 0, [1])
    experts.device.synchronize()
    experts.residency.close()
    assert experts.device.memory_used_bytes == 0


def test_a_request_counts_half_after_its_half_life() -> None:
    scores = ExpertScores({0: 2}, half_life_steps=4.0)
    scores.count(0, [1])
    for _ in range(4):
        scores.count(0, [0])
    assert scores.of(0, 1) == pytest.approx(0.5)
    assert scores.of(0, 0) == pytest.approx(sum(0.5 ** (k / 4) for k in range(4)))
    with pytest.raises(ValueError, match="half_life_steps must be positive, got 0"):
        ExpertScores({0: 2}, half_life_steps=0)
