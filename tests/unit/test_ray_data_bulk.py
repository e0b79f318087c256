# SPDX-License-Identifier: Apache-2.0
"""examples/ray_data_bulk.py: what it takes from the file of an earlier run."""

import json
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="pip install 'vllm-moe-lightning[ray]'")
pytest.importorskip("vllm")

from examples.ray_data_bulk import answered

PROMPTS = ["To be", "or not", "to be"]


def lines_of(*indices: int) -> str:
    return "".join(json.dumps({"index": i, "prompt": PROMPTS[i], "text": "…"}) + "\n" for i in indices)


def test_answers_of_an_earlier_run_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    assert answered(file, PROMPTS) == set()
    file.write_text(lines_of(2, 0), encoding="utf-8")
    assert answered(file, PROMPTS) == {0, 2}


@pytest.mark.parametrize("kept", [(), (1,), (1, 0)])
def test_a_line_that_was_not_written_to_its_end_is_cut_off(kept: tuple[int, ...], tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(lines_of(*kept) + lines_of(2)[:-1], encoding="utf-8")
    assert answered(file, PROMPTS) == set(kept)
    assert file.read_text(encoding="utf-8") == lines_of(*kept)


@pytest.mark.parametrize("prompts", [["To be", "or what", "to be"], ["To be"]])
def test_a_file_that_answers_other_prompts_is_refused(prompts: list[str], tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(lines_of(1), encoding="utf-8")
    with pytest.raises(ValueError, match="answers another prompt at index 1; give another --output"):
        answered(file, prompts)
