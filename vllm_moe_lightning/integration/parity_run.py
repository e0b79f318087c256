"""`check`: stock vLLM and our engine answer the same prompts, one after the other, at a size that fits this machine.

Decides that size, the prompts and the settings, which are the same for both; parity.py judges the answers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform

from vllm_moe_lightning.checkpoint_view import StoredModel
from vllm_moe_lightning.config import OPTIONS_KEY, parse_options
from vllm_moe_lightning.errors import MoeLightningError, UnsupportedError
from vllm_moe_lightning.host_limits import available_memory_bytes
from vllm_moe_lightning.integration.bulk_run import read_prompts
from vllm_moe_lightning.integration.configure import needs_plain_experts
from vllm_moe_lightning.integration.parity_prompts import PROMPTS
from vllm_moe_lightning.integration.register import WORKER_CLS
from vllm_moe_lightning.model_config import DTYPE_BYTES, FAMILIES, read_model_spec
from vllm_moe_lightning.parity import CheckReport, EngineAnswers, Streaming, distances_from, judge

MIB, GIB = 1 << 20, 1 << 30
ENGINE_MODULE = "vllm_moe_lightning.integration.parity_engine"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and worker in one process, whose last words are the reason
    # With log-probabilities vLLM's sampler compiles a rank count, for seconds, and here it is called a few times.
    "TORCHDYNAMO_DISABLE": "1",
}
PROCESS_BYTES = 2 * GIB
"""Of Python, torch and vLLM without a model."""
WEIGHTS_FACTOR = 1.5
"""Peak memory of an engine over its weights: a layer is there twice while it is packed, and file pages want room."""
MAX_PROMPTS, MAX_PROMPT_TOKENS = 16, 512
PAGES_PER_LAYER = 8
KV_BLOCK_TOKENS = 128
SMALLEST_KV_BYTES, UNKNOWN_KV_BYTES = 64 * MIB, GIB
LOG_TAIL_CHARS = 500
ZERO_PAGE = "zero_page"
RACE_SWITCHES = {"copy_timing": "lazy", "poison": True, "check_hazards": True}


@dataclass(frozen=True)
class CheckRequest:
    model: Path
    prompts_file: Path | None = None
    num_layers: int | None = None
    """None: as many as fit."""
    max_tokens: int = 16
    dtype: str = "float32"
    """float32 or bfloat16."""
    num_micro_batches: int = 3
    plant: str | None = None
    """A fault of our engine, to see that it is found: ZERO_PAGE, or the name of a wait that is left out."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of our engine, beside those that the check sets."""


@dataclass(frozen=True)
class EngineJob:
    """One run of one engine."""

    engine_args: Mapping[str, Any]
    is_ours: bool
    prompts: Sequence[Sequence[int]]
    max_tokens: int
    with_checksums: bool
    is_dbrx: bool


def run_in_process(job: EngineJob) -> EngineAnswers:
    """In a Python process of its own, so that its memory is free again for the next."""
    environment = {**os.environ, **{key: os.environ.get(key, value) for key, value in ENVIRONMENT.items()}}
    if not job.is_ours:
        environment["VLLM_PLUGINS"] = ""  # stock means stock
    with tempfile.TemporaryDirectory(prefix="moe-lightning-check-") as scratch:
        request, answer, log = (Path(scratch) / name for name in ("request.json", "answer.json", "log"))
        request.write_text(json.dumps(request_of(job)))
        with log.open("wb") as output:
            command = [sys.executable, "-m", ENGINE_MODULE, str(request), str(answer)]
            returncode = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
            ).returncode
        if not answer.exists():
            return EngineAnswers(error=_reason_of_end(returncode, log.read_text(errors="replace")))
        return EngineAnswers(**json.loads(answer.read_text()))


def request_of(job: EngineJob) -> dict[str, Any]:
    """What parity_engine reads."""
    return {
        "engine_args": dict(job.engine_args),
        "is_dbrx": job.is_dbrx,
        "job": {
            "prompts": [list(prompt) for prompt in job.prompts],
            "max_tokens": job.max_tokens,
            "with_checksums": job.with_checksums,
            "is_ours": job.is_ours,
        },
    }


def _reason_of_end(returncode: int, log: str) -> str:
    """Of a process that could not say it itself."""
    if returncode < 0:
        return f"killed by signal {-returncode} (9: out of memory, most likely; check fewer --layers)"
    return f"ended with code {returncode}: {' '.join(log[-LOG_TAIL_CHARS:].split())}"


def check(
    request: CheckRequest,
    scratch: Path,
    run: Callable[[EngineJob], EngineAnswers] = run_in_process,
    progress: Callable[[str], None] = lambda what: None,
) -> CheckReport:
    """`scratch`: an empty folder, for the first layers of a model that does not fit as a whole.

    Raises ValueError for wrong input, UnsupportedError or MoeLightningError for what cannot be checked here.
    """
    stored = StoredModel(request.model)
    if stored.config.get("quantization_config"):
        raise UnsupportedError(
            f"{request.model} is quantised, and check compares with float32 weights only; check the plain checkpoint"
        )
    width = DTYPE_BYTES[request.dtype] / stored.element_bytes
    num_layers = request.num_layers or layers_that_fit(stored, width, available_memory_bytes())
    model = request.model
    if num_layers != stored.num_layers:
        progress(f"taking the first {num_layers} of {stored.num_layers} layers")
        model = stored.write_first_layers(num_layers, scratch / request.model.name)
    prompts = _tokens_of(request, stored.config)
    engine_args = _engine_args(request, model, prompts, width)
    is_dbrx = stored.config.get("model_type") == "dbrx"

    def job(is_ours: bool) -> EngineJob:
        more = {"worker_cls": WORKER_CLS, "additional_config": {OPTIONS_KEY: options}} if is_ours else {}
        return EngineJob({**engine_args, **more}, is_ours, prompts, request.max_tokens, True, is_dbrx)

    options = _options(request, stored, num_layers, width)
    progress("stock vLLM answers")
    stock = run(job(is_ours=False))
    progress("our engine answers, with late copies, poisoned buffers and the hazard checker")
    ours = run(job(is_ours=True)) if stock.error is None else EngineAnswers(error="not run, for stock vLLM failed")
    distances = None
    if request.dtype != "float32" and stock.error is None and ours.error is None:
        progress("stock vLLM in float32, to measure both against")
        float32 = _float32_of(engine_args, prompts, [stock, ours], is_dbrx, run)
        lens = [len(prompt) for prompt in prompts]
        distances = (
            distances_from(float32[0], stock, lens),
            distances_from(float32[1], ours, lens),
        )
    settings = {
        "model": str(request.model),
        "layers": num_layers,
        "layers_of_model": stored.num_layers,
        "dtype": request.dtype,
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "max_tokens": request.max_tokens,
        "max_num_seqs": engine_args["max_num_seqs"],
        "prefix_caching": False,
        "planted": request.plant,
        "our_options": options,
    }
    return CheckReport(judge(stock, ours, distances, streaming_of(request.options)), settings, stock, ours)


def layers_that_fit(stored: StoredModel, width: float, available_bytes: int) -> int:
    """`width`: bytes of an element as it is loaded, over those in the files. Raises MoeLightningError for none."""

    def need(num_layers: int) -> float:
        return PROCESS_BYTES + WEIGHTS_FACTOR * width * stored.num_bytes(num_layers)

    fitting = [count for count in range(1, stored.num_layers + 1) if need(count) <= available_bytes]
    if not fitting:
        raise MoeLightningError(
            f"one layer of {stored.folder} takes {need(1) / GIB:.1f} GiB to check, and {available_bytes / GIB:.1f} GiB "
            "of memory are available; free some, or give --dtype bfloat16"
        )
    return fitting[-1]


def _tokens_of(request: CheckRequest, config: Mapping[str, Any]) -> list[list[int]]:
    from transformers import AutoTokenizer

    texts = PROMPTS if request.prompts_file is None else read_prompts(request.prompts_file)
    tokenizer = AutoTokenizer.from_pretrained(request.model)
    longest = next((int(config[k]) for k in ("max_position_embeddings", "max_seq_len") if config.get(k)), 1 << 30)
    room = min(MAX_PROMPT_TOKENS, longest - request.max_tokens - 1)
    if room < 1:
        raise ValueError(f"--tokens {request.max_tokens} leaves no room for a prompt in the model's {longest} tokens")
    return [tokenizer.encode(text)[:room] for text in texts[:MAX_PROMPTS]]


def _engine_args(request: CheckRequest, model: Path, prompts: Sequence[Sequence[int]], width: float) -> dict[str, Any]:
    lens = [len(prompt) + request.max_tokens for prompt in prompts]
    kv_tokens = sum(-(-n // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS for n in lens) + KV_BLOCK_TOKENS
    is_known = json.loads((model / "config.json").read_text()).get("model_type") in FAMILIES
    kv_bytes = int(kv_tokens * read_model_spec(model).kv_bytes_per_token * width) if is_known else UNKNOWN_KV_BYTES
    return {
        "model": str(model),
        "dtype": request.dtype,
        "enforce_eager": True,
        "max_model_len": max(lens) + 1,
        "kv_cache_memory_bytes": max(SMALLEST_KV_BYTES, kv_bytes),
        "max_num_seqs": len(prompts),
        "enable_prefix_caching": False,
        "seed": 0,
        "disable_log_stats": True,
    }


def _options(request: CheckRequest, stored: StoredModel, num_layers: int, width: float) -> dict[str, Any]:
    """Of our engine: every layer streams, in several pages, and whatever is late or unordered shows."""
    debug: dict[str, Any] = dict(RACE_SWITCHES)
    if request.plant == ZERO_PAGE:
        debug["zero_page"] = [num_layers - 1, 0]
    elif request.plant is not None:
        debug["remove_wait"] = request.plant
    options = {"planner": "off", "num_micro_batches": request.num_micro_batches, "debug": debug}
    if own := sorted(set(request.options) & set(options)):
        raise ValueError(f"--option: {', '.join(own)} is set by check itself; drop it, or use check's own options")
    if layer_bytes := stored.expert_bytes(num_layers - 1) * width:
        options["page_mib"] = min(64.0, max(4096.0, layer_bytes / PAGES_PER_LAYER) / MIB)
    options |= request.options
    parse_options(options)
    return options


def streaming_of(options: Mapping[str, Any]) -> Streaming:
    """What to expect on the link, and of the experts' bytes, under such options."""
    parsed = parse_options({**options, "planner": "off"})
    is_whole = parsed.experts == "device" and not parsed.num_resident_layers
    is_unpacked = current_platform.is_cpu() and needs_plain_experts(parsed)
    return Streaming(is_whole=is_whole, is_idle=parsed.experts == "cpu", is_packed=not is_unpacked)


def _float32_of(
    engine_args: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    runs: Sequence[EngineAnswers],
    is_dbrx: bool,
    run: Callable[[EngineJob], EngineAnswers],
) -> list[EngineAnswers]:
    """For each of `runs`: what stock vLLM in float32 makes of its prompts and answers, as prompts. One engine."""
    sequences = [[*prompt, *answer] for one in runs for prompt, answer in zip(prompts, one.token_ids, strict=True)]
    args = {
        **engine_args,
        "dtype": "float32",
        "max_model_len": max(map(len, sequences)) + 2,
        "kv_cache_memory_bytes": 2 * engine_args["kv_cache_memory_bytes"],
    }
    answers = run(EngineJob(args, False, sequences, 1, False, is_dbrx))
    if answers.error is not None:
        raise MoeLightningError(f"stock vLLM in float32, to measure against, failed: {answers.error}")
    count = len(prompts)
    return [
        EngineAnswers(prompt_logprobs=answers.prompt_logprobs[index * count : (index + 1) * count])
        for index in range(len(runs))
    ]
