"""Writes the trace of the last sweeps whenever somebody asks: by a file beside it, so that no process id is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from vllm.logger import init_logger

from vllm_moe_lightning.pipeline.trace import request_file_of

logger = init_logger("vllm.vllm_moe_lightning.trace")

LOOK_EVERY_S = 0.5


class TraceRequests:
    """Looks for the request until `close`, on a thread of its own: an idle engine answers too."""

    def __init__(self, trace_file: Path, write: Callable[[], object]) -> None:
        self._request = request_file_of(trace_file)
        self._write = write
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look, name="moe_lightning_trace", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._closing.wait(LOOK_EVERY_S):
            if not self._request.exists():
                continue
            try:
                self._write()
                self._request.unlink(missing_ok=True)
            except OSError as error:  # a full disk must not end the engine; the request stays
                logger.error("moe_lightning: the trace asked for by %s cannot be written: %s", self._request, error)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
