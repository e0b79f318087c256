# SPDX-License-Identifier: Apache-2.0
"""Runs streams of requests inside an engine's process: several answers each, priorities, aborts; and the long soak.

For `tests.helpers.engine_call.call`. Engine core and worker live in that process, so that what is left over afterwards
can be counted.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MOST_STEPS = 200_000
PAGE_BYTES = 4096


def run_stream(llm: Any, requests: list[dict[str, Any]], aborts: list[list[int]] = ()) -> dict[str, Any]:
    """Requests: {"prompt", "sampling", "at_step", "priority"}; [s, i] in `aborts`: request i is aborted before step s.

    Returns the token ids of each answer by request, most sequences in a step, preemptions, and the steps it took.
    """
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempted_before = _preemptions(scheduler)
    to_come = dict(enumerate(requests))
    answers: dict[str, list[list[int]]] = {}
    finished_at: dict[str, int] = {}
    step = most_running = 0
    while to_come or llm.llm_engine.has_unfinished_requests():
        for index in [i for i, request in to_come.items() if request.get("at_step", 0) <= step]:
            add(llm, str(index), to_come.pop(index))
        for when, index in aborts:
            if when == step:
                llm.llm_engine.abort_request([str(index)])
        for name, answer in _step(llm):
            answers[name] = answer
            finished_at[name] = step
        most_running = max(most_running, len(scheduler.running))
        step += 1
        assert step < _MOST_STEPS, "the engine does not come to an end"
    return {
        "answers": answers,
        "finished_at": finished_at,
        "most_running": most_running,
        "preemptions": _preemptions(scheduler) - preempted_before,
        "steps": step,
    }


def beam_search(llm: Any, prompts: list[list[int]], width: int, max_tokens: int) -> list[list[list[int]]]:
    from vllm.sampling_params import BeamSearchParams

    outputs = llm.beam_search(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True),
    )
    return [[list(sequence.tokens) for sequence in output.sequences] for output in outputs]


def idle_state(llm: Any) -> dict[str, Any]:
    """What must be as it was once nothing runs: blocks, requests here and in the worker, slots and micro-batches."""
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    executor = worker._runtime.executor
    llm.llm_engine.step()  # the worker hears of the last ended requests with the next step
    worker._runtime.device.synchronize()
    return {
        "free_blocks": core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "running": len(core.scheduler.running),
        "waiting": len(core.scheduler.waiting),
        "requests": len(core.scheduler.requests),
        "front_end_requests": llm.llm_engine.output_processor.get_num_unfinished_requests(),
        "in_sweep": executor.in_sweep,
        "layers_on_their_way": executor.ring.num_prefetched,
        "coroutines": len(executor._coroutines),
        "aborted_sweeps": executor.counters.aborted_sweeps,
    }


def keep_few_compiled_kernels() -> None:
    """For `preload`. oneDNN keeps the compiled kernels of 1024 shapes, and so grows by 100 MiB over thousands of steps
    of ever new sizes, in stock vLLM as well; without that, what grows is ours."""
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "8"


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def soak(
    llm: Any, prompts: list[list[int]], *, num_requests: int, seed: int, max_tokens: int, under_way: int
) -> dict[str, Any]:
    """Random requests, `under_way` at a time, some of them aborted, against the same requests run alone before.

    Kinds: greedy, seeded sampling, and 2 or 3 answers with a seed. Returns what differed, and figures.
    """
    generator = random.Random(seed)
    alone = _solo_answers(llm, prompts, max_tokens)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    before, preempted_before = idle_state(llm), _preemptions(scheduler)
    arrivals = _random_requests(generator, len(prompts), max_tokens)
    running: dict[str, tuple[int, dict[str, Any]]] = {}
    differing: list[str] = []
    resident: list[tuple[int, int]] = []  # (requests ended, bytes)
    steps = added = finished = aborted = most_running = answers = 0
    while finished + aborted < num_requests:
        while len(running) < under_way and added < num_requests:
            index, sampling = next(arrivals)
            name = str(added)
            add(llm, name, {"prompt": prompts[index], "sampling": sampling})
            running[name] = (index, sampling)
            added += 1
        if running and generator.random() < 0.04:
            name = generator.choice(sorted(running))
            llm.llm_engine.abort_request([name])
            del running[name]
            aborted += 1
        for name, answer in _step(llm):
            index, sampling = running.pop(name)
            answers += len(answer)
            expected = [a[: sampling["max_tokens"]] for a in alone[index, sampling.get("seed")][: sampling.get("n", 1)]]
            if answer != expected:
                differing.append(f"request {name}: prompt {index}, {sampling}: {answer} is not {expected}")
            finished += 1
        most_running = max(most_running, len(scheduler.running))
        steps += 1
        if steps % 50 == 0:
            resident.append((finished + aborted, resident_bytes()))
    resident.append((finished + aborted, resident_bytes()))
    return {
        "finished": finished,
        "aborted": aborted,
        "answers": answers,
        "differing": differing[:5],
        "num_differing": len(differing),
        "preemptions": _preemptions(scheduler) - preempted_before,
        "most_running": most_running,
        "steps": steps,
        "resident": resident,
        "before": before,
        "after": idle_state(llm),
    }


def _random_requests(
    generator: random.Random, num_prompts: int, max_tokens: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    while True:
        sampling: dict[str, Any] = {"max_tokens": generator.randint(1, max_tokens), "logprobs": None}
        kind = generator.choice(("greedy", "greedy", "seeded", "several"))
        if kind != "greedy":
            sampling |= {"temperature": 0.8, "seed": 3, "n": generator.choice((2, 3)) if kind == "several" else 1}
        yield generator.randrange(num_prompts), sampling


def _solo_answers(llm: Any, prompts: list[list[int]], max_tokens: int) -> dict[tuple[int, int | None], list[list[int]]]:
    """Each prompt by itself: greedy under (index, None), three seeded answers, one after another, under (index, 3)."""
    answers: dict[tuple[int, int | None], list[list[int]]] = {}
    for index, prompt in enumerate(prompts):
        answers[index, None] = _alone(llm, prompt, {"max_tokens": max_tokens, "logprobs": None})
        answers[index, 3] = [
            _alone(llm, prompt, {"max_tokens": max_tokens, "logprobs": None, "temperature": 0.8, "seed": 3 + child})[0]
            for child in range(3)  # vLLM seeds the answers of one request that way
        ]
        llm.reset_prefix_cache()
    return answers


def _alone(llm: Any, prompt: list[int], sampling: dict[str, Any]) -> list[list[int]]:
    add(llm, "alone", {"prompt": prompt, "sampling": sampling})
    while True:
        for _, answer in _step(llm):
            return answer


def add(llm: Any, name: str, request: dict[str, Any]) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    from tests.helpers.engine import GREEDY

    sampling = {**GREEDY, **request.get("sampling", {})}
    if "structured_outputs" in sampling:
        sampling["structured_outputs"] = StructuredOutputsParams(**sampling["structured_outputs"])
    if "logit_bias" in sampling:  # JSON has no numbers as keys
        sampling["logit_bias"] = {int(token): bias for token, bias in sampling["logit_bias"].items()}
    parameters = SamplingParams(
        **sampling,
        output_kind=RequestOutputKind.FINAL_ONLY,  # all answers of a request come together
    )
    prompt = {"prompt_token_ids": request["prompt"]}
    llm.llm_engine.add_request(name, prompt, parameters, priority=request.get("priority", 0))


def _step(llm: Any) -> list[tuple[str, list[list[int]]]]:
    """(name, token ids of its answers) of the requests that ended in this step."""
    ended = [output for output in llm.llm_engine.step() if output.finished]
    return [
        (output.request_id, [list(c.token_ids) for c in sorted(output.outputs, key=lambda c: c.index)])
        for output in ended
    ]


def _preemptions(scheduler: Any) -> int:
    return int(getattr(scheduler, "num_preemptions", 0))  # stock counts them elsewhere
