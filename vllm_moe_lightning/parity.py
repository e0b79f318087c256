"""Does our engine answer as stock vLLM does? The comparison behind `check`, as arithmetic on what two runs answered.

Judges, in this order: did each run end at all; are the experts that it holds the same bytes; did all pages move; are
tokens and log-probabilities the same, exactly in float32, and in bfloat16 as near to float32 as stock's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

TIE = 1e-3
"""Stock's two best tokens this near in log-probability: either is right, since two orders of summation differ by up to
1e-4 or so in float32."""
FLOAT32_TOLERANCE = 1e-3
"""Of one log-probability in float32."""
FLOAT32_OUTLIERS = 0.01
"""Share of tokens that may be off by more: where a router's choice between two experts is a tie, the sums jump."""
PROMPT_MEAN_FACTOR = 1.10
"""bfloat16, tokens of the prompts, which are the same in both runs: our mean distance from float32 over stock's."""
ANSWER_MEAN_FACTOR = 1.25
"""bfloat16, tokens of the answers, each run's own: they part at the first rounding that flips a token."""
SMALLEST_PAGED_SHARE, LARGEST_PAGED_SHARE = 0.9, 1.01
"""Bytes of a sweep over those of all experts: small tensors (biases, scales) stay on the device, frames are padded."""
NUM_NAMED = 3  # a message names this many experts


@dataclass(frozen=True)
class EngineAnswers:
    """What one run gave. Lists are by prompt."""

    error: str | None = None
    """Why it ended early; then everything else is empty."""
    token_ids: Sequence[Sequence[int]] = ()
    logprobs: Sequence[Sequence[float]] = ()
    """Of the tokens answered."""
    runner_up: Sequence[Sequence[tuple[int, float]]] = ()
    """(token, log-probability) of the best one not chosen, for each token answered."""
    prompt_logprobs: Sequence[Sequence[float]] = ()
    """Of each prompt token but the first."""
    num_cached_tokens: int = 0
    """Prompt tokens found in a prefix cache."""
    checksums: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Expert tensor -> checksum of each expert's part."""
    expert_bytes: int = 0
    """Of all expert tensors, as the engine holds them; padding that its kernels want included."""
    stats: Mapping[str, Any] | None = None
    """Of the pipeline, where it ran."""
    num_threads: int = 0
    """torch's."""
    duration_s: float = 0.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    is_right: bool
    detail: str


@dataclass(frozen=True)
class Distances:
    """|log-probability - float32's|, of prompt tokens and of answered ones."""

    prompts: Sequence[float]
    answers: Sequence[float]


@dataclass(frozen=True)
class Parity:
    findings: tuple[Finding, ...]

    @property
    def is_right(self) -> bool:
        return all(finding.is_right for finding in self.findings)

    def verdict(self) -> str:
        """One line: what is wrong, the likeliest cause first; or what was shown."""
        wrong = [finding for finding in self.findings if not finding.is_right]
        if wrong:
            return "FAIL: " + "; ".join(f"{finding.what}: {finding.detail}" for finding in wrong)
        return "PASS: " + "; ".join(f"{finding.what}: {finding.detail}" for finding in self.findings)


@dataclass(frozen=True)
class CheckReport:
    parity: Parity
    settings: Mapping[str, Any]
    """The same for both engines."""
    stock: EngineAnswers
    ours: EngineAnswers

    def to_dict(self) -> dict[str, Any]:
        stats = self.ours.stats or {}
        wanted = ("device", "policy", "sweeps", "steps", "same_step_prefix_hits", "pages_moved", "bytes_paged")
        return {
            "verdict": self.parity.verdict(),
            "is_right": self.parity.is_right,
            "findings": [asdict(finding) for finding in self.parity.findings],
            "settings": dict(self.settings),
            "stock": _figures(self.stock),
            "ours": {**_figures(self.ours), **{name: stats[name] for name in wanted if name in stats}},
        }


def _figures(answers: EngineAnswers) -> dict[str, Any]:
    return {
        "error": answers.error,
        "duration_s": answers.duration_s,
        "torch_threads": answers.num_threads,
        "prefix_cache_hit_tokens": answers.num_cached_tokens,
        "generated_tokens": sum(map(len, answers.token_ids)),
    }


@dataclass(frozen=True)
class Streaming:
    """What our engine was asked to do with the experts."""

    is_whole: bool = True
    """Every sweep streams all layers' experts."""
    is_idle: bool = False
    """No sweep need stream any."""
    is_packed: bool = True
    """As stock vLLM packs them; else they lie as in the checkpoint."""


def judge(
    stock: EngineAnswers,
    ours: EngineAnswers,
    distances: tuple[Distances, Distances] | None = None,
    streaming: Streaming = Streaming(),
) -> Parity:
    """`distances`: (stock's, ours) from float32, where the runs themselves were not in float32."""
    for name, answers in (("stock vLLM", stock), ("our engine", ours)):
        if answers.error is not None:
            return Parity((Finding(name, False, answers.error),))
    findings = [
        _same_experts(stock, ours)
        if streaming.is_packed
        else Finding(
            "experts held", True, "not compared: our kernels read them as they lie, and stock vLLM packs them"
        ),
        _all_pages_moved(stock.expert_bytes, ours) if streaming.is_whole else _some_pages_moved(ours, streaming),
    ]
    if distances is None:
        findings += [_same_tokens(stock, ours), _same_logprobs(stock, ours)]
    else:
        findings.append(_as_near_to_float32(*distances))
    return Parity(tuple(findings))


def _same_experts(stock: EngineAnswers, ours: EngineAnswers) -> Finding:
    what = "experts held"
    if set(stock.checksums) != set(ours.checksums):
        some = sorted(set(stock.checksums) ^ set(ours.checksums))[:NUM_NAMED]
        return Finding(what, False, f"the two engines hold other tensors: {', '.join(some)}")
    different = [
        f"{name} of expert {expert}"
        for name, sums in stock.checksums.items()
        for expert, (theirs, mine) in enumerate(zip(sums, ours.checksums[name], strict=True))
        if theirs != mine
    ]
    if different:
        more = f" and {len(different) - NUM_NAMED} more" if len(different) > NUM_NAMED else ""
        named = ", ".join(different[:NUM_NAMED]) + more
        return Finding(what, False, f"the host pages hold other bytes than stock vLLM loads, in {named}")
    parts = sum(len(sums) for sums in stock.checksums.values())
    return Finding(what, True, f"{parts} expert matrices are stock's, byte for byte")


def _all_pages_moved(expert_bytes: int, ours: EngineAnswers) -> Finding:
    """`expert_bytes`: that stock vLLM holds, so that a layer which we forgot to page would show."""
    what = "bytes paged"
    stats = ours.stats
    if stats is None:
        return Finding(what, False, "the plugin was not in force: stock vLLM ran in our place")
    sweeps = stats["sweeps"] + stats["dummy_sweeps"]
    expected = stats["bytes_per_sweep"] * sweeps + stats["bytes_of_first_layer"] * stats["refills"]
    moved, per_sweep = stats["bytes_paged"], stats["bytes_per_sweep"]
    if not SMALLEST_PAGED_SHARE * expert_bytes <= per_sweep <= LARGEST_PAGED_SHARE * expert_bytes:
        return Finding(what, False, f"a sweep moves {per_sweep} bytes, and all layers' experts are {expert_bytes}")
    if moved != expected or not stats["sweeps"]:
        return Finding(what, False, f"{moved} bytes in {sweeps} sweeps, {expected} were due")
    return Finding(
        what, True, f"{moved} in {stats['pages_moved']} pages, exactly those of {sweeps} sweeps x {per_sweep} bytes"
    )


def _some_pages_moved(ours: EngineAnswers, streaming: Streaming) -> Finding:
    what, stats = "bytes paged", ours.stats
    if stats is None:
        return Finding(what, False, "the plugin was not in force: stock vLLM ran in our place")
    sweeps, moved = stats["sweeps"] + stats["dummy_sweeps"], stats["bytes_paged"]
    detail = f"{moved} in {sweeps} sweeps, {stats['bytes_fetched']} of them fetched; as asked, not all is streamed"
    return Finding(what, bool(stats["sweeps"]) and (moved > 0 or streaming.is_idle), detail)


def _same_tokens(stock: EngineAnswers, ours: EngineAnswers) -> Finding:
    total = sum(map(len, stock.token_ids))
    parted, ties = [], 0
    for prompt, (theirs, mine) in enumerate(zip(stock.token_ids, ours.token_ids, strict=True)):
        position = first_difference(theirs, mine)
        if position is None:
            continue
        token, logprob = stock.runner_up[prompt][position]
        if mine[position] == token and stock.logprobs[prompt][position] - logprob <= TIE:
            ties += 1
        else:
            parted.append(f"prompt {prompt} at token {position}")
    tied = f"; {ties} answers part where stock's two best tokens are within {TIE:g}" if ties else ""
    if parted:
        more = ", ..." if len(parted) > NUM_NAMED else ""
        some = ", ".join(parted[:NUM_NAMED]) + more
        return Finding("tokens", False, f"{len(parted)} of {len(stock.token_ids)} answers differ ({some}){tied}")
    return Finding("tokens", True, f"all {total} the same{tied}" if not tied else f"the same{tied}")


def _same_logprobs(stock: EngineAnswers, ours: EngineAnswers) -> Finding:
    """Of all prompt tokens, and of the answers as far as they are the same."""
    differences = [
        abs(a - b)
        for theirs, mine in zip(stock.prompt_logprobs, ours.prompt_logprobs, strict=True)
        for a, b in zip(theirs, mine, strict=True)
    ]
    for prompt, (theirs, mine) in enumerate(zip(stock.logprobs, ours.logprobs, strict=True)):
        same = first_difference(stock.token_ids[prompt], ours.token_ids[prompt])
        differences += [abs(a - b) for a, b in zip(theirs[:same], mine[:same], strict=True)]
    outliers = sum(not difference <= FLOAT32_TOLERANCE for difference in differences)  # counts NaN too
    mean, largest = _mean(differences), max(differences)
    detail = f"of {len(differences)} tokens off by {mean:.1e} in the mean, {largest:.1e} at most"
    bound = f"{outliers} over {FLOAT32_TOLERANCE:g}, bound {FLOAT32_OUTLIERS:.0%}"
    is_right = outliers <= FLOAT32_OUTLIERS * len(differences)
    return Finding("log-probabilities", is_right, detail if not outliers else f"{detail} ({bound})")


def _as_near_to_float32(stock: Distances, ours: Distances) -> Finding:
    rows = (
        ("prompt", stock.prompts, ours.prompts, PROMPT_MEAN_FACTOR),
        ("answered", stock.answers, ours.answers, ANSWER_MEAN_FACTOR),
    )
    is_right = all(_mean(mine) <= factor * _mean(theirs) + FLOAT32_TOLERANCE for _, theirs, mine, factor in rows)
    details = [
        f"{len(mine)} {kind} tokens {_mean(mine):.2e} from float32 in the mean, stock {_mean(theirs):.2e} "
        f"(bound {factor:g}x); at most {max(mine):.2e}, stock {max(theirs):.2e}"
        for kind, theirs, mine, factor in rows
    ]
    return Finding("log-probabilities", is_right, ", and ".join(details))


def first_difference(some: Sequence[int], others: Sequence[int]) -> int | None:
    """The first position at which they differ; None if one is the beginning of the other."""
    return next((i for i, (a, b) in enumerate(zip(some, others, strict=False)) if a != b), None)


def distances_from(float32: EngineAnswers, answers: EngineAnswers, num_prompt_tokens: Sequence[int]) -> Distances:
    """`float32` was given each prompt with its answer in `answers` as one prompt."""
    prompts: list[float] = []
    answered: list[float] = []
    for index, expected in enumerate(float32.prompt_logprobs):
        mine = [*answers.prompt_logprobs[index], *answers.logprobs[index]]
        distances = [abs(a - b) for a, b in zip(mine, expected, strict=True)]
        prompts += distances[: num_prompt_tokens[index] - 1]
        answered += distances[num_prompt_tokens[index] - 1 :]
    return Distances(prompts, answered)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
