"""Draws the hierarchical roofline of a machine with a model's attention and FFN on it.

Decides nothing: placements and turning points come from roofline.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_moe_lightning.hardware import HardwareProfile
from vllm_moe_lightning.model_spec import MoeModelSpec
from vllm_moe_lightning.roofline import (
    Peaks,
    Placement,
    attainable_on_gpu_resident,
    decode_attention,
    moe_ffn,
    place,
)
from vllm_moe_lightning.workload import HrmPolicy, Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"GPU": "#2b6cb0", "link": "#c05621", "CPU": "#2f855a"}
_NUM_POINTS = 200


def _grid(lowest: float, highest: float) -> list[float]:
    ratio = (highest / lowest) ** (1 / (_NUM_POINTS - 1))
    return [lowest * ratio**step for step in range(_NUM_POINTS)]


def _draw_roofs(axes: Axes, peaks: Peaks, intensities: list[float]) -> None:
    roofs = (
        ("GPU memory and compute", "GPU", peaks.gpu_bytes_per_s, peaks.gpu_flops_per_s, "-"),
        ("link to the GPU", "link", peaks.link_bytes_per_s, peaks.gpu_flops_per_s, "--"),
        ("CPU memory and compute", "CPU", peaks.cpu_bytes_per_s, peaks.cpu_flops_per_s, "-"),
    )
    for label, colour, bytes_per_s, flops_per_s, style in roofs:
        heights = [min(bytes_per_s * intensity, flops_per_s) for intensity in intensities]
        axes.plot(intensities, heights, style, color=_COLOURS[colour], label=label)


def _draw_placement(axes: Axes, placement: Placement) -> None:
    """Each operation stands at its intensity on the host, since that is what moving it depends on."""
    operation = placement.operation
    level = "GPU" if placement.on_gpu else "CPU"
    axes.plot([operation.cpu_intensity], [placement.flops_per_s], "o", color=_COLOURS[level], markersize=8, zorder=5)
    axes.annotate(
        f"{operation.name} on the {level}\n{placement.flops_per_s / 1e12:.3g} TFLOP/s, bound by {placement.roof.value}",
        (operation.cpu_intensity, placement.flops_per_s),
        textcoords="offset points",
        xytext=(8, -24),
        fontsize=8,
        bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
    )


def plot_roofline(
    spec: MoeModelSpec, profile: HardwareProfile, workload: Workload, policy: HrmPolicy, path: Path
) -> tuple[Placement, Placement]:
    """Writes the picture (format by the file's ending); returns the placements of attention and FFN that it shows."""
    from matplotlib.figure import Figure  # heavy, and only for this picture

    peaks = Peaks.of(profile)
    attention = place(peaks, decode_attention(spec, workload))
    ffn = place(peaks, moe_ffn(spec, workload, policy))
    marks = [p for p in (attention.p1, ffn.p2, attention.operation.cpu_intensity, ffn.operation.cpu_intensity) if p > 0]
    lowest = min(0.3, *marks) / 2
    highest = max(3 * peaks.gpu_flops_per_s / peaks.link_bytes_per_s, 2 * max(marks))

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.add_subplot()
    _draw_roofs(axes, peaks, _grid(lowest, highest))
    for name, intensity in (("P1", attention.p1), ("P2 of the FFN", ffn.p2)):
        if intensity > 0:
            axes.axvline(intensity, color="grey", linewidth=0.8, linestyle=":")
            label_place = axes.get_xaxis_transform()
            axes.text(intensity, 0.02, f" {name} = {intensity:.3g}", fontsize=8, transform=label_place)
    kernel_roof, _ = attainable_on_gpu_resident(peaks, ffn.operation)
    label = f"FFN kernel at {policy.micro_batch_size} sequences"
    axes.axhline(kernel_roof, color=_COLOURS["GPU"], linewidth=0.8, linestyle=":", label=label)
    for placement in (attention, ffn):
        _draw_placement(axes, placement)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs per byte that is read from host memory")
    axes.set_ylabel("FLOP/s")
    axes.set_title(
        f"{spec.name} on {profile.name}, {policy.micro_batch_size} x {policy.num_micro_batches} sequences", fontsize=10
    )
    axes.legend(loc="upper left", fontsize=8)
    axes.grid(which="major", alpha=0.3)
    figure.savefig(path, dpi=150)
    return attention, ffn
