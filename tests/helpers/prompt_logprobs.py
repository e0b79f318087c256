# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of given sequences by transformers: what every position of a prompt should be worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
