# SPDX-License-Identifier: Apache-2.0
"""The plugin is there in every process that needs it, and leaves no trace in those that do not (B37)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engine import ROOT, Job, run_engine
from tests.helpers.oracle import assert_same_tokens
from tests.helpers.paging import PAGE_MIB, assert_pages_are_exact
from tests.helpers.prompts import standard_prompts
from tests.helpers.start_probes import MODULE_NEEDED_BY_US_ONLY, findings, probe

pytestmark = pytest.mark.integration

PROMPTS = standard_prompts(4)
# Python runs this in every process that has its folder on the path.
SITECUSTOMIZE = """
import os
import vllm_moe_lightning

register = vllm_moe_lightning.register


def register_and_record():
    with open(os.environ["REGISTER_LOG"], "a") as log:
        log.write(f"{os.getpid()}\\n")
    register()


vllm_moe_lightning.register = register_and_record
"""


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A dense Qwen3: what a Qwen3-MoE is whose layers are all named in mlp_only_layers."""
    model = write_checkpoint(tmp_path_factory.mktemp("dense"), "qwen3_moe", mlp_only_layers=[0, 1, 2])
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (model / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_register_runs_in_every_process_that_is_started(checkpoint, hf_result, tmp_path, method):
    """B37. A forked process may inherit what register() did; a spawned one may not."""
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    log = tmp_path / "register.log"
    model = checkpoint("mixtral")
    result = run_engine(
        model,
        [Job(PROMPTS)],
        plugin=True,
        moe_lightning={"page_mib": PAGE_MIB},
        env={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": method,
            "REGISTER_LOG": str(log),
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        },
        clean_exit=True,
    )
    assert_same_tokens(result.token_ids, hf_result("mixtral", num_prompts=len(PROMPTS)), method)
    assert_pages_are_exact(result.jobs[0], model)
    calls_by_pid = Counter(log.read_text().split())
    if method == "spawn":
        assert len(calls_by_pid) >= 2, "front end and engine core"
    assert calls_by_pid


def test_registering_again_changes_nothing(checkpoint, hf_result):
    """B37. In one process, as with VLLM_ENABLE_V1_MULTIPROCESSING=0; vLLM's own call is a fourth."""
    result = run_engine(checkpoint("mixtral"), [Job(PROMPTS)], plugin=True, preload=[probe("register_three_times")])
    depths = findings(result.log, "DEPTH")
    assert depths == [depths[0]] * 3
    assert_same_tokens(result.token_ids, hf_result("mixtral", num_prompts=len(PROMPTS)), "registered four times")
    assert result.log.count("host memory is pageable") == 1


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_stock_vllm_is_the_same_with_the_package_installed(checkpoint, dense, kind):
    """B37. Bit for bit; and of ours nothing is imported but what decides that it was not asked for."""
    model = checkpoint("qwen3_moe") if kind == "moe" else dense
    without = run_engine(model, [Job(PROMPTS)], plugin=False)
    installed = run_engine(model, [Job(PROMPTS)], plugin=False, preload=[probe("load_installed_plugins")])
    assert installed.jobs[0].token_ids == without.jobs[0].token_ids
    assert installed.jobs[0].logprobs == without.jobs[0].logprobs
    assert installed.jobs[0].texts == without.jobs[0].texts
    (modules,) = findings(installed.log, "MODULES")
    assert modules == [
        "vllm_moe_lightning",
        "vllm_moe_lightning.integration",
        "vllm_moe_lightning.integration.register",
    ]
    assert "moe_lightning" not in "\n".join(line for line in installed.log.splitlines() if "PROBE" not in line)


def run_python(code: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )


def test_importing_the_package_is_cheap_and_leaves_nothing_running():
    """B37."""
    code = (  # an editable install brings parts of the standard library in
        "import os, sys; before = set(sys.modules); import vllm_moe_lightning; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names); "
        "print(new, len(os.listdir('/proc/self/task')))"
    )
    assert run_python(code).stdout.strip() == "{'vllm_moe_lightning'} 1"


def test_importing_the_package_takes_less_than_300_milliseconds():
    """B37, by Python's own count."""
    lines = run_python("import vllm_moe_lightning", "-X", "importtime").stderr.splitlines()
    (line,) = [line for line in lines if line.endswith("| vllm_moe_lightning")]
    assert int(line.split("|")[1]) < 300_000  # microseconds, with all that it imports


def test_registering_starts_no_thread_and_touches_no_device():
    """B37. vllm.platforms, which register() asks for the platform, is there before any plugin is."""
    code = (
        "import vllm.platforms, os, sys, torch; platform = vllm.platforms.current_platform.device_type; "
        "before, threads = set(sys.modules), os.listdir('/proc/self/task'); "
        "import vllm_moe_lightning; vllm_moe_lightning.register(); "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "assert new == {'vllm_moe_lightning'}, new; "
        "assert os.listdir('/proc/self/task') == threads; "
        "assert not torch.cuda.is_initialized()"
    )
    run_python(code, VLLM_PLUGINS="")


def test_the_command_line_of_vllm_works_as_without_the_package(tmp_path: Path):
    """B38. Asked for help, with a module of vLLM gone that only we need."""
    hide = f"import sys; sys.modules[{MODULE_NEEDED_BY_US_ONLY!r}] = None"
    (tmp_path / "sitecustomize.py").write_text(hide)
    code = "import sys; sys.argv = ['vllm', '--help']; from vllm.entrypoints.cli.main import main; main()"
    result = run_python(code, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert "serve" in result.stdout
