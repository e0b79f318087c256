"""Machines that need no measuring: GPUs and hosts by name, each figure with its source and how far to trust it.

A GPU preset carries its usual link, since the link's generation comes with the card; a host that is slower than the
card overrides it with `h2d_bytes_per_s`.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_moe_lightning.hardware import GIB, CpuLevel, GpuLevel, HardwareProfile, HostLink

_SAME_AS_H2D = "not measured; taken equal to h2d"
_SHARE_5090 = "not measured; 0.9 as nvbandwidth shows on an RTX 5090 (50.9 of 56.3 GB/s)"


@dataclass(frozen=True)
class GpuPreset:
    level: GpuLevel
    link: HostLink
    sources: dict[str, str]


def _gpu(
    name: str,
    memory_gib: float,
    bandwidth_gb_per_s: float,
    tflops: float,
    h2d_gb_per_s: float,
    *,
    memory: str,
    bandwidth: str,
    flops: str,
    h2d: str,
    d2h_gb_per_s: float | None = None,
    d2h: str = _SAME_AS_H2D,
    share: float = 0.9,
    share_source: str = _SHARE_5090,
) -> GpuPreset:
    return GpuPreset(
        GpuLevel(
            name=name,
            memory_bytes=int(memory_gib * GIB),
            bandwidth_bytes_per_s=bandwidth_gb_per_s * 1e9,
            flops_per_s=tflops * 1e12,
        ),
        HostLink(
            h2d_bytes_per_s=h2d_gb_per_s * 1e9,
            d2h_bytes_per_s=(d2h_gb_per_s or h2d_gb_per_s) * 1e9,
            bidirectional_share=share,
        ),
        {
            "gpu.memory_bytes": memory,
            "gpu.bandwidth_bytes_per_s": bandwidth,
            "gpu.flops_per_s": flops,
            "link.h2d_bytes_per_s": h2d,
            "link.d2h_bytes_per_s": d2h,
            "link.bidirectional_share": share_source,
            "link.latency_s": "assumed",
        },
    )


_DRIVER = "datasheet, less what the driver keeps"
_DATASHEET = "datasheet"
_DENSE = "datasheet, fp16/bf16 dense with fp32 accumulation"
GPU_PRESETS: dict[str, GpuPreset] = {
    "t4": _gpu(
        "NVIDIA T4", 15.0, 320, 65.13, 6.3,
        memory="MoE-Lightning artifact: 15 GiB usable of 16 GB",
        bandwidth=_DATASHEET,
        flops="datasheet, fp16 dense; no bf16 on this card",
        h2d="one report from a cloud VM; 10-12.4 GB/s on PCIe 3.0 x16 boxes, 15.75 nominal",
    ),
    "l4": _gpu(
        "NVIDIA L4", 22.5, 300, 121, 12.3,
        memory=_DRIVER, bandwidth=_DATASHEET,
        flops="datasheet, dense (242 is the sparse figure)",
        h2d="MoE-Lightning Fig. 9: KV transfer times of a GCP VM; 31.5 nominal on PCIe 4.0 x16",
    ),
    "a10": _gpu(
        "NVIDIA A10", 22.5, 600, 125, 24.0,
        memory=_DRIVER, bandwidth=_DATASHEET, flops=_DENSE, h2d="typical of PCIe 4.0 x16; not measured on this card",
    ),
    "a100-40": _gpu(
        "NVIDIA A100 40GB", 39.5, 1555, 312, 26.1,
        memory=_DRIVER, bandwidth=_DATASHEET, flops=_DENSE, h2d="bandwidthTest on an SXM4 board",
    ),
    "a100-80": _gpu(
        "NVIDIA A100 80GB", 79.2, 2039, 312, 26.1,
        memory=_DRIVER, bandwidth=_DATASHEET, flops=_DENSE, h2d="bandwidthTest on an SXM4 board",
    ),
    "h100": _gpu(
        "NVIDIA H100 SXM 80GB", 79.1, 3350, 989.4, 55.6,
        memory=_DRIVER, bandwidth=_DATASHEET, flops=_DENSE, h2d="nvbandwidth sample output; 63 nominal on PCIe 5.0 x16",
    ),
    "h200": _gpu(
        "NVIDIA H200 141GB", 139.8, 4800, 989.4, 55.0,
        memory=_DRIVER, bandwidth=_DATASHEET, flops=_DENSE, h2d="taken as the H100's, same link",
    ),
    "rtx3090": _gpu(
        "NVIDIA GeForce RTX 3090", 23.7, 936, 71, 25.0,
        memory=_DRIVER, bandwidth=_DATASHEET,
        flops="tables in public code, fp16 dense with fp32 accumulation; medium trust",
        h2d="typical 24-26 GB/s on PCIe 4.0 x16",
    ),
    "rtx4090": _gpu(
        "NVIDIA GeForce RTX 4090", 23.6, 1008, 165.2, 26.2,
        memory=_DRIVER, bandwidth=_DATASHEET, flops=_DENSE, h2d="one box, pinned (14.4 pageable)",
    ),
    "rtx5090": _gpu(
        "NVIDIA GeForce RTX 5090", 31.8, 1792, 209.5, 56.3,
        memory=_DRIVER, bandwidth=_DATASHEET,
        flops="tables in public code, fp16 dense with fp32 accumulation",
        h2d="nvbandwidth beside a Xeon 8458P (tinygrad/open-gpu-kernel-modules#29)",
        d2h_gb_per_s=57.3, d2h="same report",
        share=50.9 / 56.3, share_source="same report: 50.9 GB/s h2d while both run",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class HostPreset:
    level: CpuLevel
    sources: dict[str, str]


def _host(
    name: str,
    memory_gib: float,
    bandwidth_gb_per_s: float,
    tflops: float,
    num_threads: int,
    *,
    memory: str,
    bandwidth: str,
    flops: str,
) -> HostPreset:
    return HostPreset(
        CpuLevel(
            name=name,
            memory_bytes=int(memory_gib * GIB),
            bandwidth_bytes_per_s=bandwidth_gb_per_s * 1e9,
            flops_per_s=tflops * 1e12,
            num_threads=num_threads,
        ),
        {"cpu.memory_bytes": memory, "cpu.bandwidth_bytes_per_s": bandwidth, "cpu.flops_per_s": flops},
    )


_PAPER_RAM = "MoE-Lightning Table 2; 184.29 GiB is what the artifact's printed limit implies"
HOST_PRESETS: dict[str, HostPreset] = {
    "gcp-t4-24": _host(
        "Xeon 2.30 GHz, 24 vCPU, 192 GB (paper's S1)", 184.29, 76, 0.8, 24,
        memory=_PAPER_RAM, bandwidth="taken as the L4 host's", flops="MoE-Lightning artifact, T4 host",
    ),
    "gcp-l4-24": _host(
        "Xeon 2.20 GHz, 24 vCPU, 192 GB (paper's S2)", 184.29, 76, 1.6, 24,
        memory=_PAPER_RAM, bandwidth="MoE-Lightning README, measured with likwid-bench",
        flops="MoE-Lightning artifact, L4 host (1.3 in its plots)",
    ),
    "gcp-t4-32": _host(
        "Xeon 2.30 GHz, 32 vCPU, 416 GB (paper's S6-S9)", 400, 76, 0.8, 32,
        memory="MoE-Lightning Table 2, less what the system keeps", bandwidth="taken as the L4 host's",
        flops="MoE-Lightning artifact, T4 host",
    ),
    "xeon-8380": _host(
        "Xeon Platinum 8380, one socket", 256, 150, 2.4, 40,
        memory="assumed", bandwidth="MoE-Lens, used on its testbed", flops="assumed: 40 cores AVX-512 at 1.9 GHz",
    ),
    "xeon-6426y": _host(
        "2 x Xeon Gold 6426Y", 250, 357, 2.43, 32,
        memory="SpecMoEOff Table 1", bandwidth="SpecMoEOff Table 1", flops="SpecMoEOff Table 1",
    ),
    "xeon-5418y": _host(
        "Xeon Gold 5418Y", 190, 197, 1.45, 24,
        memory="SpecMoEOff Table 1", bandwidth="SpecMoEOff Table 1", flops="SpecMoEOff Table 1",
    ),
    "desktop-ddr5-128": _host(
        "Desktop, 16 cores, 2 channels of DDR5-5600, 128 GB", 124, 70, 1.2, 16,
        memory="assumed", bandwidth="assumed: 78 % of 89.6 GB/s nominal", flops="assumed: AVX2 at 4.5 GHz",
    ),
    "server-ddr5-512": _host(
        "Server, 32 cores, 8 channels of DDR5-4800, 512 GB", 504, 240, 2.5, 32,
        memory="assumed", bandwidth="assumed: 78 % of 307 GB/s nominal", flops="assumed: AVX-512 at 2.5 GHz",
    ),
}  # fmt: skip

DEFAULT_HOST = {
    "t4": "gcp-t4-24",
    "l4": "gcp-l4-24",
    "rtx3090": "desktop-ddr5-128",
    "rtx4090": "desktop-ddr5-128",
    "rtx5090": "desktop-ddr5-128",
}
"""The host that a GPU preset is planned with when none is named; for others `server-ddr5-512`."""


def preset_profile(
    gpu: str, host: str | None = None, num_gpus: int = 1, *, h2d_bytes_per_s: float | None = None
) -> HardwareProfile:
    """A GPU preset in a host preset. Several GPUs share the one link speed (the paper's assumption) unless
    `h2d_bytes_per_s` gives that of the machine; it then holds for both directions."""
    if gpu not in GPU_PRESETS:
        raise ValueError(f"no GPU preset {gpu!r}; there are {', '.join(GPU_PRESETS)}")
    host = host or DEFAULT_HOST.get(gpu, "server-ddr5-512")
    if host not in HOST_PRESETS:
        raise ValueError(f"no host preset {host!r}; there are {', '.join(HOST_PRESETS)}")
    card, box = GPU_PRESETS[gpu], HOST_PRESETS[host]
    level = card.level
    link = card.link
    sources = {**card.sources, **box.sources}
    if h2d_bytes_per_s is not None:
        link = HostLink(
            h2d_bytes_per_s=h2d_bytes_per_s,
            d2h_bytes_per_s=h2d_bytes_per_s,
            bidirectional_share=link.bidirectional_share,
            latency_s=link.latency_s,
        )
        sources |= {"link.h2d_bytes_per_s": "given", "link.d2h_bytes_per_s": "given"}
    return HardwareProfile(
        name=f"{f'{num_gpus}x' if num_gpus > 1 else ''}{gpu} in {host}",
        gpu=GpuLevel(
            name=level.name,
            memory_bytes=level.memory_bytes,
            bandwidth_bytes_per_s=level.bandwidth_bytes_per_s,
            flops_per_s=level.flops_per_s,
            num_gpus=num_gpus,
        ),
        cpu=box.level,
        link=link,
        sources=sources,
    )
