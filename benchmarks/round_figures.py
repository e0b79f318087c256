"""Figures from interleaved rounds (attention_rounds.py), for the rows and summaries of several benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vllm_moe_lightning.kernels.read_probe import READ_PATTERNS

Row = dict[str, Any]

READ = "read: "
"""Prefix of the passes that only read the data: the bound of the others."""
OURS_SHARE_TO_SPARE = 0.1
"""The kernel counts CPU time in ticks: of a short round it cannot tell less."""


def reads(read_with: Callable[[str], Callable[[], object]]) -> dict[str, Callable[[], object]]:
    """A pass for each pattern, named as `fastest_read` looks for them."""
    return {f"{READ}{pattern}": read_with(pattern) for pattern in READ_PATTERNS}


def fastest_read(taken_s: Mapping[str, Sequence[float]]) -> str:
    """The pass that A, the read bandwidth, is taken from."""
    return min((name for name in taken_s if name.startswith(READ)), key=lambda name: statistics.median(taken_s[name]))


def spread(values: Iterable[float]) -> dict[str, Any]:
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "spread": [ordered[0], ordered[-1]]}


def ratios(numerators: Iterable[float], denominators: Iterable[float]) -> dict[str, Any]:
    """Each from one round, which holds both close in time."""
    return spread(top / bottom for top, bottom in zip(numerators, denominators, strict=True))


def most_others_share(num_threads: int, num_cpus: int, *, is_stolen: bool = False) -> float:
    """What other processes may take of all CPUs before a figure says more about them than about ours: the CPUs that we
    leave to them and a little of ours. One thread is judged by its CPU time, but whoever takes turns with it on a core
    empties the core's caches. `is_stolen`: one CPU is taken on purpose."""
    ours = num_threads * (1 - OURS_SHARE_TO_SPARE) - is_stolen
    return 1 - ours / num_cpus


def median_of(row: Row, arm: str | None, figure: str) -> float | None:
    entry = row["arms"].get(arm, {})
    return entry[figure]["median"] if figure in entry else None


def undisturbed(rows: list[Row]) -> list[Row]:
    return [row for row in rows if not row["is_contended"]]


class Summary:
    """Medians over the rows that each figure is about; None where no row has the figure, and then why."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.null_reasons: dict[str, str] = {}

    def add(self, name: str, about: list[Row], figure: Callable[[Row], float | None], arm: str) -> None:
        """`arm`: the one that says why there is none."""
        found = [value for row in about if (value := figure(row)) is not None]
        self.values[name] = statistics.median(found) if found else None
        if not found:
            entries = (row["arms"].get(arm, {}) for row in about)
            reasons = sorted({entry["null_reason"] for entry in entries if "null_reason" in entry})
            self.null_reasons[name] = "; ".join(reasons) or "no such row was measured undisturbed"

    def to_dict(self, rows: list[Row]) -> dict[str, Any]:
        num_contended = len(rows) - len(undisturbed(rows))
        counts = {"num_rows": len(rows), "num_rows_contended": num_contended}
        return self.values | {"summary_null_reasons": self.null_reasons} | counts


def machine_line(head: Mapping[str, Any]) -> str:
    return (
        f"{head['cpu']}, {head['num_cpus']} CPUs, load {head['load_average']:.1f}, torch {head['torch']}, "
        f"commit {head['commit']}. Not measured: other CPUs, more than one socket."
    )
