# SPDX-License-Identifier: Apache-2.0
"""Runs examples/serve.sh on a free port, for tests that speak HTTP."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.engine import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 300
END_TIMEOUT_S = 10


@dataclass(frozen=True)
class Server:
    base_url: str
    log_file: Path
    process: subprocess.Popen[bytes]

    def get(self, path: str) -> tuple[int, str]:
        """Status and body."""
        try:
            with urllib.request.urlopen(self.base_url + path, timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def gauge(self, name: str) -> float:
        """Sum of a metric over its labels, from /metrics."""
        lines = [line for line in self.get("/metrics")[1].splitlines() if line.startswith((name + "{", name + " "))]
        assert lines, f"no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve_environment() -> dict[str, str]:
    return {
        **os.environ,
        **{key: value for key, value in ENVIRONMENT.items() if key != "VLLM_ENABLE_V1_MULTIPROCESSING"},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


def serve_command(port: int, *arguments: str) -> list[str]:
    return ["bash", str(ROOT / "examples/serve.sh"), "--host", "127.0.0.1", "--port", str(port), *arguments]


@contextmanager
def serving(log_file: Path, *arguments: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """The server, once /health answers. Raises AssertionError with the end of the log if it does not start."""
    port = _free_port()
    environment = {**serve_environment(), **(env or {})}
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            serve_command(port, *arguments),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", log_file, process)
    try:
        _wait_until_healthy(server)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        with suppress(ProcessLookupError):
            deadline_s = time.monotonic() + END_TIMEOUT_S
            while time.monotonic() < deadline_s:  # the resource tracker, last of all, unlinks shared memory
                os.killpg(process.pid, 0)
                time.sleep(0.1)
            os.killpg(process.pid, signal.SIGKILL)  # engine and worker, should they have stayed


def _wait_until_healthy(server: Server) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if server.process.poll() is not None:
            break
        try:
            if server.get("/health")[0] == 200:
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        time.sleep(0.5)
    raise AssertionError(f"the server did not start:\n{server.log_file.read_text(errors='replace')[-6000:]}")
