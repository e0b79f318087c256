# SPDX-License-Identifier: Apache-2.0
"""What doctor says of a checkpoint's folder: each damage by the file's name, and none before another."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.helpers.checkpoints import write_checkpoint
from vllm_moe_lightning.doctor import checkpoint_files
from vllm_moe_lightning.doctor.finding import Finding, State, findings_of
from vllm_moe_lightning.errors import CheckpointError

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, "qwen3_moe", max_shard_size="400KB")


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def looked_at(folder: Path) -> list[Finding]:
    return findings_of("shards", lambda: checkpoint_files.shards(folder))


def test_a_whole_checkpoint_is_ok(sharded: Path) -> None:
    config = checkpoint_files.read_config(sharded)
    findings = [
        *looked_at(sharded),
        checkpoint_files.architecture(config, "tiny"),
        checkpoint_files.quantisation(config),
        checkpoint_files.tokenizer(sharded),
        checkpoint_files.tensors(sharded, config),
    ]
    assert {finding.state for finding in findings} == {State.OK}
    assert f"{len(shards_of(sharded))} whole" in findings[0].found
    assert "16 experts of which 4" in findings[1].found


def test_missing_and_truncated_shards_are_all_named(sharded: Path) -> None:
    missing, truncated, pointer, *_ = shards_of(sharded)
    missing.unlink()
    os.truncate(truncated, truncated.stat().st_size - 1000)
    pointer.write_text(POINTER)
    first, second, third = looked_at(sharded)
    assert {finding.state for finding in (first, second, third)} == {State.FAIL}
    assert missing.name in first.found
    assert "names" in first.limit
    assert str(truncated) in second.found
    assert "its tensors need" in second.found
    assert pointer.name in third.found
    assert "git lfs pull" in third.cure


def test_of_many_missing_shards_some_are_named_and_the_others_counted(sharded: Path) -> None:
    for file in shards_of(sharded):
        file.unlink()
    (finding,) = looked_at(sharded)
    assert " more" in finding.found


def test_a_broken_index_is_named(sharded: Path) -> None:
    (sharded / checkpoint_files.INDEX_NAME).write_text("[]")
    (finding,) = looked_at(sharded)
    assert finding.state is State.FAIL
    assert "not an index" in finding.found


@pytest.mark.parametrize(
    ("file", "state", "words"),
    [(None, State.FAIL, "no weights"), ("pytorch_model.bin", State.WARNING, "pytorch_model.bin")],
)
def test_a_folder_without_safetensors_is_told_what_it_has(
    tmp_path: Path, file: str | None, state: State, words: str
) -> None:
    if file:
        (tmp_path / file).touch()
    (finding,) = looked_at(tmp_path)
    assert finding.state is state
    assert words in finding.found


def test_a_missing_expert_is_refused_as_the_start_does(sharded: Path) -> None:
    index = sharded / checkpoint_files.INDEX_NAME
    config = {**checkpoint_files.read_config(sharded), "num_experts": 17}
    assert index.is_file()
    with pytest.raises(CheckpointError, match=r"experts\.16\.gate_proj"):
        checkpoint_files.tensors(sharded, config)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "has no config.json"), ("{", "is not JSON"), ("[]", "no JSON object")],
)
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=words):
        checkpoint_files.read_config(tmp_path)


def test_a_path_that_is_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no folder"):
        checkpoint_files.read_config(tmp_path / "mistralai/Mixtral-8x7B")


def test_a_missing_figure_and_an_unknown_family_are_told_apart(sharded: Path) -> None:
    config = checkpoint_files.read_config(sharded)
    without = {name: value for name, value in config.items() if name != "num_experts"}
    finding = checkpoint_files.architecture(without, "tiny")
    assert finding.state is State.FAIL
    assert "num_experts is missing" in finding.found
    finding = checkpoint_files.architecture({**config, "model_type": "jamba"}, "tiny")
    assert finding.state is State.WARNING
    assert "planner to 'off'" in finding.cure


def test_the_tokenizer_is_missing_damaged_or_a_pointer(sharded: Path) -> None:
    file = sharded / "tokenizer.json"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    assert "is not JSON" in checkpoint_files.tokenizer(sharded).found
    file.write_text(POINTER)
    assert "git lfs pull" in checkpoint_files.tokenizer(sharded).cure
    file.unlink()
    finding = checkpoint_files.tokenizer(sharded)
    assert finding.state is State.FAIL
    assert "--skip-tokenizer-init" in finding.cure


def test_a_tokenizer_without_a_chat_template_says_so(sharded: Path) -> None:
    assert "--chat-template" not in checkpoint_files.tokenizer(sharded).found
    (sharded / "tokenizer_config.json").write_text("{}")
    assert "--chat-template" in checkpoint_files.tokenizer(sharded).found


def test_a_quantisation_without_a_method_is_refused() -> None:
    assert checkpoint_files.quantisation({"quantization_config": {"bits": 4}}).state is State.FAIL
    assert checkpoint_files.quantisation({"quantization_config": {"quant_method": "gptq"}}).found == "gptq"


def test_the_sizes_follow_the_type_that_is_computed_in(sharded: Path) -> None:
    config = json.loads((sharded / "config.json").read_text())
    stored, halved = (checkpoint_files.spec_of(config, "tiny", dtype) for dtype in ("auto", "bfloat16"))
    assert stored is not None
    assert halved is not None
    assert stored.total_bytes == 2 * halved.total_bytes
    assert checkpoint_files.spec_of({"model_type": "jamba"}, "tiny", "auto") is None
