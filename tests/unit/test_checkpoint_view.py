# SPDX-License-Identifier: Apache-2.0
"""The first layers of a checkpoint: the same tensors and no others, under a config that says so."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.checkpoints import write_checkpoint
from vllm_moe_lightning.checkpoint import check_checkpoint
from vllm_moe_lightning.checkpoint_view import StoredModel
from vllm_moe_lightning.errors import CheckpointError, UnsupportedError


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize("arch", ["mixtral", "dbrx", "qwen3_moe"])
@pytest.mark.parametrize("max_shard_size", [None, "300KB"])
def test_the_first_layers_have_the_same_tensors_and_pass_the_checks(
    arch: str, max_shard_size: str | None, tmp_path: Path
) -> None:
    whole = write_checkpoint(tmp_path / "whole", arch, num_layers=4, max_shard_size=max_shard_size)
    stored = StoredModel(whole)
    view = stored.write_first_layers(2, tmp_path / "view")
    tensors, kept = tensors_of(whole), tensors_of(view)
    assert all(torch.equal(kept[name], tensors[name]) for name in kept)
    stack = "transformer.blocks." if arch == "dbrx" else "model.layers."
    gone = [name for name in tensors if name not in kept]
    assert gone == [name for name in tensors if name.startswith((f"{stack}2.", f"{stack}3."))]
    assert stored.num_bytes(2) == sum(t.nbytes for t in kept.values())
    assert (stored.num_bytes(4), stored.num_layers, stored.element_bytes) == (
        sum(t.nbytes for t in tensors.values()), 4, 4,
    )  # fmt: skip
    config = json.loads((view / "config.json").read_text())
    assert config["n_layers" if arch == "dbrx" else "num_hidden_layers"] == 2
    check_checkpoint(view, config)
    assert (view / "tokenizer.json").read_bytes() == (whole / "tokenizer.json").read_bytes()


def test_files_that_are_wanted_as_a_whole_are_linked_to(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "whole", "mixtral", num_layers=4, max_shard_size="300KB")
    view = StoredModel(whole).write_first_layers(2, tmp_path / "view")
    links = [file for file in view.glob("*.safetensors") if file.is_symlink()]
    assert links
    assert len(links) < len(list(view.glob("*.safetensors"))) < len(list(whole.glob("*.safetensors")))


def test_what_the_config_says_of_single_layers_is_cut_too(tmp_path: Path) -> None:
    whole = write_checkpoint(
        tmp_path / "whole", "qwen3_moe", num_layers=4, mlp_only_layers=[1, 3], layer_types=["full_attention"] * 4
    )
    config = json.loads((StoredModel(whole).write_first_layers(2, tmp_path / "view") / "config.json").read_text())
    assert config["mlp_only_layers"] == [1]
    assert config["layer_types"] == ["full_attention"] * 2


def test_expert_bytes_are_of_one_layer(tmp_path: Path) -> None:
    stored = StoredModel(write_checkpoint(tmp_path, "mixtral", num_layers=2))
    assert stored.expert_bytes(1) == 8 * 3 * 96 * 128 * 4
    assert stored.expert_bytes(2) == 0


def test_what_cannot_be_taken_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it has no config"):
        StoredModel(tmp_path)
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    with pytest.raises(UnsupportedError, match="no safetensors files"):
        StoredModel(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"12345678123")
    with pytest.raises(CheckpointError, match="its header alone needs"):
        StoredModel(tmp_path)
    whole = write_checkpoint(tmp_path / "whole", "mixtral", num_layers=2)
    with pytest.raises(ValueError, match="has 2 layers; 3 of them"):
        StoredModel(whole).write_first_layers(3, tmp_path / "view")
    (whole / "config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="so its layers are not known"):
        StoredModel(whole)
