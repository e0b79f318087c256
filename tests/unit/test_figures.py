"""Every figure of the READMEs names where it comes from: a command whose script exists, and a value in its results."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.figures import FIGURES, RECORDED, entries, markdown
from benchmarks.page_tables import with_tables

ROOT = Path(__file__).parents[2]
READMES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md")
HEADER = "| figure |"


def table_rows(readme: Path) -> list[list[str]]:
    """Cells of the rows of all tables whose first column is called figure."""
    rows, inside = [], False
    for line in readme.read_text().splitlines():
        if line.startswith(HEADER):
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not line.startswith("| ---"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_every_figure_has_a_name_of_its_own_and_a_command_whose_script_exists() -> None:
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)
    for figure in FIGURES:
        python, script, *_ = figure.command.split()
        assert python == "python"
        assert (ROOT / script).is_file(), figure.command


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_every_row_of_a_readmes_figure_table_is_a_figure_as_recorded(readme: Path) -> None:
    recorded = set(markdown(entries(RECORDED)).splitlines())
    for cells in table_rows(readme):
        assert f"| {' | '.join(cells)} |" in recorded, cells


def test_the_tables_of_the_benchmarks_page_are_those_of_the_recorded_results() -> None:
    page = READMES[1].read_text()
    assert with_tables(page) == page, "run `python benchmarks/page_tables.py`"
    assert {cells[0] for cells in table_rows(READMES[1])} == {entry["name"] for entry in entries(RECORDED)}


def test_a_figure_that_was_measured_now_is_taken_before_the_recorded_one(tmp_path: Path) -> None:
    results = json.loads((RECORDED / "pipeline.json").read_text())
    results["summary"]["serial_over_cgopipe"] = 123.0
    (tmp_path / "pipeline.json").write_text(json.dumps(results))
    values = {entry["name"]: entry for entry in entries(tmp_path)}
    assert values["serial order's step over CGOPipe's"]["value"] == 123.0
    assert values.keys() == {entry["name"] for entry in entries(RECORDED)}
