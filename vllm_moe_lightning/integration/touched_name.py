"""An entry of the ledger: a name of vLLM that we touch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TouchedName:
    """`module:attribute.path`. kind: `use` calls it, `subclass` derives from it, `patch` replaces or writes it."""

    symbol: str
    kind: Literal["use", "subclass", "patch"]
    reason: str
    remove_when: str
    parameters: tuple[str, ...] = ()
    """Parameters that must exist, in this order, where we rely on them."""
    platform: Literal["any", "cpu", "cuda"] = "any"
    """Where it is touched: the other platform's modules may not even be importable."""
    package: str | None = None
    """Touched only beside this package, which the module imports: looked at only where it has been imported."""
