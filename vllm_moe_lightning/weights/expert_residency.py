"""Experts one by one on the device: the hottest stay, the others are fetched when the router asks for them.

For small batches, which need few experts of a layer; large ones need nearly all, and stream whole layers
(weights/store.py). Decides who is on the device, moves pages, and gives the page table that kernels/page_table.py
describes; computes nothing. Experts are pinned while a step needs them, so none can be evicted by another of the same
step; if not all of a step's experts fit at once, they come in waves.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from vllm_moe_lightning.device.base import Buffer, Device, Event
from vllm_moe_lightning.errors import DeviceMemoryError
from vllm_moe_lightning.kernels.page_table import ExpertPages, ExpertScales, ExpertShape, PageTable, page_bytes_for
from vllm_moe_lightning.weights.expert_scores import DEFAULT_HALF_LIFE_STEPS, ExpertScores
from vllm_moe_lightning.weights.layer_page_table import LayerPageTable

# Of the slots: with a quarter for those that pass through, hot experts keep most, and copies still overlap compute.
WAVE_RATIO = 0.25


@dataclass(frozen=True)
class ExpertSource:
    """The routed experts of one layer, in memory of Device.allocate_host that stays as it is.

    layer: its name in all calls. buffer_name: of the Buffer that holds the weights, for hazard checks. Scales are
    small and lie on the device already.
    """

    layer: int
    buffer_name: str
    w13: torch.Tensor  # [E, 2 I, H]: w1's rows (gate), then w3's (up); contiguous
    w2: torch.Tensor  # [E, H, I]
    w13_scales: ExpertScales | None = None
    w2_scales: ExpertScales | None = None

    def __post_init__(self) -> None:
        if self.w13.shape != (self.w2.shape[0], 2 * self.w2.shape[2], self.w2.shape[1]):
            raise ValueError(f"layer {self.layer}: w13 {list(self.w13.shape)} does not fit w2 {list(self.w2.shape)}")
        if self.w13.dtype != self.w2.dtype:
            raise ValueError(f"layer {self.layer}: w13 is {self.w13.dtype}, w2 is {self.w2.dtype}")
        for name, tensor in (("w13", self.w13), ("w2", self.w2)):
            if not tensor.is_contiguous() or tensor.device.type != "cpu":
                raise ValueError(f"layer {self.layer}: {name} must be contiguous and on the host")

    @property
    def shape(self) -> ExpertShape:
        num_experts, hidden_size, intermediate_size = self.w2.shape
        return ExpertShape(num_experts, hidden_size, intermediate_size, self.w2.dtype)


@dataclass
class ResidencyCounters:
    """Since the start. A hit is an expert that a step asked for and found on the device, on its way included."""

    num_steps: int = 0
    """Of all layers together: one per call of `waves`."""
    num_waves: int = 0
    num_hits: int = 0
    num_misses: int = 0
    num_evictions: int = 0
    pages_moved: int = 0
    bytes_moved: int = 0


@dataclass
class Resident:
    """An expert on the device, or on its way there."""

    layer: int
    expert: int
    frames: tuple[int, ...]
    arrival: Event | None  # None once compute has waited for it
    last_use: Event | None = None
    last_wave: int = 0
    num_pins: int = 0


@dataclass(frozen=True)
class Wave:
    """Experts of one layer that are on the device together, pinned until the next wave is asked for."""

    layer: int
    experts: tuple[int, ...]
    residents: tuple[Resident, ...] = field(repr=False)
    is_whole_step: bool
    """Whether these are all experts that the step asked for."""


class ExpertResidency:
    """Frames of one size for all layers' experts, and who is in them.

    One step of a layer: `for wave in residency.waves(layer, topk_ids): with residency.use(wave, "name") as table: ...`
    """

    def __init__(
        self,
        layers: Sequence[ExpertSource],
        device: Device,
        *,
        num_slots: int,  # experts (of the largest layer) that fit on the device at once
        page_bytes: int | None = None,  # None: pages that the first layer's experts fill
        half_life_steps: float = DEFAULT_HALF_LIFE_STEPS,  # after which a request for an expert counts half
        name: str = "experts",  # of its buffers
    ) -> None:
        """Allocates all frames. Raises ValueError for num_slots under 1, DeviceMemoryError if they do not fit."""
        if not layers:
            raise ValueError("no layers: a model without routed experts needs no residency")
        if len({layer.layer for layer in layers}) < len(layers):
            raise ValueError(f"layers must differ in `layer`, got {[layer.layer for layer in layers]}")
        if num_slots < 1:
            raise ValueError(
                f"num_slots: need 1 at least, have {num_slots}; the largest expert has "
                f"{max(layer.shape.expert_bytes for layer in layers):,} bytes and must be on the device to be used, so "
                "give it that much device memory, or stream whole layers"
            )
        self.num_slots = num_slots
        self.page_bytes = page_bytes or page_bytes_for(layers[0].shape)
        self.counters = ResidencyCounters()
        self._device = device
        self._layers = {layer.layer: layer for layer in layers}
        self._pages = {layer.layer: ExpertPages(layer.shape, self.page_bytes) for layer in layers}
        num_frames = num_slots * max(pages.num_pages for pages in self._pages.values())
        # In one allocation: CUDA's allocator would round each up.
        self._memory = device.allocate(num_frames * self.page_bytes, f"{name}.frames")
        self._frames = [
            Buffer(f"{name}.frame[{index}]", tensor)
            for index, tensor in enumerate(self._memory.tensor.split(self.page_bytes))
        ]
        self._free = list(range(num_frames))
        self._num_pinned_frames = 0
        self._residents: dict[tuple[int, int], Resident] = {}
        self._tables = {
            layer: LayerPageTable(pages, device, f"{name}.page_table[{layer}]") for layer, pages in self._pages.items()
        }
        self._scores = ExpertScores({layer.layer: layer.shape.num_experts for layer in layers}, half_life_steps)
        # Fresh memory may be what the compute stream gave back and still works on.
        device.h2d.wait_event(device.compute.record_event())
        self._num_experts_per_wave = max(1, int(num_slots * WAVE_RATIO))

    @property
    def device_bytes(self) -> int:
        """Of the frames."""
        return self._memory.tensor.nbytes

    @property
    def layers(self) -> list[int]:
        return list(self._layers)

    def shape(self, layer: int) -> ExpertShape:
        return self._layers[layer].shape

    def is_resident(self, layer: int, expert: int) -> bool:
        """Whether the expert has frames: it is there, or on its way."""
        return (layer, expert) in self._residents

    def waves(self, layer: int, topk_ids: torch.Tensor, label: str | None = None) -> Generator[Wave, None, None]:
        """The experts that a step asks of a layer, each in exactly one wave: one wave with all of them if they fit.

        topk_ids: integers on the host, any shape; negative ones are computed elsewhere. label: of the step's copies.
        They start when a wave is asked for. It must be used before the next one is. Close the generator
        (contextlib.closing) where the caller may fail: an exception that is kept would keep it, and with it what the
        wave pins.
        """
        asked = [expert for expert in topk_ids.unique().tolist() if expert >= 0]
        num_experts = self.shape(layer).num_experts
        if asked and asked[-1] >= num_experts:
            raise ValueError(f"topk_ids names expert {asked[-1]} of {num_experts} in layer {layer}")
        self._scores.count(layer, asked)
        hits = [expert for expert in asked if (layer, expert) in self._residents]
        misses = [expert for expert in asked if (layer, expert) not in self._residents]
        self.counters.num_steps += 1
        self.counters.num_hits += len(hits)
        self.counters.num_misses += len(misses)
        num_unpinned = sum(not self._residents[layer, expert].num_pins for expert in hits) + len(misses)
        if num_unpinned * self._pages[layer].num_pages <= len(self._frames) - self._num_pinned_frames:
            groups = [asked]
        else:  # those that are here come first: only after their use may others take their places
            step = self._num_experts_per_wave
            groups = [hits, *(misses[begin : begin + step] for begin in range(0, len(misses), step))]
        for group in filter(None, groups):
            wave = self._bring(layer, group, label, is_whole_step=len(group) == len(asked))
            try:
                yield wave
            finally:  # also when the caller gives up
                for resident in wave.residents:
                    self._unpin(resident)

    @contextmanager
    def use(self, wave: Wave, label: str) -> Iterator[PageTable]:
        """A span of the compute stream under this label, in which the wave's experts are on the device where the table
        says. The table is valid inside only: no other expert's addresses are, and those of experts that were evicted
        are zero.
        """
        compute, table, source = self._device.compute, self._tables[wave.layer], self._layers[wave.layer]
        for resident in wave.residents:
            assert resident.num_pins, f"expert {resident.expert} of layer {resident.layer}: used after its wave"
            if resident.arrival is not None:
                compute.wait_event(resident.arrival)
                resident.arrival = None
        frames = [self._frames[frame].name for resident in wave.residents for frame in resident.frames]
        try:
            with compute.span(label, reads=frames, writes=[table.buffer_name]):
                yield table.upload(source.w13_scales, source.w2_scales)
        finally:
            used = compute.record_event()
            for resident in wave.residents:
                resident.last_use = used

    def close(self) -> None:
        """Gives the device memory back. The caller has waited for all that was submitted."""
        for name in (self._memory.name, *(table.buffer_name for table in self._tables.values())):
            self._device.release(name)
        self._frames, self._free, self._residents, self._tables = [], [], {}, {}

    def _bring(self, layer: int, experts: Collection[int], label: str | None, *, is_whole_step: bool) -> Wave:
        """Pins those that are there, then fetches the others. Pins none if that fails."""
        self.counters.num_waves += 1
        pinned: list[Resident] = []
        missing = [expert for expert in experts if (layer, expert) not in self._residents]
        try:
            for expert in experts:
                if (layer, expert) in self._residents:
                    pinned.append(self._pin(self._residents[layer, expert]))
            self._make_room(layer, len(missing) * self._pages[layer].num_pages)
            for expert in missing:
                pinned.append(self._pin(self._fetch(layer, expert, label)))
        except BaseException:
            for resident in pinned:
                self._unpin(resident)
            raise
        return Wave(layer, tuple(experts), tuple(pinned), is_whole_step)

    def _pin(self, resident: Resident) -> Resident:
        if not resident.num_pins:
            self._num_pinned_frames += len(resident.frames)
        resident.num_pins += 1
        resident.last_wave = self.counters.num_waves
        return resident

    def _unpin(self, resident: Resident) -> None:
        resident.num_pins -= 1
        if not resident.num_pins:
            self._num_pinned_frames -= len(resident.frames)

    def _make_room(self, layer: int, num_frames: int) -> None:
        """Evicts until so many frames are free for the layer: who is worth least first, and never who is pinned.

        Raises DeviceMemoryError where other waves hold too much.
        """
        if len(self._free) >= num_frames:
            return
        if len(self._frames) - self._num_pinned_frames < num_frames:
            raise DeviceMemoryError(
                f"the experts of a wave need {num_frames} frames, have {len(self._frames)}, of which other waves hold "
                f"{self._num_pinned_frames}; use those first, or give more than {self.num_slots} slots"
            )
        last_use: Event | None = None
        evictable = (resident for resident in self._residents.values() if not resident.num_pins)
        for victim in sorted(evictable, key=lambda resident: self._worth(resident, layer)):
            if len(self._free) >= num_frames:
                break
            self._free += victim.frames
            del self._residents[victim.layer, victim.expert]
            self._tables[victim.layer].forget(victim.expert)
            self.counters.num_evictions += 1
            if victim.last_use is not None and (last_use is None or victim.last_use.seq > last_use.seq):
                last_use = victim.last_use
        if last_use is not None:  # all are compute's, so the newest comes after the others
            self._device.h2d.wait_event(last_use)

    def _worth(self, resident: Resident, layer: int) -> tuple[bool, float, int]:
        """Most of all, who computes in the wave before this one of the same layer: a copy would have to wait for that.
        Then who was asked for most, lately; of equals not the one used last, as a sweep comes round to it last."""
        computes = resident.layer == layer and resident.last_wave == self.counters.num_waves - 1
        return computes, self._scores.of(resident.layer, resident.expert), -resident.last_wave

    def _fetch(self, layer: int, expert: int, label: str | None) -> Resident:
        source, pages, h2d = self._layers[layer], self._pages[layer], self._device.h2d
        frames = tuple(self._free[-pages.num_pages :])
        buffers = [self._frames[frame] for frame in frames]
        dst, src = [], []
        for buffer, rows in zip(buffers, pages.page_rows(), strict=True):
            if self._device.poison:
                h2d.fill(buffer.tensor, 0xFF, writes=[buffer.name])
            matrix = source.w13 if rows.matrix == "w13" else source.w2
            raw = matrix[expert, rows.begin : rows.end].view(torch.uint8).reshape(-1)
            src.append(raw)
            dst.append(buffer.tensor[: raw.numel()])
        names = [buffer.name for buffer in buffers]
        label = f"expert({layer},{expert})" if label is None else f"{label} (expert {expert})"
        h2d.copy(dst, src, label, reads=[source.buffer_name], writes=names)
        del self._free[-pages.num_pages :]  # not before: a copy that failed leaves them free
        self._tables[layer].set(expert, [buffer.tensor.data_ptr() for buffer in buffers])
        self.counters.pages_moved += len(frames)
        self.counters.bytes_moved += source.shape.expert_bytes
        resident = Resident(layer, expert, frames, h2d.record_event())
        self._residents[layer, expert] = resident
        return resident
