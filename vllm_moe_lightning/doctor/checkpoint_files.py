"""Looks at the checkpoint's folder: configuration, tokenizer, shards, and whether they hold all experts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_moe_lightning.checkpoint import CURE, INDEX_NAME, check_checkpoint, read_header
from vllm_moe_lightning.doctor.finding import Finding, ok, refusal, size_text, warning, will_fail
from vllm_moe_lightning.errors import CheckpointError, UnsupportedError
from vllm_moe_lightning.model_config import spec_from_config
from vllm_moe_lightning.model_spec import MoeModelSpec

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "*.tiktoken", "*.model.v*")
POINTER_START = b"version https://git-lfs"
NUM_NAMED = 8  # of many missing shards, a message names these


def read_config(folder: Path) -> dict[str, Any]:
    """config.json. Raises ValueError with the cure."""
    file = folder / "config.json"
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give that of a checkpoint, e.g. of `hf download MODEL --local-dir`")
    if not file.is_file():
        raise ValueError(f"{folder} has no config.json; {CURE}")
    try:
        raw = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); {CURE}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file} holds no JSON object; {CURE}")
    return raw


def spec_of(raw: Mapping[str, Any], name: str, dtype: str) -> MoeModelSpec | None:
    """The sizes in the type that is computed in ("auto": the checkpoint's). None: not a model that is known here."""
    try:
        return spec_from_config(raw if dtype == "auto" else {**raw, "dtype": dtype}, name)
    except (UnsupportedError, ValueError):
        return None


def architecture(raw: Mapping[str, Any], name: str) -> Finding:
    names = ", ".join(raw.get("architectures") or ()) or "no architecture"
    try:
        spec = spec_from_config(raw, name)
    except UnsupportedError as error:  # a family without sizes, or quantised in a way without any
        cure = "set moe_lightning.planner to 'off', num_micro_batches, num_resident_layers and --max-num-seqs"
        return warning("architecture", f"{names} cannot be planned: {error}", cure)
    except ValueError as error:
        return will_fail("architecture", f"{names}: {error}", CURE)
    return ok(
        "architecture",
        f"{names}: {spec.num_layers} layers, {spec.num_experts} experts of which {spec.top_k} work for a token, "
        f"{size_text(spec.total_bytes)}, {spec.expert_bytes_total / spec.total_bytes:.0%} of it experts",
    )


def tokenizer(folder: Path) -> Finding:
    files = sorted(file for pattern in TOKENIZER_FILES for file in folder.glob(pattern))
    if not files:
        return will_fail(
            "tokenizer",
            f"none of {', '.join(TOKENIZER_FILES)} in {folder}",
            "copy the tokenizer there or give vLLM --tokenizer (or --skip-tokenizer-init, and prompts as token ids)",
        )
    for file in files:
        if _is_pointer(file):
            return will_fail("tokenizer", f"{file} is a git-lfs pointer and not the file", "run `git lfs pull` there")
        if file.suffix == ".json":
            try:
                json.loads(file.read_bytes())
            except ValueError as error:
                return will_fail("tokenizer", f"{file} is not JSON ({error})", CURE)
    has_template = (folder / "chat_template.jinja").is_file() or _names_template(folder / "tokenizer_config.json")
    chat = "" if has_template else "; no chat template, so chat completions need --chat-template"
    return ok("tokenizer", ", ".join(file.name for file in files) + chat)


def _names_template(file: Path) -> bool:
    return file.is_file() and '"chat_template"' in file.read_text(errors="replace")


def shard_files(folder: Path) -> list[Path]:
    """That vLLM would read: named by the index, or all there are."""
    index = folder / INDEX_NAME
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        return sorted({folder / name for name in json.loads(index.read_bytes())["weight_map"].values()})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors ({error!r}); {CURE}") from error


def shards(folder: Path) -> list[Finding]:
    """A line for each shard that is missing or damaged; one line if all are whole."""
    files = shard_files(folder)
    if not files:
        others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.gguf") for file in folder.glob(pattern))
        if not others:
            return [will_fail("shards", f"no weights in {folder}", CURE)]
        found = f"no safetensors, only {', '.join(others[:NUM_NAMED])}: whether these are whole is not looked at"
        return [warning("shards", found, "convert them to safetensors")]
    missing = [file for file in files if not file.exists()]
    faults: list[Finding] = []
    if missing:
        more = f" and {len(missing) - NUM_NAMED} more" if len(missing) > NUM_NAMED else ""
        names = ", ".join(file.name for file in missing[:NUM_NAMED]) + more
        faults.append(will_fail("shards", f"missing: {names}", CURE, f"{INDEX_NAME} names {len(files)} files"))
    num_bytes = 0
    for file in files:
        if file in missing:
            continue
        if file.is_file() and _is_pointer(file):
            found = f"{file.name} is a git-lfs pointer and not the weights"
            faults.append(will_fail("shards", found, "run `git lfs pull` there"))
            continue
        try:
            read_header(file)
        except CheckpointError as error:
            faults.append(refusal("shards", error))
        else:
            num_bytes += file.stat().st_size
    return faults or [ok("shards", f"{len(files)} whole, {size_text(num_bytes)}, headers read")]


def tensors(folder: Path, raw: Mapping[str, Any]) -> Finding:
    """All that the architecture must have. Raises CheckpointError as the start does."""
    check_checkpoint(folder, raw)
    if raw.get("quantization_config"):
        return ok("tensors", "experts of a layer are alike; names and shapes of quantised ones are vLLM's to check")
    return ok("tensors", "all experts of all layers are there, with the shapes that config.json asks for")


def quantisation(raw: Mapping[str, Any]) -> Finding:
    """The checkpoint's. Whether vLLM takes it on this device is found when its configuration is built."""
    config = raw.get("quantization_config")
    if not config:
        return ok("quantisation", f"none, {raw.get('dtype') or raw.get('torch_dtype') or 'of no stated type'}")
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if not method:
        return will_fail("quantisation", "quantization_config names no quant_method", CURE)
    return ok("quantisation", str(method))


def _is_pointer(file: Path) -> bool:
    """What git leaves in place of a large file if git-lfs is not installed."""
    with file.open("rb") as stream:
        return stream.read(len(POINTER_START)) == POINTER_START
