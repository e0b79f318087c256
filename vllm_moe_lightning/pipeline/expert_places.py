"""Which streamed layers a sweep does not stream, and what becomes of their experts instead."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertPlaces:
    """Sets of decoder layers. What is in neither set comes up whole, through the ring of slots."""

    on_cpu: frozenset[int] = frozenset()
    """Their experts are computed by the CPU, from the host pages."""
    fetched: frozenset[int] = frozenset()
    """Of their experts come up those that the router asks for and that are not on the device already."""

    def __post_init__(self) -> None:
        if both := self.on_cpu & self.fetched:
            raise ValueError(f"layers {sorted(both)} cannot be computed by the CPU and fetched at once")

    @property
    def layers(self) -> frozenset[int]:
        """All that have no pages to stream."""
        return self.on_cpu | self.fetched

    def pages(self, pages_per_layer: tuple[int, ...]) -> tuple[int, ...]:
        """Pages that the ring moves of each decoder layer, of all that it would move."""
        return tuple(0 if layer in self.layers else pages for layer, pages in enumerate(pages_per_layer))


ALL_STREAMED = ExpertPlaces()
