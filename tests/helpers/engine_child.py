# SPDX-License-Identifier: Apache-2.0
"""The engine process of tests/helpers/engine.py: answers one request, or forks a child for each of many.

`engine_child.py REQUEST ANSWER` runs one engine. `engine_child.py --fork-server` imports vLLM once (5 to 10 s) and then
forks: a child that inherits the imports starts its engine in about one second. It imports no model and nothing of
vllm_moe_lightning, so the order "plugin, worker, model" is that of a fresh process.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "logprobs": 1}
_kept_alive: list[Any] = []


def answer_request(request: dict[str, Any]) -> dict[str, Any]:
    begun = time.monotonic()
    from vllm import LLM

    imported = time.monotonic()
    for name in request["preload"]:
        module, function = name.split(":")
        getattr(importlib.import_module(module), function)()
    llm = LLM(**request["engine_args"])
    started = time.monotonic()
    runner = "v2" if llm.llm_engine.vllm_config.use_v2_model_runner else "v1"
    assert runner == request["runner"], f"asked for runner {request['runner']}, vLLM chose {runner}"
    answer: dict[str, Any] = {
        "runner": runner,
        "import_s": imported - begun,
        "start_s": started - imported,
        "jobs": [_answer_job(llm, job, ask_stats=request["plugin"]) for job in request["jobs"]],
    }
    if request["clean_exit"]:
        llm.llm_engine.engine_core.shutdown()
    else:
        _kept_alive.append(llm)  # else its end, here, would shut the engine down: a second per request
    return answer


def _answer_job(llm: Any, job: dict[str, Any], *, ask_stats: bool) -> dict[str, Any]:
    from vllm import SamplingParams

    rpc_results = [
        llm.collective_rpc(call["method"], args=tuple(call["args"]), kwargs=call["kwargs"]) for call in job["before"]
    ]
    sampling = job["sampling"]
    if isinstance(sampling, dict):
        sampling = [sampling] * len(job["prompts"])
    parameters = [SamplingParams(**{**GREEDY, **changes}) for changes in sampling]
    # A prompt is a list of token ids, or a text.
    prompts = [prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt} for prompt in job["prompts"]]
    begun = time.monotonic()
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    ended = time.monotonic()
    stats = llm.collective_rpc(job["stats"]) if job["stats"] and ask_stats else None
    completions = [output.outputs[0] for output in outputs]
    return {
        "token_ids": [list(completion.token_ids) for completion in completions],
        "logprobs": [_chosen_logprobs(completion) for completion in completions],
        "texts": [completion.text for completion in completions],
        "finish_reasons": [completion.finish_reason for completion in completions],
        "num_cached_tokens": [output.num_cached_tokens for output in outputs],
        "stats": stats,
        "rpc_results": rpc_results,
        "wall_s": ended - begun,
    }


def _chosen_logprobs(completion: Any) -> list[float] | None:
    if completion.logprobs is None:
        return None
    steps = zip(completion.token_ids, completion.logprobs, strict=True)
    return [entries[token].logprob for token, entries in steps]


def _run(request_file: str, answer_file: str) -> None:
    answer = answer_request(json.loads(Path(request_file).read_text()))
    Path(answer_file).write_text(json.dumps(answer))


def _run_in_fork(function: Callable[[], Any]) -> Any:
    """In place of vLLM's `registry._run_in_subprocess`, which inspects the model class in a new Python process.

    That process imports vLLM afresh (10 s for each architecture not yet in vLLM's cache); its point, to leave no trace
    in this process, is met by a fork as well.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, pickle.dumps(function()))  # a few hundred bytes: fits the pipe
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        result = stream.read()
    os.waitpid(pid, 0)
    if not result:
        raise RuntimeError("inspection of the model class failed, see the traceback above")
    return pickle.loads(result)


def _run_forked(order: dict[str, Any]) -> None:
    """In a fresh child of the fork server; never returns."""
    os.setsid()  # so that a time-out can end the engine's own children as well
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(order["environment"])
    tempfile.tempdir = None  # the fork server's choice
    returncode = 0
    try:
        _run(order["request"], order["answer"])
    except BaseException:
        traceback.print_exc()
        returncode = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: the interpreter's own end takes as long as the engine's start. Requests with clean_exit have shut
    # their engine down by now.
    os._exit(returncode)


def _serve_forks() -> None:
    """Orders come as JSON lines on stdin; each is answered by two lines: the child's pid, then its exit code."""
    import vllm.entrypoints.llm
    import vllm.model_executor.models.registry
    import vllm.v1.engine.core
    import vllm.v1.engine.llm_engine
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker

    if os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1":
        import vllm.v1.worker.cpu.model_runner

    vllm.model_executor.models.registry._run_in_subprocess = _run_in_fork
    gc.collect()
    gc.freeze()  # the inherited objects need not be walked by each child's collections
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to stdout; keep that out of the replies
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            replies.close()
            _run_forked(json.loads(line))
        print(pid, file=replies, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=replies, flush=True)


if __name__ == "__main__":
    faulthandler.enable()
    if sys.argv[1:] == ["--fork-server"]:
        _serve_forks()
    else:
        _run(*sys.argv[1:])
