# SPDX-License-Identifier: Apache-2.0
"""Drives a scheduler of its own, step by step, inside an engine's process: no model runs, tokens are made up.

For `tests.helpers.engine_call.call`. What a step did to each request comes back, so that bounds can be checked on the
real classes for thousands of steps.
"""

from __future__ import annotations

import copy
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

from vllm_moe_lightning.integration.exposition import DIRECTORY_KEY, NODE_KEY
from vllm_moe_lightning.integration.metrics_file import read_metrics
from vllm_moe_lightning.integration.peers import node_identity

STOP_TOKEN = 7
_MOST_STEPS = 20_000


def drive(
    llm: Any,
    requests: list[dict[str, Any]],
    *,
    scheduler: str = "MoELightningScheduler",
    num_blocks: int = 10_000,
    max_model_len: int = 4096,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 64,
    options: dict[str, Any] | None = None,
    plan: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    enable_prefix_caching: bool = False,
) -> dict[str, Any]:
    """Requests: {"prompt": tokens or how many, "max_tokens", "length": tokens after which it stops (max_tokens),
    "at_step", "abort_at", "priority"}. `scheduler`: of ours, or "stock"; the asynchronous one is driven one step ahead,
    as the engine does. `config`: further attributes of SchedulerConfig.

    Returns, per step, what each request was given and who had a token to decode but was given none; per request, the
    step of its first token and of its end; preemptions; blocks before and after; and what was published.
    """
    metrics = Path(tempfile.mkdtemp(prefix="scheduler-metrics-"))
    made = _make_scheduler(
        llm,
        scheduler,
        num_blocks,
        max_model_len,
        {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens, **(config or {})},
        {
            "moe_lightning": options or {},
            **({"moe_lightning_plan": plan} if plan else {}),
            DIRECTORY_KEY: str(metrics),
            NODE_KEY: node_identity(),
        },
        enable_prefix_caching,
    )
    pool = made.kv_cache_manager.block_pool
    free_before = pool.get_num_free_blocks()
    depth = 2 if scheduler.startswith("Async") else 1
    to_come = dict(enumerate(requests))
    in_flight: deque[Any] = deque()
    steps: list[dict[str, Any]] = []
    first_token: dict[str, int] = {}
    ended: dict[str, int] = {}
    while to_come or made.has_unfinished_requests() or in_flight:
        now = len(steps)
        for index in [i for i, request in to_come.items() if request.get("at_step", 0) <= now]:
            made.add_request(_request(llm, index, to_come.pop(index)))
        for index, request in enumerate(requests):
            if request.get("abort_at") == now:
                from vllm.v1.request import RequestStatus

                made.finish_requests(str(index), RequestStatus.FINISHED_ABORTED)
        due = {request.request_id for request in made.running if _has_token_to_decode(request)}
        output = made.schedule()
        given = dict(output.num_scheduled_tokens)
        waiting = [request.request_id for request in made.waiting]
        steps.append(
            {
                "tokens": given,
                "starved": sorted(due - given.keys()),
                "waiting": len(waiting),
                "running": len(made.running),
                "preempted": len(output.preempted_req_ids or ()),
                "free_blocks": pool.get_num_free_blocks(),
            }
        )
        if given:
            in_flight.append((output, {name for name in given if not made.requests[name].is_prefill_chunk}))
        while in_flight and (len(in_flight) >= depth or not given):
            _take_output(made, requests, *in_flight.popleft(), now, first_token, ended)
        assert now < _MOST_STEPS, "the scheduler does not come to an end"
    busy = read_metrics(metrics)
    made.schedule()  # as the engine does before it is idle, to tell the workers which requests have ended
    idle = read_metrics(metrics)
    made.shutdown()
    assert read_metrics(metrics) == {}
    return {
        # By name and label. Gauges as of the last step with work, and after it.
        "metrics": {" ".join(key): value for key, value in busy.items()},
        "idle_metrics": {" ".join(key): value for key, value in idle.items()},
        "steps": steps,
        "first_token": first_token,
        "ended": ended,
        "preemptions": sum(step["preempted"] for step in steps),
        "free_before": free_before,
        "free_after": pool.get_num_free_blocks(),
        "bases": [base.__name__ for base in type(made).__mro__],
    }


def _has_token_to_decode(request: Any) -> bool:
    """Not one whose last token is being computed, in asynchronous scheduling."""
    to_come = request.num_prompt_tokens + request.max_tokens - request.num_tokens - request.num_output_placeholders
    return not request.is_prefill_chunk and to_come > 0


def _make_scheduler(
    llm: Any,
    name: str,
    num_blocks: int,
    max_model_len: int,
    limits: dict[str, Any],
    additional: dict[str, Any],
    enable_prefix_caching: bool,
) -> Any:
    from vllm.v1.core.sched.scheduler import Scheduler

    import vllm_moe_lightning.integration.scheduler as ours

    engine = llm.llm_engine.engine_core.engine_core
    vllm_config = copy.deepcopy(engine.vllm_config)
    vllm_config.additional_config = additional
    vllm_config.model_config.max_model_len = max_model_len
    vllm_config.cache_config.num_gpu_blocks = num_blocks
    vllm_config.cache_config.enable_prefix_caching = enable_prefix_caching
    for key, value in limits.items():
        setattr(vllm_config.scheduler_config, key, value)
    kv_cache_config = copy.deepcopy(engine.scheduler.kv_cache_config)
    kv_cache_config.num_blocks = num_blocks
    return (Scheduler if name == "stock" else getattr(ours, name))(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=engine.structured_output_manager,
        block_size=engine.scheduler.block_size,
        log_stats=True,
    )


def _request(llm: Any, index: int, request: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    prompt = request["prompt"]
    tokens = list(prompt) if isinstance(prompt, list) else [10 + (index * 31 + i) % 200 for i in range(prompt)]
    parameters = SamplingParams(max_tokens=request.get("max_tokens", 8), stop_token_ids=[STOP_TOKEN])
    block_size = llm.llm_engine.engine_core.engine_core.scheduler.block_size
    return Request(
        request_id=str(index),
        prompt_token_ids=tokens,
        sampling_params=parameters,
        pooling_params=None,
        priority=request.get("priority", 0),
        arrival_time=float(index),
        block_hasher=get_request_block_hasher(block_size, sha256),
    )


def _take_output(
    made: Any,
    requests: list[dict[str, Any]],
    output: Any,
    sampling: set[str],
    now: int,
    first_token: dict[str, int],
    ended: dict[str, int],
) -> None:
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(output.num_scheduled_tokens)
    sampled = []
    for name in names:
        request = made.requests.get(name)
        if name not in sampling or request is None:
            sampled.append([])
            continue
        asked = requests[int(name)]
        length = asked.get("length", asked.get("max_tokens", 8))
        sampled.append([STOP_TOKEN if request.num_output_tokens + 1 == length else 3])
    made.update_from_output(
        output,
        ModelRunnerOutput(
            req_ids=names, req_id_to_index={n: i for i, n in enumerate(names)}, sampled_token_ids=sampled
        ),
    )
    for name, tokens in zip(names, sampled, strict=True):
        if tokens:
            first_token.setdefault(name, now)
        if name not in made.requests:
            ended.setdefault(name, now)
