"""The first layers of a checkpoint as a checkpoint of its own, for a machine that is too small for all of it.

Files whose tensors are all wanted are linked to, the others are written anew with what is wanted of them. Reads no
tensor into memory and needs no torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm_moe_lightning.checkpoint import HEADER_LENGTH_BYTES, INDEX_NAME, StoredTensor, read_header
from vllm_moe_lightning.errors import CheckpointError, UnsupportedError

NUM_LAYERS_KEYS = ("num_hidden_layers", "n_layers")
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")
COPIED_CHUNK_BYTES = 64 << 20


class StoredModel:
    """A checkpoint folder with safetensors files, known by its config.json and its files' headers."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError without a config.json, CheckpointError for damaged files, UnsupportedError for others."""
        self.folder = folder
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} is not a checkpoint folder: it has no config.json")
        self.config: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
        index = folder / INDEX_NAME
        if index.is_file():
            self._files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        else:
            self._files = sorted(folder.glob("*.safetensors"))
        if not self._files:
            raise UnsupportedError(f"{folder} has no safetensors files, and check reads no others")
        self.tensors: dict[Path, dict[str, StoredTensor]] = {file: read_header(file) for file in self._files}
        key = next((key for key in NUM_LAYERS_KEYS if isinstance(self.config.get(key), int)), None)
        if key is None:
            raise UnsupportedError(f"{folder}/config.json has none of {NUM_LAYERS_KEYS}, so its layers are not known")
        self._num_layers_key = key
        self.num_layers: int = self.config[key]

    @property
    def element_bytes(self) -> int:
        """Of most of its tensors' bytes."""
        by_width: dict[int, int] = {}
        for tensor in self._all():
            width = _element_bytes(tensor)
            by_width[width] = by_width.get(width, 0) + tensor.end - tensor.begin
        return max(by_width, key=lambda width: by_width[width])

    def num_bytes(self, num_layers: int) -> int:
        """Of all tensors that the first `num_layers` layers need, and those outside of layers."""
        wanted = (item for tensors in self.tensors.values() for item in tensors.items())
        return sum(t.end - t.begin for name, t in wanted if _is_wanted(name, num_layers))

    def expert_bytes(self, layer: int) -> int:
        """Of the tensors of one layer that have "experts" in their name."""
        tensors = (item for tensors in self.tensors.values() for item in tensors.items())
        return sum(t.end - t.begin for name, t in tensors if _layer_of(name) == layer and "experts" in name)

    def write_first_layers(self, num_layers: int, folder: Path) -> Path:
        """A checkpoint in `folder` (made if need be). All layers: everything is linked to.

        Raises ValueError for a number of layers that there are not.
        """
        if not 1 <= num_layers <= self.num_layers:
            raise ValueError(f"{self.folder} has {self.num_layers} layers; {num_layers} of them cannot be taken")
        folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if path.is_file() and path.suffix != ".safetensors" and path.name not in (INDEX_NAME, "config.json"):
                (folder / path.name).symlink_to(path.absolute())
        weight_map: dict[str, str] = {}
        for file, tensors in self.tensors.items():
            wanted = {name: tensor for name, tensor in tensors.items() if _is_wanted(name, num_layers)}
            if not wanted:
                continue
            if len(wanted) == len(tensors):
                (folder / file.name).symlink_to(file.absolute())
            else:
                _write_some(file, wanted, folder / file.name)
            weight_map |= dict.fromkeys(wanted, file.name)
        total = self.num_bytes(num_layers)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index))
        (folder / "config.json").write_text(json.dumps(self._config_of(num_layers), indent=2))
        return folder

    def _config_of(self, num_layers: int) -> dict[str, Any]:
        """Lists with an entry for each layer are cut, lists of layers keep those that are there."""
        config = {**self.config, self._num_layers_key: num_layers}
        for key, value in self.config.items():
            if isinstance(value, list) and len(value) == self.num_layers and "layer" in key:
                config[key] = value[:num_layers]
        if isinstance(dense := self.config.get("mlp_only_layers"), list):
            config["mlp_only_layers"] = [layer for layer in dense if layer < num_layers]
        return config

    def _all(self) -> Iterable[StoredTensor]:
        return (tensor for tensors in self.tensors.values() for tensor in tensors.values())


def _layer_of(name: str) -> int | None:
    """None for a tensor outside of layers."""
    match = _LAYER.search(name)
    return None if match is None else int(match[1])


def _is_wanted(name: str, num_layers: int) -> bool:
    layer = _layer_of(name)
    return layer is None or layer < num_layers


def _element_bytes(tensor: StoredTensor) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return max(1, (tensor.end - tensor.begin) // count) if count else 1


def _write_some(source: Path, tensors: Mapping[str, StoredTensor], target: Path) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.end - tensor.begin
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % HEADER_LENGTH_BYTES)
    with source.open("rb") as read, target.open("wb") as written:
        written.write(len(raw).to_bytes(HEADER_LENGTH_BYTES, "little") + raw)
        written.flush()
        for tensor in tensors.values():
            _copy(read.fileno(), written.fileno(), tensor.begin, tensor.end - tensor.begin, source)


def _copy(source: int, target: int, offset: int, num_bytes: int, name: Path) -> None:
    while num_bytes:
        copied = os.sendfile(target, source, offset, min(num_bytes, COPIED_CHUNK_BYTES))
        if not copied:
            raise CheckpointError(f"{name} ends before its tensors do; fetch the checkpoint again")
        offset, num_bytes = offset + copied, num_bytes - copied
