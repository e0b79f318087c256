"""An engine in a process of its own that answers orders: what the benchmarks' several engines have in common.

Several are alive at once and take turns, so that the machine's other load meets them alike.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine core and worker in this very process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # the emulated device computes on one thread; attention and copies have others
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",  # each start warns of the tokenizer that there is not
}
PRELOADED = ["vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"]
SHUTDOWN_S = 20.0


class EngineProcess:
    """Runs `serve(connection, *arguments)`, which sends one answer when the engine is there and one for each order;
    a string instead of an answer is the sentence of a failure, raised here as RuntimeError.

    `environment`: None for a process forked from a server that has imported vLLM's CPU build once; otherwise a new
    interpreter with these variables.
    """

    def __init__(
        self,
        serve: Callable[..., None],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        os.environ.update(ENVIRONMENT)
        if environment is None:
            context: Any = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(PRELOADED)
        else:
            context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
        before = dict(os.environ)
        os.environ.update(environment or {})
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        theirs.close()
        try:
            self.started = self._answer()
        except RuntimeError:
            self.close()
            raise

    def ask(self, order: Any) -> Any:
        self._connection.send(order)
        return self._answer()

    def _answer(self) -> Any:
        try:
            answer = self._connection.recv()
        except EOFError:
            raise RuntimeError(f"the engine process ended (exit code {self._process.exitcode})") from None
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def close(self) -> None:
        self._connection.close()
        self._process.join(SHUTDOWN_S)
        if self._process.is_alive():
            self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve_orders(connection: Connection, answer: Callable[[Any], Any], failures: tuple[type[Exception], ...]) -> None:
    """In the engine's process: until the other side hangs up, when the process ends."""
    while True:
        try:
            order = connection.recv()
        except EOFError:
            os._exit(0)  # the engine's own shutdown takes a second and frees nothing that ends with us
        try:
            connection.send(answer(order))
        except failures as error:
            connection.send(f"{type(error).__name__}: {error}")
