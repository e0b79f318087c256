# SPDX-License-Identifier: Apache-2.0
"""Predicted beside achieved: one row per figure and resource, whichever of the two is known."""

from vllm_moe_lightning.engine_plan import PredictedFigures
from vllm_moe_lightning.pipeline.comparison import achieved_figures, as_text, comparison

ACHIEVED = achieved_figures(
    generated_tokens=500,
    computed_tokens=1000,
    sweeps=100,
    sweep_s=8.0,
    working_s=10.0,
    busy_s={"gpu": 4.0, "cpu": 1.0, "h2d": 10.5, "d2h": 0.01},
)
PREDICTED = PredictedFigures(
    generated_tokens_per_s=60.0,
    total_tokens_per_s=120.0,
    sweep_s=0.07,
    bottleneck="h2d",
    busy={"gpu": 0.3, "cpu": 0.2, "h2d": 1.0, "host_memory": 0.4},
)


def test_each_figure_has_what_was_predicted_beside_what_was_achieved() -> None:
    assert ACHIEVED is not None
    assert comparison(PREDICTED, ACHIEVED) == [
        ("generated tokens per second", "60.0", "50.0"),
        ("prompt and generated tokens per second", "120.0", "100.0"),
        ("seconds per sweep", "0.07", "0.08"),
        ("busiest resource", "H2D link", "H2D link"),
        ("device compute busy", "30.0%", "40.0%"),
        ("CPU attention busy", "20.0%", "10.0%"),
        ("H2D link busy", "100.0%", "100.0%"),  # the last pages may end after the last sweep
        ("D2H link busy", "-", "0.1%"),
        ("host memory busy", "40.0%", "not measured"),
    ]


def test_without_a_plan_the_achieved_figures_stand_alone() -> None:
    assert ACHIEVED is not None
    rows = comparison(None, ACHIEVED)
    assert {row[1] for row in rows} == {"no plan"}
    assert [row[2] for row in rows][:4] == ["50.0", "100.0", "0.08", "H2D link"]


def test_a_run_that_did_nothing_has_no_figures() -> None:
    nothing = dict.fromkeys(("generated_tokens", "computed_tokens", "sweeps", "sweep_s", "working_s"), 0)
    assert achieved_figures(**nothing, busy_s={"gpu": 0.0}) is None


def test_the_text_is_a_table_of_even_columns() -> None:
    lines = as_text([("a", "1", "22"), ("longer", "no plan", "3")]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["predicted", "achieved"]
