"""The paged store: every streamed layer's experts once in host memory, and the device slots they are brought into.

Takes over parameters after they were loaded and packed by whoever owns them; decides nothing about order or timing
(weights/ring.py does).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm_moe_lightning.device.base import Buffer, Device
from vllm_moe_lightning.policy.policy import Policy
from vllm_moe_lightning.weights.pages import LayerLayout, Page, layout_of, pages_of


@dataclass(frozen=True)
class ExpertLayer:
    """The pageable tensors of one MoE layer. `layer` is the index of its decoder layer."""

    layer: int
    name: str
    parameters: Mapping[str, torch.nn.Parameter]

    @property
    def num_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parameters.values())


@dataclass(frozen=True)
class StreamedLayer:
    """A layer on the host, and its tensors as views of each slot."""

    source: ExpertLayer
    layout: LayerLayout
    pages: tuple[Page, ...]
    host: Buffer
    slot_views: tuple[Mapping[str, torch.Tensor], ...]


class PagedWeightStore:
    """Host pages and device slots of all streamed layers.

    Construction moves one layer at a time, so host memory never holds more than one layer twice. Resident layers move
    into device frames of their own.
    """

    def __init__(self, layers: Sequence[ExpertLayer], policy: Policy, device: Device) -> None:
        self.num_slots = policy.num_slots
        streamed = [layers[index] for index in policy.streamed_layers]
        layouts = {entry.layer: layout_of(entry.name, entry.parameters) for entry in streamed}
        resident_bytes = sum(_settle(layers[index], device) for index in policy.resident_layers)
        slot_bytes = max((layout.num_bytes for layout in layouts.values()), default=0)
        self.slots = (
            [device.allocate(slot_bytes, f"slot[{slot}]") for slot in range(self.num_slots)] if streamed else []
        )
        self.layers: dict[int, StreamedLayer] = {
            entry.layer: self._take_over(entry, layouts[entry.layer], policy.page_bytes, device) for entry in streamed
        }
        self.host_bytes = sum(layer.layout.num_bytes for layer in self.layers.values())
        self.device_bytes = slot_bytes * len(self.slots) + resident_bytes

    def _take_over(self, entry: ExpertLayer, layout: LayerLayout, page_bytes: int, device: Device) -> StreamedLayer:
        host = device.allocate_host(layout.num_bytes, f"host pages of {entry.name}")
        for place in layout.places:
            place.view_in(host.tensor).copy_(entry.parameters[place.name].data)
        views = tuple({place.name: place.view_in(slot.tensor) for place in layout.places} for slot in self.slots)
        layer = StreamedLayer(entry, layout, pages_of(layout.num_bytes, page_bytes), host, views)
        self._point(layer, 0)  # the loaded copy goes here: from now on there is one, in the host pages
        return layer

    @staticmethod
    def _point(layer: StreamedLayer, slot: int) -> None:
        for name, view in layer.slot_views[slot].items():
            layer.source.parameters[name].data = view

    def bind(self, layer: int, slot: int) -> None:
        """Make the layer's parameters views of `slot`. Costs no copy."""
        self._point(self.layers[layer], slot)

    def host_views(self) -> dict[int, torch.Tensor]:
        """id of a streamed parameter -> what the host pages hold of it, in its shape. The parameter itself is a view of
        a slot, with whatever layer passed last."""
        return {
            id(layer.source.parameters[place.name]): place.view_in(layer.host.tensor)
            for layer in self.layers.values()
            for place in layer.layout.places
        }

    def num_pages(self, layer: int) -> int:
        """Pages that a sweep moves for a decoder layer; 0 if it is dense or resident."""
        return len(self.layers[layer].pages) if layer in self.layers else 0

    def sweep_pages(self) -> int:
        """Pages that one sweep over all layers brings to the device."""
        return sum(len(layer.pages) for layer in self.layers.values())

    def sweep_bytes(self) -> int:
        """Bytes that one sweep over all layers brings to the device."""
        return self.host_bytes


def _settle(entry: ExpertLayer, device: Device) -> int:
    """Move a layer's experts to the device for good. Returns the bytes of its frame."""
    layout = layout_of(entry.name, entry.parameters)
    frame = device.allocate(layout.num_bytes, f"resident experts of {entry.name}")
    for place in layout.places:
        view = place.view_in(frame.tensor)
        view.copy_(entry.parameters[place.name].data)
        entry.parameters[place.name].data = view
    return layout.num_bytes
