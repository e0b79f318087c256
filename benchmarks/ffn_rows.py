"""From seconds to the rows and the summary of benchmarks/cpu_ffn.py. All ratios are medians over rounds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.attention_rounds import Rounds
from benchmarks.ffn_arms import OURS, TORCH_MM, Arm
from benchmarks.ffn_shapes import GEMM_TOKENS, HUGE_PAGES, MEMORY, STREAMED_TOKENS, Setting

READ = "read: "
# The kernel counts CPU time in ticks: of a short round it cannot tell less.
MOST_OTHERS_SHARE = 0.1

Row = dict[str, Any]


def _spread(values: Iterable[float]) -> dict[str, Any]:
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "spread": [ordered[0], ordered[-1]]}


def _ratios(numerators: Iterable[float], denominators: Iterable[float]) -> dict[str, Any]:
    """Each from one round, which holds both close in time."""
    return _spread(top / bottom for top, bottom in zip(numerators, denominators, strict=True))


def most_others_share(num_threads: int, num_cpus: int) -> float:
    """What others may take of all CPUs: those that we leave to them, and a little of ours."""
    return 1 - num_threads * (1 - MOST_OTHERS_SHARE) / num_cpus


def make_row(
    setting: Setting,
    tokens_per_expert: int,
    num_threads: int,
    num_cpus: int,
    rounds: Rounds,
    arms: Mapping[str, Arm],
    errors: Mapping[str, float],
) -> Row:
    """One number of tokens at one number of threads, as JSON values. One thread is judged by its CPU time, more by the
    clock."""
    shape = setting.shape
    clock = "cpu" if num_threads == 1 else "wall"
    taken_s = {name: each.by(clock) for name, each in rounds.seconds.items()}
    anchor = min((name for name in taken_s if name.startswith(READ)), key=lambda name: statistics.median(taken_s[name]))
    others_cpu_share = _spread(rounds.others_cpu_share)
    entries: dict[str, Any] = {}
    for name, samples_s in taken_s.items():
        entries[name] = {
            "gb_per_s": _spread(shape.weight_bytes / each / 1e9 for each in samples_s),
            "fraction_of_read_bw": _ratios(taken_s[anchor], samples_s),
            "seconds_rounds": samples_s,
        }
        if name in arms:
            entries[name] |= {
                "note": arms[name].note,
                "gflops": shape.flops(tokens_per_expert) / statistics.median(samples_s) / 1e9,
                "fraction_of_torch_mm": _ratios(taken_s[TORCH_MM], samples_s),
                "token_error": errors.get(name),
                "ours_is_faster_by": _ratios(samples_s, taken_s[OURS]),
            }
    nulls = {name: {"null_reason": arm.null_reason} for name, arm in arms.items() if arm.run is None}
    return {
        "group": setting.group,
        "shape": shape.name,
        "num_experts": shape.num_experts,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "top_k": shape.top_k,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "tokens_per_expert": tokens_per_expert,
        "num_threads": num_threads,
        "clock": clock,
        "others_cpu_share": others_cpu_share,
        "is_contended": others_cpu_share["median"] > most_others_share(num_threads, num_cpus),
        "weight_mb": shape.weight_bytes / 1e6,
        "anchor": anchor.removeprefix(READ),
        "anchor_gb_per_s": entries[anchor]["gb_per_s"]["median"],
        "arms": entries | nulls,
    }


def median_of(row: Row, arm: str, figure: str) -> float | None:
    entry = row["arms"].get(arm, {})
    return entry[figure]["median"] if figure in entry else None


def summarise(rows: list[Row]) -> dict[str, Any]:
    """The median over the rows that each figure is about, except for those measured while others took our CPUs. None
    where no row has the figure, and then why. Without a suffix: all threads; `_one_thread`: by its CPU time."""
    clean = [row for row in rows if not row["is_contended"]]
    # name: (group, tokens per expert, arm, figure)
    figures: dict[str, tuple[str, int, str, str]] = {}
    for tokens in STREAMED_TOKENS:
        figures[f"ffn_fraction_of_read_bw_m{tokens}"] = (MEMORY, tokens, OURS, "fraction_of_read_bw")
        figures[f"ffn_fraction_of_read_bw_m{tokens}_huge_pages"] = (HUGE_PAGES, tokens, OURS, "fraction_of_read_bw")
    for tokens in GEMM_TOKENS:
        figures[f"ffn_vs_torch_mm_m{tokens}"] = (MEMORY, tokens, OURS, "fraction_of_torch_mm")
    for tokens in (*STREAMED_TOKENS, *GEMM_TOKENS):
        figures[f"ffn_vs_vllm_vec_m{tokens}"] = (MEMORY, tokens, "vllm vec", "ours_is_faster_by")
        figures[f"ffn_vs_vllm_amx_m{tokens}"] = (MEMORY, tokens, "vllm amx", "ours_is_faster_by")
    values: dict[str, Any] = {}
    null_reasons: dict[str, str] = {}
    for name, (group, tokens, arm, figure) in figures.items():
        for suffix in ("", "_one_thread"):
            about = [
                row
                for row in clean
                if (row["group"], row["tokens_per_expert"], row["num_threads"] == 1) == (group, tokens, bool(suffix))
            ]
            found = [value for row in about if (value := median_of(row, arm, figure)) is not None]
            values[name + suffix] = statistics.median(found) if found else None
            if not found:
                entries = (row["arms"].get(arm, {}) for row in about)
                reasons = sorted({entry["null_reason"] for entry in entries if "null_reason" in entry})
                null_reasons[name + suffix] = "; ".join(reasons) or "no such row was measured undisturbed"
    num_contended = len(rows) - len(clean)
    return values | {"summary_null_reasons": null_reasons, "num_rows": len(rows), "num_rows_contended": num_contended}
