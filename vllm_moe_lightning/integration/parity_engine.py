"""One engine of `check`, in a process of its own: answers prompts and says what experts it holds.

`python -m vllm_moe_lightning.integration.parity_engine REQUEST ANSWER`. The process of stock vLLM loads nothing of ours
but this file, and no plugin.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

NUM_DUMMY_SWEEPS = 2


def answers_of(
    llm: Any, prompts: list[list[int]], max_tokens: int, with_checksums: bool, is_ours: bool
) -> dict[str, Any]:
    """The fields of parity.EngineAnswers, but for the error, as JSON values."""
    import torch
    from vllm import SamplingParams

    if is_ours:
        llm.collective_rpc("moe_lightning_reset")
        _run_dummy_sweeps(llm)
    started_s = time.monotonic()
    # The best two tokens, to know a tie; and each prompt token's own log-probability.
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    answers: dict[str, Any] = {
        "duration_s": time.monotonic() - started_s,
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "logprobs": [_chosen(output.outputs[0]) for output in outputs],
        "runner_up": [_runner_up(output.outputs[0]) for output in outputs],
        "prompt_logprobs": [_of_prompt(output) for output in outputs],
        "num_threads": torch.get_num_threads(),
        "num_cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
    }
    if is_ours:
        _run_dummy_sweeps(llm)
        answers["stats"] = llm.collective_rpc("moe_lightning_stats")[0]
    if with_checksums:
        answers |= llm.collective_rpc(expert_checksums)[0]
    return answers


def _run_dummy_sweeps(llm: Any) -> None:
    """As vLLM runs when it warms up: without attention, so that nothing but the waits for pages stands between a layer
    and its weights. In other sweeps the wait for hidden states, which come behind the pages, covers those."""
    for _ in range(NUM_DUMMY_SWEEPS):
        llm.collective_rpc("execute_dummy_batch")


def expert_checksums(worker: Any) -> dict[str, Any]:
    """CRC of each expert's part of each expert tensor, where the engine keeps it: in host pages if it is streamed."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    streamed: dict[int, Any] = getattr(worker, "moe_lightning_host_experts", dict)()  # stock vLLM's worker has none
    checksums: dict[str, list[int]] = {}
    num_bytes = 0
    for module in worker.model_runner.get_model().modules():
        if not isinstance(module, RoutedExperts):
            continue
        for name, parameter in module.named_parameters():
            tensor = streamed.get(id(parameter), parameter.data)
            num_bytes += tensor.nbytes
            parts = tensor if tensor.dim() else tensor[None]
            checksums[f"{module.layer_name}.{name}"] = [_checksum(part) for part in parts]
    return {"checksums": checksums, "expert_bytes": num_bytes}


def _checksum(tensor: Any) -> int:
    import torch

    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def _chosen(completion: Any) -> list[float]:
    steps = zip(completion.token_ids, completion.logprobs, strict=True)
    return [entries[token].logprob for token, entries in steps]


def _runner_up(completion: Any) -> list[tuple[int, float]]:
    steps = zip(completion.token_ids, completion.logprobs, strict=True)
    return [
        max(((token, entry.logprob) for token, entry in entries.items() if token != chosen), key=lambda pair: pair[1])
        for chosen, entries in steps
    ]


def _of_prompt(output: Any) -> list[float]:
    entries = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [entry[token].logprob for token, entry in entries]


def main(request_file: str, answer_file: str) -> None:
    sys.excepthook = partial(_tell, Path(answer_file))
    request = json.loads(Path(request_file).read_text())
    from vllm import LLM

    if request["is_dbrx"]:
        from vllm_moe_lightning.integration.dbrx import apply

        apply()  # without it stock vLLM cannot load this architecture
    llm = LLM(**request["engine_args"])
    Path(answer_file).write_text(json.dumps(answers_of(llm, **request["job"])))


def _tell(answer_file: Path, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What ended this process, in place of an answer."""
    answer_file.write_text(json.dumps({"error": reason(kind.__name__, str(error))}))
    sys.__excepthook__(kind, error, trace)


def reason(kind: str, message: str) -> str:
    """In one line, as the verdict is."""
    return f"{kind}: {' '.join(message.split())}"


if __name__ == "__main__":
    main(*sys.argv[1:])
