# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of given sequences by transformers: what every position of a prompt should be worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


def transformers_logprobs(
    model_folder: Path | str, sequences: Sequence[Sequence[int]], *, dtype: torch.dtype = torch.float32
) -> list[list[float]]:
    """Per sequence, the log-probability of each token but the first, given those before it."""
    from transformers import AutoModelForCausalLM

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            model = AutoModelForCausalLM.from_pretrained(
                model_folder,
                dtype=dtype,
                attn_implementation="eager",
                experts_implementation="eager",
                local_files_only=True,
            ).eval()
            return [_of_sequence(model, sequence) for sequence in sequences]
    finally:
        torch.set_num_threads(num_threads)


def _of_sequence(model: torch.nn.Module, sequence: Sequence[int]) -> list[float]:
    tokens = torch.tensor([list(sequence)])  # [1, num_tokens]
    logprobs = model(input_ids=tokens).logits[0].float().log_softmax(dim=-1)  # [num_tokens, vocab_size]
    return logprobs[:-1].gather(1, tokens[0, 1:, None])[:, 0].tolist()


def distances_from_float32(
    model_folder: Path | str, prompts: Sequence[Sequence[int]], answers: Sequence[Mapping[str, Any]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """|log-probability - transformers in float32| for every prompt token, and for every token of the answers.

    `answers` are those of tests.helpers.engine_call.answers_in_detail with prompt_logprobs.
    """
    sequences = [[*prompt, *answer["token_ids"]] for prompt, answer in zip(prompts, answers, strict=True)]
    of_prompts: list[float] = []
    of_answers: list[float] = []
    references = transformers_logprobs(model_folder, sequences)
    for prompt, sequence, answer, reference in zip(prompts, sequences, answers, references, strict=True):
        entries = [*answer["prompt_logprobs"][1:], *answer["logprobs"]]
        for position, (entry, token, expected) in enumerate(
            zip(entries, sequence[1:], reference, strict=True), start=1
        ):
            distance = abs(dict(map(tuple, entry))[token] - expected)
            (of_prompts if position < len(prompt) else of_answers).append(distance)
    return torch.tensor(of_prompts), torch.tensor(of_answers)


def router_scores(model_folder: Path | str, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Every router logit that transformers computes for these sequences, in one long vector."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, local_files_only=True).eval()
    scores: list[torch.Tensor] = []

    def watch(router: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        hidden = inputs[0].reshape(-1, router.weight.shape[1])  # [num_tokens, hidden_size]
        scores.append(torch.nn.functional.linear(hidden, router.weight).flatten())

    for name, module in model.named_modules():
        if name.endswith(".gate"):
            module.register_forward_pre_hook(watch)
    with torch.inference_mode():
        for sequence in sequences:
            model(input_ids=torch.tensor([list(sequence)]))
    return torch.cat(scores)
