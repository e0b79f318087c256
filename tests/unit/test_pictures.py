"""The README's pictures can be drawn from the recorded results, and what can't be says why."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from benchmarks.figures import RECORDED
from benchmarks.pictures import PICTURES, IncompleteResultsError, draw_gantt


@pytest.mark.parametrize(("name", "source", "draw"), PICTURES, ids=[name for name, _, _ in PICTURES])
def test_each_picture_is_drawn_from_the_recorded_results(tmp_path: Path, name: str, source: str, draw) -> None:
    path = RECORDED / f"{source}.json"
    if not path.exists():
        pytest.skip(f"no {source}.json is recorded")
    result = json.loads(path.read_text())
    try:
        draw(result, tmp_path / "picture.png")
    except IncompleteResultsError as error:
        pytest.skip(str(error))
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_a_gantt_chart_of_results_without_spans_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IncompleteResultsError, match="run it again"):
        draw_gantt({"rows": [{"schedule": name} for name in ("cgopipe", "s2", "s3", "serial")]}, tmp_path / "g.png")
