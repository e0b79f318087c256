"""Random machines, models and workloads for planner tests: from far too small to everything fits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from vllm_moe_lightning.hardware import CpuLevel, DiskLevel, GpuLevel, HardwareProfile, HostLink
from vllm_moe_lightning.model_spec import AttentionSpec, MoeModelSpec, WeightWidths
from vllm_moe_lightning.policy.limits import Batching, PlanLimits
from vllm_moe_lightning.workload import Workload

GIB = 1 << 30


@dataclass(frozen=True)
class Draw:
    model: MoeModelSpec
    hardware: HardwareProfile
    workload: Workload
    limits: PlanLimits

    @property
    def all(self) -> tuple[MoeModelSpec, HardwareProfile, Workload, PlanLimits]:
        return self.model, self.hardware, self.workload, self.limits


def draw(seed: int, *, small: bool = False) -> Draw:
    """`small`: a grid of few rows, for tests that plan many times."""
    rng = np.random.default_rng([2411, 11217, seed])
    model = _model(rng)
    has_disk = rng.random() < 0.2 and model.num_moe_layers <= 16
    max_num_seqs = int(10 ** rng.uniform(0.0, 3.0 if small or has_disk or rng.random() < 0.8 else 5.0))
    limits = PlanLimits(
        batching=Batching(rng.choice([b.value for b in Batching])),
        max_num_seqs=max_num_seqs,
        prefill_tokens_per_sweep=rng.choice([None, None, 1024, 16384]),
        lookahead=int(rng.integers(1, 4)),
    )
    prompt_len = float(10 ** rng.uniform(0.5, 3.5))
    return Draw(model, _hardware(rng, model, has_disk), Workload(prompt_len, int(10 ** rng.uniform(0.0, 3.0))), limits)


def _model(rng: np.random.Generator) -> MoeModelSpec:
    hidden = 128 * int(rng.integers(4, 56))
    num_experts = int(2 ** rng.integers(2, 9))
    num_kv_heads = int(2 ** rng.integers(0, 5))
    num_layers = int(rng.integers(2, 64))
    return MoeModelSpec(
        name="drawn",
        model_type="drawn",
        num_layers=num_layers,
        num_dense_layers=int(rng.integers(0, min(4, num_layers))),
        hidden=hidden,
        vocab=int(10 ** rng.uniform(4.0, 5.3)),
        num_experts=num_experts,
        top_k=int(rng.integers(1, min(num_experts, 8) + 1)),
        expert_intermediate=128 * int(rng.integers(4, 112)),
        attention=AttentionSpec.grouped_query(
            hidden, num_kv_heads * int(2 ** rng.integers(0, 4)), num_kv_heads, int(rng.choice([64, 128]))
        ),
        shared_intermediate=int(rng.choice([0, 0, 2048])),
        dense_intermediate=4 * hidden,
        widths=WeightWidths(expert_bytes=float(rng.choice([0.53, 1.0, 2.0]))),
        kv_bytes_per_element=float(rng.choice([1.0, 2.0])),
    )


def _hardware(rng: np.random.Generator, model: MoeModelSpec, has_disk: bool) -> HardwareProfile:
    def log_uniform(low: float, high: float) -> float:
        return float(10 ** rng.uniform(np.log10(low), np.log10(high)))

    experts = model.expert_bytes_total
    gpu_bytes = 1.2 * model.always_resident_bytes + 3 * model.expert_layer_bytes + log_uniform(0.01, 1.5) * experts
    return HardwareProfile(
        name="drawn",
        gpu=GpuLevel(
            name="drawn",
            memory_bytes=int(gpu_bytes) + GIB,
            bandwidth_bytes_per_s=log_uniform(1e11, 8e12),
            flops_per_s=log_uniform(1e13, 2e15),
        ),
        cpu=CpuLevel(
            name="drawn",
            memory_bytes=int(experts * log_uniform(0.5, 10.0)) + GIB,
            bandwidth_bytes_per_s=log_uniform(1e10, 6e11),
            flops_per_s=log_uniform(1e11, 1e13),
            num_threads=int(rng.integers(1, 128)),
        ),
        link=HostLink(
            h2d_bytes_per_s=log_uniform(2e9, 1e11),
            d2h_bytes_per_s=log_uniform(2e9, 1e11),
            bidirectional_share=float(rng.uniform(0.5, 1.0)),
        ),
        disk=DiskLevel(
            name="drawn",
            capacity_bytes=int(log_uniform(0.1, 3.0) * experts) + GIB,
            read_bytes_per_s=log_uniform(1e9, 1e10),
        )
        if has_disk
        else None,
    )


def with_memory(
    hardware: HardwareProfile, *, gpu_bytes: int | None = None, host_bytes: int | None = None
) -> HardwareProfile:
    if gpu_bytes is not None:
        hardware = replace(hardware, gpu=replace(hardware.gpu, memory_bytes=gpu_bytes))
    if host_bytes is not None:
        hardware = replace(hardware, cpu=replace(hardware.cpu, memory_bytes=host_bytes))
    return hardware
