# SPDX-License-Identifier: Apache-2.0
"""What the bulk runner reads, and what it refuses before vLLM starts."""

from pathlib import Path

import pytest

from vllm_moe_lightning.integration.bulk_run import BulkJob, prompts_of, read_prompts


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_text_file_holds_a_prompt_a_line_with_escaped_newlines(tmp_path: Path) -> None:
    file = written(tmp_path / "prompts.txt", "ROMEO:\\nO, she\n\n  \nJULIET:\\n\r\n")
    assert read_prompts(file) == ["ROMEO:\nO, she", "JULIET:\n"]


def test_a_json_lines_file_is_cut_at_newlines_only(tmp_path: Path) -> None:
    file = written(tmp_path / "prompts.jsonl", '{"prompt": "a\u2028b"}\n{"prompt": "[x](y) \\\\[z]", "id": 7}\n')
    assert read_prompts(file) == ["a\u2028b", "[x](y) \\[z]"]


@pytest.mark.parametrize("line", ["{", '{"text": "a"}', '{"prompt": ""}', '{"prompt": 3}', "[1]"])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = written(tmp_path / "prompts.jsonl", '{"prompt": "good"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 2"):
        read_prompts(file)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(written(tmp_path / "prompts.txt", " \n\n"))


def test_a_folder_without_a_config_and_unknown_options_are_refused_before_anything_starts(tmp_path: Path) -> None:
    file = written(tmp_path / "prompts.txt", "hello\n")
    with pytest.raises(ValueError, match="it has no config"):
        prompts_of(BulkJob(tmp_path, file, {}))
    written(tmp_path / "config.json", "{}")
    with pytest.raises(ValueError, match="num_microbatches"):
        prompts_of(BulkJob(tmp_path, file, {"num_microbatches": 2}))
    assert prompts_of(BulkJob(tmp_path, file, {"num_micro_batches": 2})) == ["hello"]
