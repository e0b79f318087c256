# SPDX-License-Identifier: Apache-2.0
"""The independent oracle: transformers, greedy, eager attention, one prompt at a time (so no padding can matter).

Also gives what makes an exact comparison fair or not: the gap between the best two logits at every step, and how many
different tokens an answer has.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class OracleResult:
    token_ids: list[list[int]]
    logprobs: list[list[float]]  # of the chosen tokens
    gaps: list[list[float]]  # best logit minus second best, per step
    expert_counts: list[list[int]]  # [num_layers][num_experts]: tokens routed to each expert

    @property
    def smallest_gap(self) -> float:
        return min(min(gaps) for gaps in self.gaps)

    @property
    def fewest_distinct_tokens(self) -> int:
        return min(len(set(tokens)) for tokens in self.token_ids)


@torch.inference_mode()
def greedy(
    model_folder: Path | str,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 24,
    dtype: torch.dtype = torch.float32,
) -> OracleResult:
    """Continues each prompt by exactly `max_tokens` tokens; an end-of-sequence token does not stop it."""
    model = _load(model_folder, dtype)
    router_outputs = _RouterCounts(model)
    token_ids, logprobs, gaps = [], [], []
    for prompt in prompts:
        answer, answer_logprobs, answer_gaps = _continue(model, prompt, max_tokens)
        token_ids.append(answer)
        logprobs.append(answer_logprobs)
        gaps.append(answer_gaps)
    result = OracleResult(token_ids, logprobs, gaps, router_outputs.counts())
    del model, router_outputs
    gc.collect()
    return result


def _load(model_folder: Path | str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    # "eager" experts loop over the experts with plain matmuls: no grouped kernel that could share a bug with vLLM's.
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager", local_files_only=True
    )
    return model.eval()


def _continue(model: Any, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], list[float], list[float]]:
    token_ids: list[int] = []
    logprobs: list[float] = []
    gaps: list[float] = []
    inputs = torch.tensor([list(prompt)])  # [1, num_tokens]
    cache = None
    for _ in range(max_tokens):
        output = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        logits = output.logits[0, -1].float()  # [vocab_size]
        best_two = logits.topk(2)
        token = int(best_two.indices[0])
        token_ids.append(token)
        logprobs.append(float(logits.log_softmax(dim=-1)[token]))
        gaps.append(float(best_two.values[0] - best_two.values[1]))
        inputs = torch.tensor([[token]])
    return token_ids, logprobs, gaps


class _RouterCounts:
    """Counts, through forward hooks, how many tokens each layer's experts module gave to each expert."""

    def __init__(self, model: Any) -> None:
        self._counts: list[torch.Tensor] = []
        config = model.config
        num_experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
        if num_experts is None:
            num_experts = config.ffn_config.moe_num_experts
        experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
        for module in experts:
            count = torch.zeros(num_experts, dtype=torch.int64)
            self._counts.append(count)
            module.register_forward_pre_hook(self._hook(count), with_kwargs=True)

    @staticmethod
    def _hook(count: torch.Tensor) -> Any:
        def add(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            top_k_index = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]  # [num_tokens, top_k]
            count.add_(torch.bincount(top_k_index.flatten(), minlength=count.numel()))

        return add

    def counts(self) -> list[list[int]]:
        return [count.tolist() for count in self._counts]
