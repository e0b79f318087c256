# SPDX-License-Identifier: Apache-2.0
"""Functions that run inside the engine's process, for what `Job` cannot say: aborts, refusals, raw log-probabilities.

`call("answers_in_detail", prompts=[...])` goes into `Job.before`, and its result into `JobResult.rpc_results`; the
engine needs `preload=[PRELOAD]`. Engine core and worker must live in that one process, as `run_engine` has it.
"""

from __future__ import annotations

import importlib
import random
from typing import Any

from tests.helpers.engine import GREEDY, Job, JobResult, Rpc

PRELOAD = "tests.helpers.engine_call:install"
_PREFIX = "engine_call:"
_MOST_STEPS = 5000  # an engine that never comes to an end


def call(function: str, **kwargs: Any) -> Rpc:
    """`function` takes the LLM first: one of those below, or "module:name"; arguments must be JSON values."""
    return Rpc(_PREFIX + function, kwargs=kwargs)


def calls(*rpcs: Rpc) -> Job:
    """A job without prompts of its own."""
    return Job([], before=rpcs)


def result_of(job: JobResult, index: int = 0) -> Any:
    """What the call at `index` of the job's `before` returned."""
    return job.rpc_results[index][0]


def install() -> None:
    from vllm import LLM

    original = LLM.collective_rpc

    def collective_rpc(self: Any, method: Any, *args: Any, **options: Any) -> list[Any]:
        if isinstance(method, str) and method.startswith(_PREFIX):
            module, _, name = method.removeprefix(_PREFIX).rpartition(":")
            function = getattr(importlib.import_module(module or __name__), name)
            return [function(self, **(options["kwargs"] or {}))]
        return original(self, method, *args, **options)

    LLM.collective_rpc = collective_rpc


def answers_in_detail(llm: Any, prompts: list[Any], sampling: Any = None) -> list[dict[str, Any]]:
    """Tokens, text, and the log-probabilities of each step and prompt token, as [token, log-probability] pairs."""
    sampling = [sampling or {}] * len(prompts) if not isinstance(sampling, list) else sampling
    outputs = llm.generate([_prompt(p) for p in prompts], [_parameters(s) for s in sampling], use_tqdm=False)
    return [_detail(output) for output in outputs]


def try_each(llm: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds each {"prompt", "sampling"} by itself, then runs the engine dry: an answer or {"error"} for each."""
    results: dict[str, dict[str, Any]] = {}
    for index, request in enumerate(requests):
        try:
            _add(llm, str(index), request["prompt"], request.get("sampling"))
        except Exception as error:  # what is refused, and how, is the result
            results[str(index)] = {"error": f"{type(error).__name__}: {error}"}
    results.update(_run_dry(llm))
    return [results[str(index)] for index in range(len(requests))]


def run_steps(llm: Any, requests: list[dict[str, Any]], aborts: list[list[int]] = ()) -> dict[str, Any]:
    """Adds each request before step `at_step` (0 if not given), and before step s aborts request i for [s, i] in
    `aborts`. Returns the answers of those that finished, by index, and the number of steps.
    """
    answers: dict[str, Any] = {}
    waiting = dict(enumerate(requests))
    step = 0
    while waiting or llm.llm_engine.has_unfinished_requests():
        for index in [i for i, request in waiting.items() if request.get("at_step", 0) <= step]:
            request = waiting.pop(index)
            _add(llm, str(index), request["prompt"], request.get("sampling"))
        for when, index in aborts:
            if when == step:
                llm.llm_engine.abort_request([str(index)])
        answers.update(_finished(llm.llm_engine.step()))
        step += 1
        assert step < _MOST_STEPS, "the engine does not come to an end"
    return {"answers": answers, "steps": step}


def abort_after_last_token(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Aborts, twice, a request that has just finished."""
    _add(llm, "0", request["prompt"], request.get("sampling"))
    answers = _run_dry(llm)
    llm.llm_engine.abort_request(["0"])
    llm.llm_engine.abort_request(["0"])
    return answers["0"]


def random_aborts(
    llm: Any, prompts: list[list[int]], count: int, seed: int, max_tokens: int
) -> dict[str, dict[str, Any]]:
    """Keeps the engine full of `prompts`, each under a new name again and again, and aborts a random one of those
    under way at random moments, `count` times in all; then the rest runs dry. Returns answers by "name/prompt"."""
    generator = random.Random(seed)
    under_way: list[str] = []
    answers: dict[str, Any] = {}
    added = aborted = 0
    while aborted < count:
        while len(under_way) < 12:
            index = added % len(prompts)
            name = f"{added}/{index}"
            _add(llm, name, prompts[index], {"max_tokens": max_tokens})
            under_way.append(name)
            added += 1
        for _ in range(generator.choice((0, 0, 0, 0, 1, 2, 5))):
            if under_way and aborted < count:
                name = under_way.pop(generator.randrange(len(under_way)))
                llm.llm_engine.abort_request([name])
                aborted += 1
        finished = _finished(llm.llm_engine.step())
        answers.update(finished)
        under_way = [name for name in under_way if name not in finished]
    answers.update(_run_dry(llm))
    return answers


def occupancy(llm: Any) -> dict[str, int]:
    """Blocks and requests as the scheduler counts them."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return {
        "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "requests": len(scheduler.requests),
    }


def kv_bytes_per_token(llm: Any) -> dict[str, int]:
    """As vLLM plans it, and as the tensors that the attention layers hold."""
    core = llm.llm_engine.engine_core.engine_core
    config = core.scheduler.kv_cache_config
    block_size = llm.llm_engine.vllm_config.cache_config.block_size
    planned = sum(tensor.size for tensor in config.kv_cache_tensors)
    runner = core.model_executor.driver_worker.worker.model_runner
    layers = runner.compilation_config.static_forward_context.values()
    held = sum(layer.kv_cache.nbytes for layer in layers if hasattr(layer, "kv_cache"))
    return {
        "planned": planned // (config.num_blocks * block_size),
        "held": held // (config.num_blocks * block_size),
    }


def forget_prefixes(llm: Any) -> bool:
    """Empties the prefix cache: the next job computes all of its prompts."""
    return llm.reset_prefix_cache()


def use_threads(llm: Any, count: int) -> int:
    """OpenMP threads from here on; vLLM's CPU worker has put a stub in place of torch.set_num_threads."""
    import torch

    torch._C.set_num_threads(count)
    return torch.get_num_threads()


def _prompt(prompt: Any) -> Any:
    return prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}


def _parameters(sampling: dict[str, Any] | None) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{**GREEDY, **(sampling or {})})


def _add(llm: Any, name: str, prompt: Any, sampling: dict[str, Any] | None) -> None:
    llm.llm_engine.add_request(name, _prompt(prompt), _parameters(sampling))


def _run_dry(llm: Any) -> dict[str, dict[str, Any]]:
    answers: dict[str, dict[str, Any]] = {}
    for _ in range(_MOST_STEPS):
        if not llm.llm_engine.has_unfinished_requests():
            return answers
        answers.update(_finished(llm.llm_engine.step()))
    raise AssertionError("the engine does not come to an end")


def _finished(outputs: list[Any]) -> dict[str, dict[str, Any]]:
    return {output.request_id: _detail(output) for output in outputs if output.finished}


def _detail(output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    prompt_logprobs = getattr(output, "prompt_logprobs", None)
    return {
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_cached_tokens": output.num_cached_tokens,
        "logprobs": None if completion.logprobs is None else [_pairs(entry) for entry in completion.logprobs],
        "prompt_logprobs": None
        if prompt_logprobs is None
        else [None if entry is None else _pairs(entry) for entry in prompt_logprobs],
    }


def _pairs(entry: Any) -> list[list[Any]]:
    """By token, so that two runs can be compared entry by entry."""
    return [[token, value.logprob] for token, value in sorted(entry.items())]
