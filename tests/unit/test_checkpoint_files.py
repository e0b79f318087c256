# SPDX-License-Identifier: Apache-2.0
"""Damaged, missing and stale files of a checkpoint are named before any weight is read."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.unit.test_checkpoint import MIXTRAL, QWEN, qwen, write, write_file, write_shards
from vllm_moe_lightning.checkpoint import INDEX_NAME, check_checkpoint, read_header
from vllm_moe_lightning.errors import CheckpointError


def truncate(num_bytes: int) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(file.read_bytes()[:num_bytes])


def shorten(file: Path) -> None:
    truncate(-10)(file)


def append_junk(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x" * 16)


def lie_about_the_header(file: Path) -> None:
    file.write_bytes(struct.pack("<Q", 2**40) + file.read_bytes()[8:])


def spoil_the_header(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"shape"', b'"shapf"'))


def make_a_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES = {
    "shortened": (shorten, r"has \d+ bytes and its tensors need \d+"),
    "seven-bytes": (truncate(7), r"has 7 bytes and its header alone needs \d+"),
    "empty": (truncate(0), r"has 0 bytes and its header alone needs 8"),
    "header-only-begun": (truncate(40), r"has 40 bytes and its header alone needs \d+"),
    "header-length": (lie_about_the_header, r"has \d+ bytes and its header alone needs 1099511627784"),
    "header-content": (spoil_the_header, r"the header is not one of safetensors"),
    "junk": (append_junk, r"has \d+ bytes and its tensors need \d+"),
    "directory": (make_a_directory, "is a directory"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_with_its_sizes(tmp_path: Path, damage: str) -> None:
    files = write_shards(tmp_path, qwen())
    harm, message = DAMAGES[damage]
    harm(files[1])
    with pytest.raises(CheckpointError, match=message) as error:
        check_checkpoint(tmp_path, QWEN)
    assert str(files[1]) in str(error.value)


def test_a_tensor_whose_place_does_not_fit_its_shape_is_an_error(tmp_path: Path) -> None:
    file = write_file(tmp_path / "x.safetensors", {"a": (2, 3), "b": (4,)})
    file.write_bytes(file.read_bytes().replace(b"[2, 3]", b"[2, 2]"))
    with pytest.raises(CheckpointError, match="gives a a place that does not fit"):
        read_header(file)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    files = write_shards(tmp_path, qwen())
    files[2].unlink()
    with pytest.raises(CheckpointError, match=rf"{files[2].name} is missing, and {INDEX_NAME} names it"):
        check_checkpoint(tmp_path, QWEN)


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    change(index["weight_map"])
    (folder / INDEX_NAME).write_text(json.dumps(index))


def test_an_entry_that_only_the_index_lacks_passes(tmp_path: Path) -> None:
    write_shards(tmp_path, qwen())
    edit_index(tmp_path, lambda weight_map: weight_map.pop("model.layers.0.mlp.experts.0.up_proj.weight"))
    check_checkpoint(tmp_path, QWEN)


def test_an_entry_that_only_the_index_has_is_missing(tmp_path: Path) -> None:
    files = write_shards(tmp_path, qwen())
    edit_index(tmp_path, lambda weight_map: weight_map.update({"model.norm.weight": files[0].name}))
    with pytest.raises(CheckpointError, match=r"lacks model\.norm\.weight"):
        check_checkpoint(tmp_path, QWEN)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": [1]}'])
def test_a_spoilt_index_is_named(tmp_path: Path, text: str) -> None:
    write_shards(tmp_path, qwen())
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=f"{INDEX_NAME} is not an index"):
        check_checkpoint(tmp_path, QWEN)


def write_extra(folder: Path, names: Iterable[str], value: int) -> None:
    write_file(folder / "old.safetensors", {name: qwen()[name] for name in names}, value=value)


def test_a_stale_file_beside_an_index_is_not_read(tmp_path: Path) -> None:
    write_shards(tmp_path, qwen())
    write_extra(tmp_path, ["lm_head.weight"], value=1)
    (tmp_path / "unrelated.safetensors").mkdir()
    check_checkpoint(tmp_path, QWEN)


def test_a_stale_file_without_an_index_is_refused_if_it_contradicts(tmp_path: Path) -> None:
    write(tmp_path, qwen())
    write_extra(tmp_path, ["lm_head.weight"], value=0)
    check_checkpoint(tmp_path, QWEN)
    write_extra(tmp_path, ["lm_head.weight"], value=1)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is in .* with other content, in .*old\.safetensors"):
        check_checkpoint(tmp_path, QWEN)


@pytest.mark.parametrize("load_format", ["dummy", "gguf", "pt"])
def test_other_load_formats_are_left_alone(tmp_path: Path, load_format: str) -> None:
    append_junk(write(tmp_path, {"a": (1,)}) / "model.safetensors")
    check_checkpoint(tmp_path, QWEN, load_format)


def test_a_folder_without_safetensors_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    check_checkpoint(tmp_path, QWEN)


def test_files_in_mistral_s_own_format_are_checked_for_damage_only(tmp_path: Path) -> None:
    file = write_file(tmp_path / "consolidated.safetensors", {"layers.0.feed_forward.w1": (2, 2)})
    check_checkpoint(tmp_path, MIXTRAL)
    append_junk(file)
    with pytest.raises(CheckpointError, match="its tensors need"):
        check_checkpoint(tmp_path, MIXTRAL)
