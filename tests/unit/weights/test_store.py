# SPDX-License-Identifier: Apache-2.0
"""The store takes parameters over: one copy in host memory, and views of the slots in their place."""

import gc
import weakref
from collections.abc import Iterator, Sequence

import pytest
import torch

from vllm_moe_lightning.config import MoeLightningConfig
from vllm_moe_lightning.device import EmulatedDevice
from vllm_moe_lightning.errors import DeviceMemoryError, UnsupportedError
from vllm_moe_lightning.policy.policy import fixed_policy
from vllm_moe_lightning.weights.store import ExpertLayer, PagedWeightStore

PAGE_MIB = 4096 / 2**20


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    made = EmulatedDevice()
    yield made
    made.close()


def make_layers(layers: Sequence[int] = (0, 1, 2, 3)) -> list[ExpertLayer]:
    """Layers of different sizes; the numbers are those of decoder layers."""
    rng = torch.Generator().manual_seed(0)

    def parameter(*shape: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.randn(*shape, generator=rng), requires_grad=False)

    return [
        ExpertLayer(
            layer, f"layers.{layer}", {"w13": parameter(4, 2 * (9 + layer), 48), "w2": parameter(4, 48, 9 + layer)}
        )
        for layer in layers
    ]


def make_store(layers: Sequence[ExpertLayer], device: EmulatedDevice, num_resident_layers: int = 0) -> PagedWeightStore:
    options = MoeLightningConfig(num_resident_layers=num_resident_layers, page_mib=PAGE_MIB)
    return PagedWeightStore(layers, fixed_policy(options, [layer.num_bytes for layer in layers]), device)


def test_host_pages_hold_the_bytes_of_the_parameters(device: EmulatedDevice) -> None:
    layers = make_layers()
    before = [{name: p.data.clone() for name, p in layer.parameters.items()} for layer in layers]
    store = make_store(layers, device)
    for layer, originals in zip(store.layers.values(), before, strict=True):
        for place in layer.layout.places:
            assert torch.equal(place.view_in(layer.host.tensor), originals[place.name])


def test_the_loaded_copy_is_gone_once_the_store_has_taken_over(device: EmulatedDevice) -> None:
    layers = make_layers()
    loaded = [weakref.ref(p.data.untyped_storage()) for layer in layers for p in layer.parameters.values()]
    store = make_store(layers, device)
    gc.collect()
    assert not [ref for ref in loaded if ref() is not None]
    slots = {slot.tensor.untyped_storage().data_ptr() for slot in store.slots}
    for layer in layers:
        for parameter in layer.parameters.values():
            assert parameter.untyped_storage().data_ptr() in slots


def test_the_slots_are_as_large_as_the_largest_layer_and_count_against_the_budget(device: EmulatedDevice) -> None:
    store = make_store(make_layers(), device)
    largest = max(layer.layout.num_bytes for layer in store.layers.values())
    assert [slot.tensor.numel() for slot in store.slots] == [largest, largest]
    assert device.memory_used_bytes == store.device_bytes == 2 * largest


def test_pages_are_counted_by_decoder_layer_and_zero_where_nothing_is_streamed(device: EmulatedDevice) -> None:
    store = make_store(make_layers((1, 3, 5)), device, num_resident_layers=1)
    assert list(store.layers) == [1, 5]
    assert [store.num_pages(layer) > 0 for layer in range(6)] == [False, True, False, False, False, True]
    for layer in store.layers.values():
        assert sum(page.num_bytes for page in layer.pages) == layer.layout.num_bytes
    assert store.sweep_bytes() == store.host_bytes == sum(layer.layout.num_bytes for layer in store.layers.values())


def test_a_resident_layer_moves_into_a_frame_of_its_own_and_is_counted(device: EmulatedDevice) -> None:
    layers = make_layers((0, 1, 2))
    before = {name: (p.data_ptr(), p.data.clone(), p.stride()) for name, p in layers[1].parameters.items()}
    make_store(layers, device, num_resident_layers=1)
    for name, (pointer, data, stride) in before.items():
        assert layers[1].parameters[name].data_ptr() != pointer
        assert layers[1].parameters[name].stride() == stride
        assert torch.equal(layers[1].parameters[name], data)
    assert "resident experts of layers.1" in device.memory_report()


def test_with_all_layers_resident_there_are_no_slots(device: EmulatedDevice) -> None:
    layers = make_layers()
    store = make_store(layers, device, num_resident_layers=4)
    assert (store.slots, store.layers, store.host_bytes) == ([], {}, 0)
    assert store.device_bytes == sum(layer.num_bytes for layer in layers)


def test_binding_points_the_parameters_at_a_slot_with_their_shapes_and_strides(device: EmulatedDevice) -> None:
    layers = make_layers()
    transposed = layers[2].parameters["w2"]
    transposed.data = transposed.data.transpose(1, 2)
    shape, stride = transposed.shape, transposed.stride()
    store = make_store(layers, device)
    store.bind(2, 1)
    assert (transposed.shape, transposed.stride()) == (shape, stride)
    assert transposed.untyped_storage().data_ptr() == store.slots[1].tensor.untyped_storage().data_ptr()


def test_slots_that_do_not_fit_are_refused_with_the_cure() -> None:
    device = EmulatedDevice(memory_budget_bytes=1000)
    with pytest.raises(DeviceMemoryError, match=r"slot\[0\].*keep fewer layers resident"):
        make_store(make_layers(), device)
    device.close()


def test_a_tensor_with_holes_is_refused_before_anything_moves(device: EmulatedDevice) -> None:
    layers = make_layers()
    pointer = layers[0].parameters["w13"].data_ptr()
    sliced = layers[3].parameters["w2"]
    sliced.data = torch.zeros(4, 48, 20)[:, :, :12]
    with pytest.raises(UnsupportedError, match=r"cannot page layers\.3\.w2"):
        make_store(layers, device)
    assert layers[0].parameters["w13"].data_ptr() == pointer
    assert device.memory_used_bytes == 0
