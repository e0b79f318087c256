"""The ring of slots: which layer goes into which slot next, and whether the one at hand has arrived.

Layers take the slots in turn over all sweeps, so an odd number of layers needs no special case. The order and the
waits come from the schedule; the ring refuses an order that would overwrite a layer still to be used.
"""

from __future__ import annotations

from vllm_moe_lightning.device.base import Device
from vllm_moe_lightning.weights.store import PagedWeightStore


class WeightRing:
    """`launch_page` fills slots, `bind` uses them up, both in the order of the layers."""

    def __init__(self, store: PagedWeightStore, device: Device) -> None:
        self._store = store
        self._device = device
        self._num_loads = 0  # layers whose transfer has begun
        self._num_uses = 0  # layers that were bound
        self._layer_in_slot: list[int | None] = [None] * store.num_slots
        self._bound_slot: dict[int, int] = {}
        self.pages_moved = 0
        self.bytes_paged = 0

    @property
    def num_prefetched(self) -> int:
        """Layers that are on their way or there, and not yet bound."""
        return self._num_loads - self._num_uses

    @property
    def prefetched_layers(self) -> tuple[int, ...]:
        """Those, in the order of their use."""
        slots = (index % self._store.num_slots for index in range(self._num_uses, self._num_loads))
        return tuple(layer for slot in slots if (layer := self._layer_in_slot[slot]) is not None)

    def launch_page(self, layer: int, page: int) -> None:
        """Put the copy of one page on the h2d stream. Page 0 claims the next slot."""
        streamed = self._store.layers[layer]
        if page == 0:
            assert self.num_prefetched < self._store.num_slots, f"layer {layer} would overwrite one not yet used"
            self._layer_in_slot[self._num_loads % self._store.num_slots] = layer
            self._num_loads += 1
        index = (self._num_loads - 1) % self._store.num_slots
        assert self._layer_in_slot[index] == layer, f"page {page} of layer {layer} without its page 0"
        slot, where = self._store.slots[index], streamed.pages[page]
        if page == 0 and self._device.poison:
            self._device.h2d.fill(slot.tensor, 0xFF, writes=[slot.name])
        end = where.offset_bytes + where.num_bytes
        self._device.h2d.copy(
            [slot.tensor[where.offset_bytes : end]],
            [streamed.host.tensor[where.offset_bytes : end]],
            f"weight_page({layer},{page})",
            reads=[streamed.host.name],
            writes=[slot.name],
        )
        self.pages_moved += 1
        self.bytes_paged += where.num_bytes

    def bind(self, layer: int) -> None:
        """Point the layer's parameters to the slot it was loaded into. The caller has waited for its pages."""
        slot = self._num_uses % self._store.num_slots
        assert self._layer_in_slot[slot] == layer, f"slot {slot} holds layer {self._layer_in_slot[slot]}, not {layer}"
        self._num_uses += 1
        self._bound_slot = {layer: slot}
        self._store.bind(layer, slot)

    def is_bound(self, layer: int) -> bool:
        return layer in self._bound_slot

    def slot_name(self, layer: int) -> str:
        """Name of the slot that holds the bound layer (for hazard checks)."""
        return self._store.slots[self._bound_slot[layer]].name

    def drop_prefetched(self) -> None:
        """Forget layers that were brought up and will not be used: after an abort, or when the schedule changes."""
        self._num_uses = self._num_loads
        self._bound_slot = {}
