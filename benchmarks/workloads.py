"""The paper's workloads as token ids of real text: prompt lengths with exactly its mean and maximum, padded or not.

What is known of a workload is its mean and its longest prompt; the shape between them is ours: exponential from the end
that the mean is nearer to. Text is cut from a passage of plays, shuffled anew for each prompt.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import ROOT

TEXT_FILE = ROOT / "examples" / "prompts.txt"
TOKENIZER_FILE = ROOT / "examples" / "tiny-shakespeare-moe" / "tokenizer.json"
PADDING_ID = 0  # <|endoftext|>
LEAST_SHARE_OF_MEAN = 8
"""The shortest prompt has this part of the mean, or more."""


@dataclass(frozen=True)
class PaperWorkload:
    """Lengths in tokens. MoE-Lightning, Table 3."""

    name: str
    prompt_mean: int
    prompt_max: int
    gen_len: int

    @property
    def prompt_min(self) -> int:
        return max(1, self.prompt_mean // LEAST_SHARE_OF_MEAN)

    @property
    def longest(self) -> int:
        return self.prompt_max + self.gen_len


MTBENCH = tuple(PaperWorkload(f"mtbench-{gen}", 77, 418, gen) for gen in (32, 64, 128, 256))
SYNTHETIC_REASONING = PaperWorkload("synthetic-reasoning", 242, 256, 50)
SUMMARISATION = PaperWorkload("summarisation", 1693, 1984, 64)
WORKLOADS = {workload.name: workload for workload in (*MTBENCH, SYNTHETIC_REASONING, SUMMARISATION)}


@dataclass(frozen=True)
class PromptSet:
    """What one run answers, and how much of it is text."""

    token_ids: tuple[tuple[int, ...], ...]
    text_tokens: int
    padding_tokens: int

    @property
    def num_requests(self) -> int:
        return len(self.token_ids)


def prompt_lengths(workload: PaperWorkload, num_requests: int, seed: int) -> list[int]:
    """Sum exactly num_requests x mean, one of them exactly the longest, the others at most that; in random order.

    Raises ValueError where so few requests can't have that mean.
    """
    total, longest, shortest = num_requests * workload.prompt_mean, workload.prompt_max, workload.prompt_min
    others = num_requests - 1
    if not others * shortest <= total - longest <= others * longest:
        raise ValueError(
            f"{workload.name}: {num_requests} prompts can't have a mean of {workload.prompt_mean} and a longest of "
            f"{longest} with none under {shortest} tokens; take more requests"
        )
    quantiles = [-math.log1p(-(index + 0.5) / others) for index in range(others)]
    from_below = workload.prompt_mean - shortest < longest - workload.prompt_mean

    def lengths_at(scale: float) -> list[int]:
        spans = [round(scale * quantile) for quantile in quantiles]
        return [min(longest, max(shortest, shortest + span if from_below else longest - span)) for span in spans]

    lengths = _nearest(lengths_at, total - longest, longest)
    # What rounding left over, a token each.
    missing = total - longest - sum(lengths)
    step, limit = (1, longest) if missing > 0 else (-1, shortest)
    open_to_change = [index for index in range(others) if lengths[index] != limit]
    while missing:
        for index in list(open_to_change):
            if not missing:
                break
            lengths[index] += step
            missing -= step
            if lengths[index] == limit:
                open_to_change.remove(index)
    lengths.append(longest)
    random.Random(seed).shuffle(lengths)
    return lengths


def _nearest(lengths_at, total: int, longest: int) -> list[int]:
    """By bisection over the scale; the sum is monotonous in it, rising or falling."""
    low, high = 0.0, float(longest)
    rises = sum(lengths_at(high)) > sum(lengths_at(low))
    for _ in range(60):
        middle = (low + high) / 2
        if (sum(lengths_at(middle)) < total) == rises:
            low = middle
        else:
            high = middle
    return lengths_at(low)


def text_passages(path: Path = TEXT_FILE) -> list[str]:
    """One a line, with line breaks written as backslash n."""
    return [line.replace("\\n", "\n") for line in path.read_text().splitlines() if line.strip()]


def encoded_passages(tokenizer_file: Path = TOKENIZER_FILE, text_file: Path = TEXT_FILE) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    return [tokenizer.encode(f"{text}\n\n").ids for text in text_passages(text_file)]


def make_prompts(
    workload: PaperWorkload, num_requests: int, passages: Sequence[Sequence[int]], seed: int, *, padded: bool = False
) -> PromptSet:
    """Another seed gives other lengths' order and other text. `padded`: all as long as the longest, filled up on the
    left with tokens that are computed like any other."""
    draw = random.Random(seed)
    prompts = []
    lengths = prompt_lengths(workload, num_requests, seed)
    for length in lengths:
        text = _window(passages, length, draw)
        padding = workload.prompt_max - length if padded else 0
        prompts.append((PADDING_ID,) * padding + text)
    text_tokens = sum(lengths)
    return PromptSet(tuple(prompts), text_tokens, sum(map(len, prompts)) - text_tokens)


def _window(passages: Sequence[Sequence[int]], length: int, draw: random.Random) -> tuple[int, ...]:
    """`length` tokens of the shuffled passages, from anywhere on."""
    order = list(range(len(passages)))
    draw.shuffle(order)
    stream = [token for index in order for token in passages[index]]
    begin = draw.randrange(len(stream))
    return tuple(stream[(begin + offset) % len(stream)] for offset in range(length))
