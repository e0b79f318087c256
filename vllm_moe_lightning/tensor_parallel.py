"""One tensor-parallel rank's share of a model and of a machine: what each worker holds, and what it may use.

A plan is made once, for one rank; all ranks follow it.
"""

from __future__ import annotations

from dataclasses import replace

from msgspec.structs import replace as replace_struct

from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.hardware import EMULATED_GPU_NAME, HardwareProfile, HostLimits
from vllm_moe_lightning.model_spec import AttentionSpec, MoeModelSpec


def model_of_rank(spec: MoeModelSpec, num_ranks: int) -> MoeModelSpec:
    """The sizes of a rank's slice. Router and hidden states are whole on every rank.

    Raises UnsupportedError for a size that the ranks cannot share evenly.
    """
    if num_ranks == 1:
        return spec
    attention = spec.attention
    kv_heads = attention.num_kv_heads
    _require_divisible(spec, "attention heads", attention.num_q_heads, num_ranks)
    _require_divisible(spec, "intermediate size of an expert", spec.expert_intermediate, num_ranks)
    if kv_heads % num_ranks and num_ranks % kv_heads:
        raise UnsupportedError(
            f"{spec.name}: {kv_heads} key-value heads can be neither shared nor copied evenly by {num_ranks} "
            f"tensor-parallel ranks; {_cure(kv_heads)}"
        )
    return replace(
        spec,
        vocab=-(-spec.vocab // num_ranks),
        expert_intermediate=spec.expert_intermediate // num_ranks,
        shared_intermediate=-(-spec.shared_intermediate // num_ranks),
        dense_intermediate=-(-spec.dense_intermediate // num_ranks),
        attention=AttentionSpec.grouped_query(
            spec.hidden, attention.num_q_heads // num_ranks, max(1, kv_heads // num_ranks), attention.head_dim
        ),
    )


def _require_divisible(spec: MoeModelSpec, what: str, value: int, num_ranks: int) -> None:
    if value % num_ranks:
        raise UnsupportedError(
            f"{spec.name}: the {what}, {value}, cannot be divided by {num_ranks} tensor-parallel ranks; {_cure(value)}"
        )


def _cure(value: int) -> str:
    fitting = [ranks for ranks in range(1, 9) if value % ranks == 0]
    return f"give --tensor-parallel-size one of {', '.join(map(str, fitting))}"


def machine_of_rank(profile: HardwareProfile, num_ranks: int) -> HardwareProfile:
    """One GPU, and an equal share of host memory, cores and link: they are split, not counted once for each rank."""
    if num_ranks == 1 and profile.gpu.num_gpus == 1:
        return profile
    gpu, cpu, link, limits = profile.gpu, profile.cpu, profile.link, profile.limits
    # The emulated device has no memory of its own, only a part of the host's.
    gpu_ranks = num_ranks if gpu.name == EMULATED_GPU_NAME else 1

    def share(num_bytes: int | None) -> int | None:
        return None if num_bytes is None else num_bytes // num_ranks

    return replace_struct(
        profile,
        name=profile.name if num_ranks == 1 else f"a rank's {num_ranks}th of {profile.name}",
        gpu=replace_struct(gpu, num_gpus=1, memory_bytes=gpu.memory_bytes // gpu_ranks),
        cpu=replace_struct(
            cpu,
            memory_bytes=cpu.memory_bytes // num_ranks,
            bandwidth_bytes_per_s=cpu.bandwidth_bytes_per_s / num_ranks,
            flops_per_s=cpu.flops_per_s / num_ranks,
            num_threads=max(1, cpu.num_threads // num_ranks),
        ),
        link=replace_struct(
            link,
            h2d_bytes_per_s=link.h2d_bytes_per_s / num_ranks,
            d2h_bytes_per_s=link.d2h_bytes_per_s / num_ranks,
        ),
        limits=HostLimits(
            cgroup_memory_bytes=share(limits.cgroup_memory_bytes), memlock_bytes=share(limits.memlock_bytes)
        ),
    )
