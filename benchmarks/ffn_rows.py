"""From seconds to the rows and the summary of benchmarks/cpu_ffn.py. All ratios are medians over rounds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.attention_rounds import Rounds
from benchmarks.ffn_arms import OURS, TORCH_MM, Arm
from benchmarks.ffn_shapes import GEMM_TOKENS, HUGE_PAGES, MEMORY, STREAMED_TOKENS, Setting
from benchmarks.round_figures import (
    READ,
    Row,
    Summary,
    fastest_read,
    median_of,
    most_others_share,
    ratios,
    spread,
    undisturbed,
)


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
    anchor = fastest_read(taken_s)
    others_cpu_share = spread(rounds.others_cpu_share)
    entries: dict[str, Any] = {}
    for name, samples_s in taken_s.items():
        entries[name] = {
            "gb_per_s": spread(shape.weight_bytes / each / 1e9 for each in samples_s),
            "fraction_of_read_bw": ratios(taken_s[anchor], samples_s),
            "seconds_rounds": samples_s,
        }
        if name in arms:
            entries[name] |= {
                "note": arms[name].note,
                "gflops": shape.flops(tokens_per_expert) / statistics.median(samples_s) / 1e9,
                "fraction_of_torch_mm": ratios(taken_s[TORCH_MM], samples_s),
                "token_error": errors.get(name),
                "ours_is_faster_by": ratios(samples_s, taken_s[OURS]),
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


def summarise(rows: list[Row]) -> dict[str, Any]:
    """The median over the rows that each figure is about, except for those measured while others took our CPUs. None
    where no row has the figure, and then why. Without a suffix: all threads; `_one_thread`: by its CPU time."""
    clean = undisturbed(rows)
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
    summary = Summary()
    for name, (group, tokens, arm, figure) in figures.items():
        for suffix in ("", "_one_thread"):
            about = [
                row
                for row in clean
                if (row["group"], row["tokens_per_expert"], row["num_threads"] == 1) == (group, tokens, bool(suffix))
            ]
            summary.add(name + suffix, about, lambda row, arm=arm, figure=figure: median_of(row, arm, figure), arm)  # type: ignore[misc]
    return summary.to_dict(rows)
