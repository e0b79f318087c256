# SPDX-License-Identifier: Apache-2.0
"""Runs a vLLM engine in a process of its own and hands back its answers.

A process of its own, for engines leave state behind (distributed groups, patched classes, thread settings), and so that
a crash is a result and not the end of the test session. By default that process is forked from a server that has
imported vLLM already (see engine_child.py) and holds engine core and worker too: a start takes about one second. With
`env`, or `fresh_process=True`, it is an ordinary new Python process.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.engine_child import GREEDY

__all__ = ["ENGINE_ARGS", "GREEDY", "EngineFailedError", "EngineResult", "Job", "JobResult", "Rpc", "run_engine"]

WORKER_CLS = "vllm_moe_lightning.worker.MoELightningWorker"
ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("engine_child.py")
LOG_TAIL_CHARS = 6000

ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",  # "auto" turns float32 checkpoints into bfloat16
    "enforce_eager": True,
    "max_model_len": 256,
    "block_size": 32,
    # An explicit size skips the warm-up pass (with eager mode); the cache is zeroed at start, so small is fast.
    "kv_cache_memory_bytes": 64 * 2**20,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 4096,
    "enable_prefix_caching": False,
    "seed": 0,
    "disable_log_stats": True,
}

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine core and worker in this very process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # One thread: sums in one order, and no spinning against other processes on a shared machine.
    "OMP_NUM_THREADS": "1",
    # The sampler compiles a rank count with Dynamo (2 s, 12 s without its cache) when log-probabilities are asked for.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Rpc:
    """A method of the worker, called on all workers by `collective_rpc`."""

    method: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """Prompts (token ids, or texts) answered by one `LLM.generate` call.

    `sampling`: arguments of SamplingParams on top of GREEDY, one dict for all prompts or one per prompt. `before`:
    calls made first; a reconfiguration between two jobs goes here. `stats`: method asked after the job where the
    plugin is in force, None for none.
    """

    prompts: Sequence[Sequence[int] | str]
    sampling: Mapping[str, Any] | Sequence[Mapping[str, Any]] = field(default_factory=dict)
    before: Sequence[Rpc] = ()
    stats: str | None = "moe_lightning_stats"


@dataclass(frozen=True)
class JobResult:
    token_ids: list[list[int]]
    logprobs: list[list[float] | None]  # of the chosen tokens
    texts: list[str]
    finish_reasons: list[str]
    num_cached_tokens: list[int | None]  # prefix-cache hits
    stats: list[Any] | None  # one entry per worker
    rpc_results: list[list[Any]]  # per call in `before`, one entry per worker
    wall_s: float


@dataclass(frozen=True)
class EngineResult:
    jobs: list[JobResult]
    runner: str  # the one that really ran
    import_s: float
    start_s: float
    total_s: float
    log: str  # all that the engine process printed

    @property
    def token_ids(self) -> list[list[int]]:
        """Of the first job."""
        return self.jobs[0].token_ids


class EngineFailedError(AssertionError):
    """The engine process ended badly, or ran past its time; `log` is all it printed."""

    def __init__(self, reason: str, returncode: int | None, log: str) -> None:
        super().__init__(f"engine {reason}; the end of its output:\n{log[-LOG_TAIL_CHARS:]}")
        self.returncode = returncode
        self.log = log


def run_engine(
    model: Path | str,
    jobs: Sequence[Job],
    *,
    plugin: bool,
    runner: str = "v1",
    moe_lightning: Mapping[str, Any] | None = None,
    engine_args: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
    fresh_process: bool = False,
    clean_exit: bool = False,
    timeout_s: float = 300.0,
) -> EngineResult:
    """Starts one engine on `model`, runs `jobs` in order, and returns their results; raises EngineFailedError.

    `preload` names functions ("package.module:function") called before the engine is made; such patches reach the
    worker only while it lives in the same process, as it does by default. `clean_exit` shuts the engine down before the
    process ends (about a second); without it the process just ends.
    """
    if runner not in ("v1", "v2"):
        raise ValueError(f"runner must be 'v1' or 'v2', got {runner!r}")
    arguments = {**ENGINE_ARGS, "model": str(model), **(engine_args or {})}
    if plugin:
        arguments["worker_cls"] = WORKER_CLS
        # Not planned unless a test says so: nothing is measured, and what a test gives is what it gets.
        arguments["additional_config"] = {"moe_lightning": {"planner": "off", **(moe_lightning or {})}}
    elif moe_lightning is not None:
        raise ValueError("moe_lightning options without plugin=True would be ignored")
    request = {
        "engine_args": arguments,
        "jobs": [asdict(job) for job in jobs],
        "plugin": plugin,
        "runner": runner,
        "preload": list(preload),
        "clean_exit": clean_exit,
    }
    environment = _environment(plugin, runner, env or {})
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="engine-") as scratch:
        files = {name: str(Path(scratch) / name) for name in ("request", "answer", "log")}
        Path(files["request"]).write_text(json.dumps(request))
        environment.setdefault("TMPDIR", scratch)  # processes that just end leave their sockets and metrics behind
        if env or fresh_process:
            returncode = _run_in_new_process(files, environment, timeout_s)
        else:
            returncode = _fork_server(runner).run(files, environment, timeout_s)
        log = Path(files["log"]).read_text(errors="replace")
        if returncode is None:
            raise EngineFailedError(f"was still running after {timeout_s:.0f} s", None, log)
        if returncode != 0:
            raise EngineFailedError(f"ended with code {returncode}", returncode, log)
        answer = json.loads(Path(files["answer"]).read_text())
    answer["jobs"] = [JobResult(**job) for job in answer["jobs"]]
    return EngineResult(**answer, total_s=time.monotonic() - started, log=log)


def _environment(plugin: bool, runner: str, changes: Mapping[str, str]) -> dict[str, str]:
    environment = {**os.environ, **ENVIRONMENT, "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "v2" else "0"}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if runner == "v2":
        environment["TRITON_INTERPRET"] = "1"
        paths.insert(0, str(Path(__file__).parent / "v2_runner"))
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    if not plugin:
        environment["VLLM_PLUGINS"] = ""  # stock means stock: no entry point of ours is loaded
    return {**environment, **changes}


def _run_in_new_process(files: Mapping[str, str], environment: Mapping[str, str], timeout_s: float) -> int | None:
    """The exit code, None for a time-out."""
    with open(files["log"], "wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(CHILD), files["request"], files["answer"]],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # so that a time-out can end the engine's own children as well
        )
        try:
            return process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


class _ForkServer:
    """engine_child.py --fork-server; one engine at a time."""

    def __init__(self, runner: str) -> None:
        # Any plugin is loaded by the child, not here; see its docstring.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the server)
        self._process = subprocess.Popen(
            [sys.executable, str(CHILD), "--fork-server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=_environment(True, runner, {}),
        )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def run(self, files: Mapping[str, str], environment: Mapping[str, str], timeout_s: float) -> int | None:
        """The exit code, None for a time-out."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = json.dumps({**files, "environment": dict(environment)})
        self._process.stdin.write(order.encode() + b"\n")
        self._process.stdin.flush()
        pid = self._read_number()
        readable, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        if not readable:
            os.killpg(pid, signal.SIGKILL)
        returncode = self._read_number()
        return returncode if readable else None

    def _read_number(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            log = self._log.read().decode(errors="replace")
            raise EngineFailedError("fork server ended", self._process.wait(), log)
        return int(line)

    def close(self) -> None:
        self._process.communicate()  # closes its stdin, at which it ends
        self._log.close()


_fork_servers: dict[str, _ForkServer] = {}


def _fork_server(runner: str) -> _ForkServer:
    server = _fork_servers.get(runner)
    if server is None or not server.is_running:
        server = _fork_servers[runner] = _ForkServer(runner)
        atexit.register(server.close)
    return server
