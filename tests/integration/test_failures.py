# SPDX-License-Identifier: Apache-2.0
"""Whatever dies, requests end with an error, and nothing stays behind (B32, B33)."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.error
from pathlib import Path

import openai
import pytest

from tests.helpers.engine import EngineFailedError, Job
from tests.helpers.paging import run_paged
from tests.helpers.prompts import standard_prompts
from tests.helpers.server import Server, serve_command, serve_environment, serving

pytestmark = pytest.mark.integration
TWO_RANKS = ("--tensor-parallel-size", "2", "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8")
# A sweep takes some 75 ms: a stream of 500 tokens goes on long after its first one has been seen.
SLOW_LINK = json.dumps({"moe_lightning": {"num_resident_layers": 0, "h2d_gb_per_s": 0.1}})
# B32 asks for 10 s; a busy machine gets some more, far from the five minutes that a rank waits for another.
SOON_S = 30


@pytest.mark.parametrize(
    ("fault", "message"),
    [("error", "a task of stream 'cpu' failed: .*error injected"), ("hang", r"cpu \(\d+ of \d+ done\) runs attention")],
)
def test_a_fault_on_the_attention_thread_ends_the_request_and_is_named(checkpoint, fault, message):
    with pytest.raises(EngineFailedError, match=message):
        run_paged(
            checkpoint("mixtral"),
            [Job(standard_prompts(4))],
            options={"stall_timeout_s": 1.0},
            debug={"fail_attention_at": 30, "attention_fault": fault},
            clean_exit=True,
        )


def processes_of(session: int) -> dict[int, str]:
    """pid -> title, of those that run."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            state, _, _, process_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(process_session) == session and state != "Z":
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def wait_until(condition, what: str) -> None:
    deadline_s = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.1)


def is_healthy(server: Server) -> bool:
    try:
        return server.get("/health")[0] == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def test_when_a_rank_is_killed_requests_fail_and_no_process_or_shared_memory_stays(tmp_path: Path) -> None:
    """B32, at its hardest: the rank that vLLM does not listen to, while the other one waits for it in a collective."""
    shared_memory, folders = set(os.listdir("/dev/shm")), tmp_path / "tmp"
    folders.mkdir()
    environment = {"TMPDIR": str(folders), "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    with serving(tmp_path / "log", *TWO_RANKS, "--additional-config", SLOW_LINK, env=environment) as server:
        client = openai.OpenAI(base_url=server.base_url + "/v1", api_key="none", max_retries=0, timeout=120)
        stream = client.completions.create(
            model="shakespeare", prompt="ROMEO:", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        # By the log: a process title needs room in the environment, which may be small.
        (worker,) = {
            int(pid) for pid in re.findall(r"Worker_TP1 pid=(\d+)", (tmp_path / "log").read_text(errors="replace"))
        }
        os.kill(worker, signal.SIGKILL)
        errors: list[Exception] = []

        def read_on() -> None:
            try:
                list(stream)
            except (openai.APIError, openai.APIConnectionError) as error:
                errors.append(error)

        reader = threading.Thread(target=read_on)
        reader.start()
        reader.join(SOON_S)
        assert errors, "the stream did not end with an error"
        wait_until(lambda: not is_healthy(server), "/health says that all is well")
        wait_until(lambda: server.process.poll() is not None, "the server goes on without its engine")
        wait_until(lambda: not processes_of(server.process.pid), "processes stayed")
    log = (tmp_path / "log").read_text(errors="replace")
    assert f"worker process {worker}, a rank of this engine, has ended" in log
    assert "moe_lightning: the run in figures (device: emulated" in log
    assert not {name for name in os.listdir("/dev/shm") if "cpushm" in name} - shared_memory
    assert not list(folders.glob("moe-lightning-*"))


def test_a_port_that_is_taken_is_named_before_the_model_is_loaded(tmp_path: Path) -> None:
    """B33."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = serve_command(taken.getsockname()[1])
        result = subprocess.run(command, env=serve_environment(), capture_output=True, text=True, timeout=300)
    assert result.returncode != 0
    assert "Address already in use" in result.stderr
    assert "layers streamed" not in result.stdout + result.stderr
