"""Draws rows of benchmarks/cpu_attention.py: which fraction of the read bandwidth each competitor reaches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.attention_rows import Row, fraction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOTTED_GROUP = "memory"
# Ours in blues, the others in warm colours and grey.
COLOURS = {
    "ours": "#1f5fa8",
    "ours avx2": "#85b3e0",
    "vllm amx": "#b5382a",
    "vllm vec": "#e5883b",
    "vllm vec16": "#edb987",
    "sdpa": "#8a8a8a",
}


def plot_rows(rows: list[Row], path: Path) -> None:
    """One panel per number of threads, one cluster of bars per shape with its caches in memory. A star: others took our
    CPUs meanwhile."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["group"] == PLOTTED_GROUP]
    thread_counts = sorted({row["num_threads"] for row in rows})
    width = 5 + 0.8 * max(sum(row["num_threads"] == count for row in rows) for count in thread_counts)
    figure = Figure(figsize=(width, 3.6 * len(thread_counts)), layout="constrained")
    panels = figure.subplots(len(thread_counts), squeeze=False)[:, 0]
    for axes, count in zip(panels, thread_counts, strict=True):
        _plot_panel(axes, [row for row in rows if row["num_threads"] == count])
        axes.set_title(f"{count} thread{'s' if count > 1 else ''}")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=120)


def _plot_panel(axes: Axes, rows: list[Row]) -> None:
    shown = [[name for name in COLOURS if fraction(row, name) is not None] for row in rows]
    bar_width = 0.8 / max(map(len, shown))
    for name, colour in COLOURS.items():
        places, heights = [], []
        for x, (row, names) in enumerate(zip(rows, shown, strict=True)):
            if (height := fraction(row, name)) is not None:
                places.append(x + (names.index(name) - (len(names) - 1) / 2) * bar_width)
                heights.append(height)
        if places:
            axes.bar(places, heights, bar_width, label=name, color=colour)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(rows)), [_label(row) for row in rows], fontsize=8)
    axes.set_ylabel("fraction of read bandwidth")
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_ylim(0, 1.05)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _label(row: Row) -> str:
    dtype = "" if row["dtype"] == "bfloat16" else f"\n{row['dtype']}"
    star = "*" if row["is_contended"] else ""
    return f"{row['num_seqs']} x {row['context_len']}\nblock {row['block_size']}{star}{dtype}"
