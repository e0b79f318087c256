# SPDX-License-Identifier: Apache-2.0
"""The independent oracle: transformers, greedy, eager attention, one prompt at a time (so no padding can matter).

Also gives what makes an exact comparison fair or not: the gap between the best two logits at every step, the gap
between the last expert chosen and the next one (a near tie there swaps experts, which is no rounding error any more),
and how many different tokens an answer has.
"""

from __future__ import annotations

import functools
import math
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
    router_gaps: list[float]  # router logit of the last expert chosen minus the next one's; smallest of each prompt
    expert_counts: list[list[int]]  # [num_layers][num_experts]: tokens routed to each expert, over all prompts

    def first(self, num_prompts: int) -> OracleResult:
        """The same for the first prompts only (expert_counts stay those of all)."""
        parts = (self.token_ids, self.logprobs, self.gaps, self.router_gaps)
        return OracleResult(*(part[:num_prompts] for part in parts), self.expert_counts)

    @property
    def smallest_gap(self) -> float:
        return min(min(gaps) for gaps in self.gaps)

    @property
    def smallest_router_gap(self) -> float:
        return min(self.router_gaps)

    @property
    def fewest_distinct_tokens(self) -> int:
        return min(len(set(tokens)) for tokens in self.token_ids)


def greedy(
    model_folder: Path | str,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 24,
    dtype: torch.dtype = torch.float32,
) -> OracleResult:
    """Continues each prompt by exactly `max_tokens` tokens; an end-of-sequence token does not stop it."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in one order; and these models are too small to share out
    try:
        with torch.inference_mode():
            model = _load(model_folder, dtype)
            routers = _Routers(model)
            answers = [(*_continue(model, prompt, max_tokens), routers.take_smallest_gap()) for prompt in prompts]
    finally:
        torch.set_num_threads(num_threads)
    return OracleResult(*(list(part) for part in zip(*answers, strict=True)), routers.expert_counts())


def assert_same_tokens(answers: Sequence[Sequence[int]], oracle: OracleResult, what: str = "") -> None:
    """Exact equality; a failure names the first differing step of each prompt and how near a tie it was."""
    assert len(answers) == len(oracle.token_ids), f"{what}: {len(answers)} answers for {len(oracle.token_ids)} prompts"
    differences = []
    for index, (answer, expected) in enumerate(zip(answers, oracle.token_ids, strict=True)):
        if list(answer) == expected:
            continue
        steps = [step for step, (a, b) in enumerate(zip(answer, expected, strict=False)) if a != b]
        if steps:
            gap, router_gap = oracle.gaps[index][steps[0]], oracle.router_gaps[index]
            differences.append(
                f"prompt {index} from step {steps[0]} on (best two logits {gap:.1e} apart, "
                f"narrowest choice of an expert {router_gap:.1e})"
            )
        else:
            differences.append(f"prompt {index} has {len(answer)} tokens, not {len(expected)}")
    listed = "; ".join(differences[:8])
    assert not differences, f"{what}: {len(differences)} of {len(answers)} answers differ: {listed}"


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


class _Routers:
    """Watches every router through a forward hook: which experts it chooses, and how narrowly."""

    def __init__(self, model: Any) -> None:
        ffn_config = getattr(model.config, "ffn_config", None)  # DBRX keeps these in a part of its own
        self._top_k = ffn_config.moe_top_k if ffn_config else model.config.num_experts_per_tok
        self._counts: list[torch.Tensor] = []
        self._smallest_gap = math.inf
        for name, module in model.named_modules():
            if name.endswith((".gate", ".router.layer")):
                self._counts.append(torch.zeros(module.weight.shape[0], dtype=torch.int64))
                module.register_forward_pre_hook(functools.partial(self._watch, self._counts[-1]))

    def _watch(self, count: torch.Tensor, router: Any, args: tuple[torch.Tensor, ...]) -> None:
        hidden = args[0].reshape(-1, router.weight.shape[1])  # [num_tokens, hidden_size]
        logits = torch.nn.functional.linear(hidden, router.weight)
        num_best = min(self._top_k + 1, count.numel())
        best = logits.topk(num_best, dim=-1)
        count.add_(torch.bincount(best.indices[:, : self._top_k].flatten(), minlength=count.numel()))
        if num_best > self._top_k:
            gaps = best.values[:, self._top_k - 1] - best.values[:, self._top_k]
            self._smallest_gap = min(self._smallest_gap, float(gaps.min()))

    def take_smallest_gap(self) -> float:
        """Since the last call."""
        gap, self._smallest_gap = self._smallest_gap, math.inf
        return gap

    def expert_counts(self) -> list[list[int]]:
        return [count.tolist() for count in self._counts]
