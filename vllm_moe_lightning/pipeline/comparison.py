"""Predicted beside achieved, per resource: the rows that logs, tables and the end of a run show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_moe_lightning.engine_plan import PredictedFigures
from vllm_moe_lightning.resources import LABELS

NO_PLAN = "no plan"
NOT_PREDICTED = "-"
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class AchievedFigures:
    """Of a whole run, while it worked."""

    generated_tokens_per_s: float
    computed_tokens_per_s: float
    """Prompt tokens counted too; those found in the prefix cache are not."""
    sweep_s: float
    busy: Mapping[str, float]
    """Resource -> share (0..1) of the time."""

    @property
    def bottleneck(self) -> str:
        return max(self.busy, key=lambda resource: self.busy[resource])


def achieved_figures(
    *,
    generated_tokens: float,
    computed_tokens: float,
    sweeps: float,
    sweep_s: float,
    working_s: float,
    busy_s: Mapping[str, float],
) -> AchievedFigures | None:
    """From totals of a run; None if it did nothing. `working_s`: without idle times; `sweep_s`: of all sweeps."""
    if not sweeps or working_s <= 0:
        return None
    return AchievedFigures(
        generated_tokens / working_s,
        computed_tokens / working_s,
        sweep_s / sweeps,
        {resource: min(1.0, seconds / working_s) for resource, seconds in busy_s.items()},
    )


def comparison(predicted: PredictedFigures | None, achieved: AchievedFigures) -> list[tuple[str, str, str]]:
    """(figure, predicted, achieved), for people."""
    measured = _figures(
        achieved.generated_tokens_per_s,
        achieved.computed_tokens_per_s,
        achieved.sweep_s,
        achieved.bottleneck,
        achieved.busy,
    )
    if predicted is None:
        return [(figure, NO_PLAN, value) for figure, value in measured.items()]
    expected = _figures(
        predicted.generated_tokens_per_s,
        predicted.total_tokens_per_s,
        predicted.sweep_s,
        predicted.bottleneck,
        predicted.busy,
    )
    return [
        (figure, expected.get(figure, NOT_PREDICTED), measured.get(figure, NOT_MEASURED))
        for figure in dict.fromkeys([*measured, *expected])
    ]


def _figures(
    generated_tokens_per_s: float, total_tokens_per_s: float, sweep_s: float, bottleneck: str, busy: Mapping[str, float]
) -> dict[str, str]:
    return {
        "generated tokens per second": f"{generated_tokens_per_s:.1f}",
        "prompt and generated tokens per second": f"{total_tokens_per_s:.1f}",
        "seconds per sweep": f"{sweep_s:.4g}",
        "busiest resource": LABELS[bottleneck],
        **{f"{LABELS[resource]} busy": f"{share:.1%}" for resource, share in busy.items()},
    }


def as_text(rows: list[tuple[str, str, str]]) -> str:
    """A table in plain text, for a log."""
    table = [("", "predicted", "achieved"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    return "\n".join(f"  {row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}" for row in table)
