"""What others would run on the same CPU and model: transformers, accelerate's offload, llama.cpp; a process each.

Each answers a batch of equally long prompts greedily and says how long it took, prefill included. All weights are
bfloat16 and lie in RAM, but for accelerate's disk offload. Packages that are not ours come from folders of their own.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.engine_process import EngineProcess, serve_orders
from benchmarks.job_checkpoint import CheckpointShape

FAILURES = (ImportError, OSError, ValueError, RuntimeError)
TRANSFORMERS, ACCELERATE_CPU, ACCELERATE_DISK = "transformers", "accelerate cpu_offload", "accelerate disk_offload"
LLAMA_CPP = "llama.cpp"
PACKAGES = {
    TRANSFORMERS: (),
    ACCELERATE_CPU: ("accelerate",),
    ACCELERATE_DISK: ("accelerate",),
    LLAMA_CPP: ("llama-cpp-python", "gguf"),
}
"""Beyond ours, by distribution."""
LLAMA_BATCH = 2048  # tokens of one call


@dataclass(frozen=True)
class BatchOrder:
    prompts: tuple[tuple[int, ...], ...]
    gen_len: int


@dataclass(frozen=True)
class BatchRun:
    elapsed_s: float
    answers: tuple[tuple[int, ...], ...]

    @property
    def num_generated(self) -> int:
        return sum(map(len, self.answers))


class BaselineArm(EngineProcess):
    """RuntimeError with the reason where it can't start: a package that is missing, a model that does not load."""

    def __init__(self, name: str, checkpoint: Path, shape: CheckpointShape, packages: Path, max_tokens: int) -> None:
        serve = _serve_llama if name == LLAMA_CPP else _serve_transformers
        threads = str(len(os.sched_getaffinity(0)))
        environment = {"OMP_NUM_THREADS": threads, "TORCHDYNAMO_DISABLE": "0"}
        super().__init__(serve, name, str(checkpoint), shape, str(packages), max_tokens, environment=environment)

    def run(self, prompts: tuple[tuple[int, ...], ...], gen_len: int) -> BatchRun:
        run: BatchRun = self.ask(BatchOrder(prompts, gen_len))
        return run


def _serve_transformers(
    connection: Connection, name: str, checkpoint: str, shape: CheckpointShape, packages: str, max_tokens: int
) -> None:
    import tempfile

    if PACKAGES[name]:
        sys.path.insert(0, packages)  # of this process alone

    import torch

    torch.set_grad_enabled(False)
    try:
        import transformers

        model = transformers.MixtralForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        version = f"transformers {transformers.__version__}"
        if name != TRANSFORMERS:
            import accelerate

            version += f", accelerate {accelerate.__version__}"
            if name == ACCELERATE_CPU:
                accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
            else:
                folder = tempfile.mkdtemp(dir=checkpoint)
                accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))
    except FAILURES as error:
        connection.send(f"{type(error).__name__}: {error}")
        os._exit(1)

    def answer(order: BatchOrder) -> BatchRun:
        tokens = torch.tensor(order.prompts)
        limits = {"max_new_tokens": order.gen_len, "min_new_tokens": order.gen_len}
        started_s = time.monotonic()
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, pad_token_id=0, **limits)
        elapsed_s = time.monotonic() - started_s
        return BatchRun(elapsed_s, tuple(map(tuple, out[:, tokens.shape[1] :].tolist())))

    connection.send({"version": version, "threads": torch.get_num_threads()})
    serve_orders(connection, answer, FAILURES)


def _serve_llama(
    connection: Connection, name: str, checkpoint: str, shape: CheckpointShape, packages: str, max_tokens: int
) -> None:
    """llama.cpp's own decode call on a batch of sequences, as its batched server does."""
    sys.path.insert(0, packages)
    threads = len(os.sched_getaffinity(0))
    try:
        import llama_cpp

        from benchmarks.gguf_model import write_gguf

        path = Path(checkpoint) / "model.gguf"
        write_gguf(Path(checkpoint), shape, path, max_positions=4096)
        silent = llama_cpp.llama_log_callback(lambda *_: None)  # in this frame, so that it lives as long as needed
        llama_cpp.llama_log_set(silent, None)
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not model:
            raise RuntimeError(f"llama.cpp {llama_cpp.__version__} does not load {path.name}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = max_tokens, LLAMA_BATCH, 512
        params.n_seq_max, params.n_threads, params.n_threads_batch = 64, threads, threads
        params.kv_unified = True  # one pool of cells for all sequences
        context = llama_cpp.llama_init_from_model(model, params)
        if not context:
            raise RuntimeError("llama.cpp makes no context for this model")
    except FAILURES as error:
        connection.send(f"{type(error).__name__}: {error}")
        os._exit(1)
    decoder = _LlamaDecoder(llama_cpp, context, shape.vocab)
    connection.send({"version": f"llama-cpp-python {llama_cpp.__version__}", "threads": threads})
    serve_orders(connection, decoder.answer, FAILURES)


class _LlamaDecoder:
    """Greedy decoding of a batch, one sequence id for each prompt."""

    def __init__(self, llama_cpp: Any, context: Any, vocab: int) -> None:
        self._api, self._context, self._vocab = llama_cpp, context, vocab
        self._batch = llama_cpp.llama_batch_init(LLAMA_BATCH, 0, 1)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """rows: (token, position, sequence, wants logits), at most LLAMA_BATCH."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wants_logits) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = wants_logits
        if self._api.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")

    def _best(self, index: int) -> int:
        import numpy as np

        logits = self._api.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab,)).argmax())

    def answer(self, order: BatchOrder) -> BatchRun:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        started_s = time.monotonic()
        length = len(order.prompts[0])
        answers: list[list[int]] = []
        per_call = max(1, LLAMA_BATCH // length)  # prompts
        for first in range(0, len(order.prompts), per_call):
            part = order.prompts[first : first + per_call]
            self._decode(
                [
                    (token, position, first + offset, position == length - 1)
                    for offset, prompt in enumerate(part)
                    for position, token in enumerate(prompt)
                ]
            )
            answers += [[self._best((offset + 1) * length - 1)] for offset in range(len(part))]
        for step in range(order.gen_len - 1):
            self._decode([(answer[-1], length + step, index, True) for index, answer in enumerate(answers)])
            for index, answer in enumerate(answers):
                answer.append(self._best(index))
        elapsed_s = time.monotonic() - started_s
        return BatchRun(elapsed_s, tuple(map(tuple, answers)))
