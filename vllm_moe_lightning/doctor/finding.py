"""One line of a diagnosis: what was looked at, what was found, what it is held against, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum

import msgspec

from vllm_moe_lightning.errors import MoeLightningError

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10


class State(StrEnum):
    """In order of weight."""

    OK = "ok"
    WARNING = "warning"
    FAIL = "will fail"


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    state: State
    found: str
    """With its measured value and unit."""
    limit: str = ""
    """What it is held against; empty for a fact."""
    cure: str = ""
    """Of a warning or a failure: what to do, as a command or an option where there is one."""


Check = Callable[[], "Finding | list[Finding]"]


def ok(name: str, found: str, limit: str = "") -> Finding:
    return Finding(name, State.OK, found, limit)


def warning(name: str, found: str, cure: str, limit: str = "") -> Finding:
    return Finding(name, State.WARNING, found, limit, cure)


def will_fail(name: str, found: str, cure: str, limit: str = "") -> Finding:
    return Finding(name, State.FAIL, found, limit, cure)


def refusal(name: str, error: Exception) -> Finding:
    """Of an error of ours, in whose message the last clause is the cure."""
    found, _, cure = str(error).rpartition("; ")
    return will_fail(name, found or cure, cure if found else "")


def findings_of(name: str, check: Check) -> list[Finding]:
    """A check that cannot look is a finding too, so that it hides no other."""
    try:
        found = check()
    except MoeLightningError as error:
        return [refusal(name, error)]
    except (OSError, ValueError) as error:
        return [warning(name, f"could not be checked: {error}", "see the reason; the start itself may still work")]
    return found if isinstance(found, list) else [found]


def size_text(num_bytes: float) -> str:
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} bytes"


def worst_of(findings: Iterable[Finding]) -> State:
    weight = list(State)
    return max((finding.state for finding in findings), key=weight.index, default=State.OK)
