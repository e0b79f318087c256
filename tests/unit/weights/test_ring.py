# SPDX-License-Identifier: Apache-2.0
"""The ring brings layers up in turn, and refuses what would overwrite a layer still to be used."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from tests.unit.weights.test_store import make_layers, make_store
from vllm_moe_lightning.device import EmulatedDevice
from vllm_moe_lightning.weights.ring import WeightRing
from vllm_moe_lightning.weights.store import ExpertLayer, PagedWeightStore


@dataclass
class Loaded:
    device: EmulatedDevice
    layers: list[ExpertLayer]
    originals: list[dict[str, torch.Tensor]]
    store: PagedWeightStore
    ring: WeightRing

    def load(self, layer: int) -> None:
        for page in range(self.store.num_pages(layer)):
            self.ring.launch_page(layer, page)
        self.device.h2d.synchronize()

    def holds(self, layer: int) -> bool:
        """Whether the layer's parameters have the bytes that were loaded."""
        return all(torch.equal(p, self.originals[layer][name]) for name, p in self.layers[layer].parameters.items())


@pytest.fixture
def loaded() -> Iterator[Loaded]:
    device, layers = EmulatedDevice(poison=True), make_layers((0, 1, 2))
    originals = [{name: p.data.clone() for name, p in layer.parameters.items()} for layer in layers]
    store = make_store(layers, device)
    yield Loaded(device, layers, originals, store, WeightRing(store, device))
    device.close()


def test_every_layer_arrives_byte_by_byte_in_sweep_after_sweep(loaded: Loaded) -> None:
    for sweep in range(3):
        for layer in range(3):  # an odd number: the slots change roles with each sweep
            loaded.load(layer)
            loaded.ring.bind(layer)
            assert loaded.holds(layer), f"layer {layer} of sweep {sweep}"


def test_a_layer_is_complete_only_with_its_last_page(loaded: Loaded) -> None:
    num_pages = loaded.store.num_pages(0)
    assert num_pages > 2
    for page in range(num_pages - 1):
        loaded.ring.launch_page(0, page)
    loaded.device.h2d.synchronize()
    loaded.ring.bind(0)
    assert not loaded.holds(0)
    loaded.ring.launch_page(0, num_pages - 1)
    loaded.device.h2d.synchronize()
    assert loaded.holds(0)


def test_a_page_carries_its_own_bytes_and_no_others(loaded: Loaded) -> None:
    source = loaded.store.layers[1]
    loaded.ring.launch_page(1, 0)
    loaded.ring.launch_page(1, 2)
    loaded.device.h2d.synchronize()
    frame = loaded.store.slots[0].tensor
    for index in range(len(source.pages)):
        page = source.pages[index]
        part = slice(page.offset_bytes, page.offset_bytes + page.num_bytes)
        if index in (0, 2):
            assert torch.equal(frame[part], source.host.tensor[part])
        else:
            assert (frame[part] == 0xFF).all()


def test_a_third_layer_in_flight_is_refused(loaded: Loaded) -> None:
    loaded.load(0)
    loaded.load(1)
    with pytest.raises(AssertionError, match="layer 2 would overwrite one not yet used"):
        loaded.ring.launch_page(2, 0)
    loaded.ring.bind(0)
    loaded.ring.launch_page(2, 0)


def test_a_later_page_without_page_0_is_refused(loaded: Loaded) -> None:
    loaded.load(0)
    with pytest.raises(AssertionError, match="page 1 of layer 2 without its page 0"):
        loaded.ring.launch_page(2, 1)


def test_binding_another_layer_than_the_one_brought_up_is_refused(loaded: Loaded) -> None:
    loaded.load(0)
    with pytest.raises(AssertionError, match="slot 0 holds layer 0, not 1"):
        loaded.ring.bind(1)


def test_only_the_layer_bound_last_is_bound(loaded: Loaded) -> None:
    assert not loaded.ring.is_bound(0)
    loaded.load(0)
    loaded.load(1)
    loaded.ring.bind(0)
    assert (loaded.ring.is_bound(0), loaded.ring.is_bound(1)) == (True, False)
    loaded.ring.bind(1)
    assert (loaded.ring.is_bound(0), loaded.ring.is_bound(1)) == (False, True)
    assert loaded.ring.slot_name(1) == loaded.store.slots[1].name


def test_after_dropping_what_was_prefetched_the_ring_starts_with_any_layer(loaded: Loaded) -> None:
    loaded.load(0)
    loaded.ring.bind(0)
    loaded.load(1)
    loaded.ring.launch_page(2, 0)
    loaded.ring.drop_prefetched()
    assert loaded.ring.num_prefetched == 0
    assert not loaded.ring.is_bound(0)
    loaded.load(0)
    loaded.ring.bind(0)
    assert loaded.holds(0)


def test_pages_and_bytes_are_counted(loaded: Loaded) -> None:
    loaded.load(0)
    loaded.load(1)
    assert loaded.ring.pages_moved == loaded.store.num_pages(0) + loaded.store.num_pages(1)
    assert loaded.ring.bytes_paged == sum(loaded.store.layers[layer].layout.num_bytes for layer in (0, 1))
    assert loaded.device.totals()["h2d"].num_bytes == loaded.ring.bytes_paged
