"""From seconds to the rows and the summary of benchmarks/cpu_attention.py. All ratios are medians over rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.attention_arms import OURS, Arm
from benchmarks.attention_rounds import Rounds
from benchmarks.attention_shapes import Setting
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
from vllm_moe_lightning.host_limits import usable_cpus

VLLM_OWN_DTYPE = ("vllm amx", "vllm vec", "vllm vec16")
BEST_VLLM = "vllm best"


def make_row(
    setting: Setting,
    num_threads: int,
    rounds: Rounds,
    arms: Mapping[str, Arm],
    errors: Mapping[str, float],
) -> Row:
    """One Shape at one number of threads, as JSON values. One thread is judged by its CPU time, more by the clock."""
    shape = setting.shape
    clock = "cpu" if num_threads == 1 and not setting.is_stolen else "wall"
    num_bytes = shape.pass_bytes * setting.num_passes
    taken_s = {name: each.by(clock) for name, each in rounds.seconds.items()}
    anchor = fastest_read(taken_s)

    others_cpu_share = spread(rounds.others_cpu_share)
    entries: dict[str, Any] = {}
    for name, samples_s in taken_s.items():
        share = arms[name].bytes_share if name in arms else 1.0
        entries[name] = {
            "gb_per_s": spread(share * num_bytes / each / 1e9 for each in samples_s),
            "wall_gb_per_s": spread(share * num_bytes / each / 1e9 for each in rounds.seconds[name].wall),
            "fraction_of_read_bw": ratios((share * anchor_s for anchor_s in taken_s[anchor]), samples_s),
            "seconds_rounds": samples_s,
        }
        if name in arms:
            tokens = shape.num_seqs * shape.num_layers * setting.num_passes
            entries[name] |= {
                "note": arms[name].note,
                "tokens_per_s": tokens / statistics.median(samples_s),
                "row_error": errors[name],
                "ours_is_faster_by": ratios(samples_s, taken_s[OURS]),
            }
    nulls = {name: {"null_reason": arm.null_reason} for name, arm in arms.items() if arm.run_layer is None}
    return {
        "group": setting.group,
        "num_seqs": shape.num_seqs,
        "context_len": shape.context_len,
        "block_size": shape.block_size,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "heads": [shape.num_heads, shape.num_kv_heads, shape.head_dim],
        "num_threads": num_threads,
        "clock": clock,
        "others_cpu_share": others_cpu_share,
        "is_contended": others_cpu_share["median"] > others_share_allowed(setting, num_threads, usable_cpus()),
        "layer_mb": shape.layer_bytes / 1e6,
        "sample_mb": num_bytes / 1e6,
        "anchor": anchor.removeprefix(READ),
        "anchor_gb_per_s": entries[anchor]["gb_per_s"]["median"],
        "arms": entries | nulls,
    }


def others_share_allowed(setting: Setting, num_threads: int, num_cpus: int) -> float:
    return most_others_share(num_threads, num_cpus, is_stolen=setting.is_stolen)


def fraction(row: Row, arm: str) -> float | None:
    return median_of(row, arm, "fraction_of_read_bw")


def best_vllm(row: Row) -> str | None:
    """The fastest of vLLM's kernels for the cache's own dtype."""
    offered = [(ratio, name) for name in VLLM_OWN_DTYPE if (ratio := over(row, name)) is not None]
    return min(offered)[1] if offered else None


def over(row: Row, arm: str) -> float | None:
    """How many times as fast as `arm` ours is."""
    return median_of(row, best_vllm(row) if arm == BEST_VLLM else arm, "ours_is_faster_by")


def tokens_ratio(row: Row, arm: str, other: str) -> float | None:
    """Tokens per second of `arm` over those of `other`."""
    ratio, other_ratio = over(row, arm), over(row, other)
    return None if ratio is None or other_ratio is None else other_ratio / ratio


def summarise(rows: list[Row]) -> dict[str, Any]:
    """The median over the rows that each figure is about, except for those measured while others took our CPUs. None
    where no row has the figure, and then why."""
    clean = undisturbed(rows)

    def is_memory(row: Row, block_size: int | None = None) -> bool:
        return row["group"] == "memory" and block_size in (None, row["block_size"])

    def group(name: str) -> Callable[[Row], bool]:
        return lambda row: bool(row["group"] == name)

    # name: (which rows, the figure of a row, the arm that says why there is none)
    figures: dict[str, tuple[Callable[[Row], bool], Callable[[Row], float | None], str]] = {
        "fraction_of_read_bw_block128": (lambda r: is_memory(r, 128), lambda r: fraction(r, OURS), OURS),
        "fraction_of_read_bw_block32": (lambda r: is_memory(r, 32), lambda r: fraction(r, OURS), OURS),
        "fraction_of_read_bw_block16": (lambda r: is_memory(r, 16), lambda r: fraction(r, OURS), OURS),
        "fraction_of_read_bw_avx2": (is_memory, lambda r: fraction(r, "ours avx2"), "ours avx2"),
        "vs_vllm_amx_block32": (lambda r: is_memory(r, 32), lambda r: over(r, "vllm amx"), "vllm amx"),
        "vs_vllm_amx_block128": (lambda r: is_memory(r, 128), lambda r: over(r, "vllm amx"), "vllm amx"),
        "vs_vllm_vec": (is_memory, lambda r: over(r, "vllm vec"), "vllm vec"),
        "vs_vllm_best_block32": (lambda r: is_memory(r, 32), lambda r: over(r, BEST_VLLM), "vllm vec"),
        "vs_vllm_best_block128": (lambda r: is_memory(r, 128), lambda r: over(r, BEST_VLLM), "vllm vec"),
        "vs_sdpa": (is_memory, lambda r: over(r, "sdpa"), "sdpa"),
        "stolen_core_vs_vllm": (group("stolen core"), lambda r: over(r, BEST_VLLM), "vllm vec"),
        "cache_warm_vs_vllm_amx": (group("cache-warm"), lambda r: over(r, "vllm amx"), "vllm amx"),
        "cache_warm_vs_vllm_best": (group("cache-warm"), lambda r: over(r, BEST_VLLM), "vllm vec"),
        "int8_vs_bf16": (is_memory, lambda r: tokens_ratio(r, "ours int8", OURS), "ours int8"),
        "fp8_vs_bf16": (is_memory, lambda r: tokens_ratio(r, "ours fp8", OURS), "ours fp8"),
        "int8_vs_vllm_fp8": (is_memory, lambda r: tokens_ratio(r, "ours int8", "vllm fp8"), "ours int8"),
        "fp8_vs_vllm_fp8": (is_memory, lambda r: tokens_ratio(r, "ours fp8", "vllm fp8"), "ours fp8"),
    }
    summary = Summary()
    for name, (is_about, figure, arm) in figures.items():
        summary.add(name, [row for row in clean if is_about(row)], figure, arm)
    return summary.to_dict(rows)
