# SPDX-License-Identifier: Apache-2.0
"""Refuses a damaged or incomplete checkpoint by its file headers, before any weight is read or any page allocated.

vLLM notices neither a missing expert nor a missing projection: it serves whatever memory the allocator handed out.
This file decides which safetensors files vLLM would read and whether they are whole; which tensors a model must have
is in checkpoint_layers.py. What stock vLLM loads correctly passes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_moe_lightning.checkpoint_layers import (
    incomplete_experts,
    incomplete_layers,
    missing_at_top,
    unknown_experts,
    unlike_experts,
    wrong_shapes,
)
from vllm_moe_lightning.errors import CheckpointError
from vllm_moe_lightning.weight_quantisation import format_of, leaves_out

CHECKED_LOAD_FORMATS = ("auto", "hf", "safetensors")
CURE = "fetch the checkpoint again"
INDEX_NAME = "model.safetensors.index.json"

HEADER_LENGTH_BYTES = 8  # little endian, before the JSON header
ELEMENT_BITS = {
    "BOOL": 8, "F4": 4, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "BF16": 16, "F16": 16, "F32": 32, "F64": 64,
    "I8": 8, "U8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64,
}  # fmt: skip
PACKED = frozenset({"F4", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "I32"})
"""Types of weights that mean nothing without scales."""
WEIGHTS = (".weight", "_proj", ".w1", ".w2", ".v1")
NUM_NAMED = 5  # a message names this many tensors
COMPARED_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file's header describes it; `begin` and `end` count bytes from the start of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def check_checkpoint(folder: Path, config: Mapping[str, Any], load_format: str = "auto") -> None:
    """`config`: the model's config.json. Raises CheckpointError that names the file or the tensors.

    Other load formats, and folders without safetensors files, are not looked at.
    """
    if load_format not in CHECKED_LOAD_FORMATS:
        return
    files, indexed = _files_to_load(folder, load_format)
    tensors = _read_headers(files)
    is_in_mistral_format = any(file.name.startswith("consolidated") for file in files)
    if not tensors or is_in_mistral_format:  # whose names are its own
        return
    # An index may still list buffers that are computed, and a head that is tied.
    is_tied = bool(config.get("tie_word_embeddings"))
    optional = (".inv_freq", "lm_head.weight") if is_tied else (".inv_freq",)
    _refuse_missing(folder, [name for name in indexed if name not in tensors and not name.endswith(optional)])
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if raw := config.get("quantization_config"):  # packed weights and scales have names and shapes of their own
        parts = format_of(raw).tensors
        _refuse_missing(folder, unlike_experts(shapes))
        missing = incomplete_experts(shapes, config, lambda name: ("weight",) if leaves_out(raw, name) else parts)
        _refuse_missing(folder, missing)
        return
    if packed := [name for name, tensor in tensors.items() if tensor.dtype in PACKED and name.endswith(WEIGHTS)]:
        raise CheckpointError(
            f"{folder} stores {_some(packed)} as {tensors[packed[0]].dtype}, but its config.json has no "
            f"quantization_config, so their scales would be left out; {CURE}"
        )
    _refuse_missing(folder, missing_at_top(shapes, config))
    if unknown := unknown_experts(shapes, config):
        raise CheckpointError(f"{folder} has experts that this model's loader does not know: {_some(unknown)}")
    _refuse_missing(folder, incomplete_layers(shapes, config))
    for name, expected in wrong_shapes(shapes, config):
        raise CheckpointError(
            f"{tensors[name].file}: {name} has shape {list(shapes[name])}, config.json asks for {list(expected)}"
        )


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file. Raises CheckpointError unless they fill the file exactly."""
    if not file.is_file():
        raise CheckpointError(f"{file} is {'a directory' if file.is_dir() else 'missing'}; {CURE}")
    size = file.stat().st_size
    with file.open("rb") as stream:
        begin = HEADER_LENGTH_BYTES + int.from_bytes(stream.read(HEADER_LENGTH_BYTES), "little")
        if size < begin:
            raise CheckpointError(f"{file} has {size} bytes and its header alone needs {begin}; {CURE}")
        raw = stream.read(begin - HEADER_LENGTH_BYTES)
    try:
        entries = {name: entry for name, entry in json.loads(raw).items() if name != "__metadata__"}
        tensors = {
            name: StoredTensor(file, entry["dtype"], tuple(entry["shape"]), *(begin + o for o in entry["data_offsets"]))
            for name, entry in entries.items()
        }
        num_bits = {name: ELEMENT_BITS.get(entry["dtype"]) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{file}: the header is not one of safetensors ({error!r}); {CURE}") from error
    end = begin
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        bits = num_bits[name]  # None: a type newer than this list, whose size only vLLM can check
        if tensor.begin != end or (bits and (tensor.end - tensor.begin) * 8 != bits * math.prod(tensor.shape)):
            raise CheckpointError(f"{file}: the header gives {name} a place that does not fit its shape; {CURE}")
        end = tensor.end
    if end != size:
        raise CheckpointError(f"{file} has {size} bytes and its tensors need {end}; {CURE}")
    return tensors


def _files_to_load(folder: Path, load_format: str) -> tuple[list[Path], Iterable[str]]:
    """The files that vLLM's DefaultModelLoader would choose, and the names that the index lists."""
    pattern, index = "*.safetensors", folder / INDEX_NAME
    if load_format == "auto" and any(folder.glob("consolidated*.safetensors")):
        pattern, index = "consolidated*.safetensors", folder / "consolidated.safetensors.index.json"
    files = sorted(folder.glob(pattern))
    if not files or not index.is_file():
        return files, ()
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        named = sorted({folder / file for file in weight_map.values()})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors ({error!r}); {CURE}") from error
    for file in named:
        if not file.exists():
            raise CheckpointError(f"{file} is missing, and {index.name} names it; {CURE}")
    return named, weight_map


def _read_headers(files: Iterable[Path]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in tensors and not _have_same_content(tensors[name], tensor):
                raise CheckpointError(
                    f"{name} is in {tensors[name].file} and, with other content, in {file}; "
                    "remove the file that does not belong to this checkpoint"
                )
            tensors[name] = tensor
    return tensors


def _have_same_content(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.shape, one.end - one.begin) != (other.shape, other.end - other.begin):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.begin)
        second.seek(other.begin)
        for left in range(one.end - one.begin, 0, -COMPARED_CHUNK_BYTES):
            if first.read(min(left, COMPARED_CHUNK_BYTES)) != second.read(min(left, COMPARED_CHUNK_BYTES)):
                return False
    return True


def _refuse_missing(folder: Path, names: Iterable[str]) -> None:
    if missing := list(names):
        raise CheckpointError(f"{folder} lacks {_some(missing)}; {CURE}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return ", ".join(names[:NUM_NAMED]) + more
