# SPDX-License-Identifier: Apache-2.0
"""`vllm-moe-lightning doctor` as users start it: on a sound model, and with one fault of every kind at once."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engine import ROOT

pytestmark = pytest.mark.integration

EXAMPLE = ROOT / "examples/tiny-shakespeare-moe"
COMMAND = "from vllm_moe_lightning.cli.app import main; main()"
MEMLOCK_BYTES = 65536
# Runs in every process of the command, before anything else.
ANOTHER_VLLM_AND_NO_HIGHS = """
import sys, types
sys.modules["vllm._version"] = types.SimpleNamespace(__version__="0.31.2", __version_tuple__=(0, 31, 2))
sys.modules["highspy"] = None
"""


def limit_locked_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (MEMLOCK_BYTES, hard))


def doctor(model: Path, *options: str, environment: Mapping[str, str] | None = None, **process: Any):
    """(exit code, findings by name)"""
    arguments = ["doctor", "--json", "--model", str(model), *options]
    result = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **process,
    )
    assert result.stdout.startswith("{"), result.stdout + result.stderr
    answer = json.loads(result.stdout)
    found: dict[str, list[dict[str, str]]] = {}
    for finding in answer["findings"]:
        found.setdefault(finding["name"], []).append(finding)
    return result.returncode, found


def test_the_shipped_model_will_run_here():
    code, found = doctor(EXAMPLE, "--device-memory-mib", "6")
    assert code == 0, [finding for lines in found.values() for finding in lines if finding["state"] == "will fail"]
    for name in ("shards", "tensors", "host memory", "solver", "native library", "vLLM's names", "features", "plan"):
        assert [finding["state"] for finding in found[name]] == ["ok"], found[name]
    assert "micro-batches" in found["plan"][0]["found"]
    assert "bfloat16" in found["vLLM's configuration"][0]["found"]


def test_every_fault_is_named_before_a_weight_is_read(tmp_path):
    model = write_checkpoint(tmp_path / "model", "qwen3_moe", max_shard_size="400KB")
    missing, truncated, *_ = sorted(model.glob("model-*.safetensors"))
    missing.unlink()
    os.truncate(truncated, truncated.stat().st_size - 1000)
    (tmp_path / "sitecustomize.py").write_text(ANOTHER_VLLM_AND_NO_HIGHS)
    cache = tmp_path / "cache"
    cache.write_text("a file, since whoever runs this may write into any folder")
    code, found = doctor(
        model,
        environment={
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
            "XDG_CACHE_HOME": str(cache),
            "VLLM_PLUGINS": "lora_filesystem_resolver",
            "VLLM_CACHE_ROOT": str(Path.home() / ".cache/vllm"),  # what it knows of model classes, else found anew
        },
        preexec_fn=limit_locked_memory,
    )
    assert code == 1
    failures = {name: lines for name, lines in found.items() if lines[0]["state"] == "will fail"}
    assert missing.name in failures["shards"][0]["found"]
    assert str(truncated) in failures["shards"][1]["found"]
    assert "highspy is missing" in failures["solver"][0]["found"]
    assert "found 0.31.2" in failures["vLLM's version"][0]["found"]
    assert "highspy" in failures["plan"][0]["found"]
    assert "VLLM_PLUGINS" in failures
    assert "limit 64 KiB" in found["locked memory"][0]["found"]
    assert str(cache) in found["profile cache"][0]["found"]
    assert all(finding["cure"] for lines in found.values() for finding in lines if finding["state"] != "ok")
    assert found["features"][0]["state"] == "ok", "a wrong version hid what comes after it"
