"""What gpu_check.py runs at which size: the model, the plan for it on the machine as measured, and the cost model's
word on a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from benchmarks.gpu_device import DeviceKind, half_types
from benchmarks.torch_decoder import DecoderConfig
from vllm_moe_lightning.config import MoeLightningConfig
from vllm_moe_lightning.cost_model import sweep_cost
from vllm_moe_lightning.errors import MoeLightningError
from vllm_moe_lightning.hardware import MIB, HardwareProfile
from vllm_moe_lightning.host_limits import available_memory_bytes, usable_cpus
from vllm_moe_lightning.host_probes import QUICK, Effort
from vllm_moe_lightning.model_spec import AttentionSpec, MoeModelSpec
from vllm_moe_lightning.policy.limits import PlanLimits
from vllm_moe_lightning.policy.search import PlannedPolicy, find_policy
from vllm_moe_lightning.profiling import attention_threads
from vllm_moe_lightning.prompt_place import prompt_places
from vllm_moe_lightning.workload import SweepLoad, Workload

GIB = 1 << 30
STREAM_OF = {"gpu": "compute", "cpu": "cpu", "h2d": "h2d", "d2h": "d2h"}
UNPLANNED_MICRO_BATCHES, UNPLANNED_SEQS = 4, 256
"""Where the machine could not be measured, or no plan be made."""
SMALL_BATCH_LAYERS, LEAST_LAYERS = 4, 3


@dataclass(frozen=True)
class Check:
    """What is run: a model's layer shapes, how many of them, and for whom."""

    model: DecoderConfig
    context_len: int
    gen_len: int
    max_num_seqs: int
    device_memory_bytes: int
    effort: Effort
    most_rounds: int
    steps_per_round: int
    host_memory_bytes: int | None = None
    """Where the model was cut down to it."""

    @property
    def small_batch_model(self) -> DecoderConfig:
        """Fewer layers: half of their experts, and two slots beside them, fit into 16 GB."""
        return replace(self.model, num_layers=min(SMALL_BATCH_LAYERS, self.model.num_layers))

    def require_host_memory(self) -> None:
        """Raises MoeLightningError where there are too few layers for a pipeline."""
        if self.model.num_layers < LEAST_LAYERS:
            raise MoeLightningError(
                f"{LEAST_LAYERS} layers of Mixtral-8x7B's shapes in half of the host's memory are needed, and it has "
                f"{(self.host_memory_bytes or 0) / GIB:.1f} GiB available: take a machine with more"
            )


MIXTRAL_LAYER = DecoderConfig(
    num_layers=8,
    hidden=4096,
    intermediate=14336,
    num_experts=8,
    top_k=2,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=32000,
    dtype=torch.bfloat16,
)
TINY_LAYER = DecoderConfig(num_layers=3, hidden=64, intermediate=96, num_experts=4, num_heads=4, num_kv_heads=2)
TINY_EFFORT = Effort(repeats=3, buffer_bytes=4 * MIB, kv_bytes=8 * MIB, gemm_size=256, disk_bytes=8 * MIB)


def check_for(kind: DeviceKind, device_memory_gib: float) -> Check:
    if kind is DeviceKind.EMULATED:
        return Check(TINY_LAYER, 48, 16, 64, 2 * MIB, TINY_EFFORT, most_rounds=1, steps_per_round=2)
    dtype = half_types(kind)[-1]
    layer_bytes = 3 * MIXTRAL_LAYER.num_experts * MIXTRAL_LAYER.hidden * MIXTRAL_LAYER.intermediate * dtype.itemsize
    # Half of host memory: keys and values come beside them, and a layer more while they are moved.
    available = available_memory_bytes()
    num_layers = min(MIXTRAL_LAYER.num_layers, int(available * 0.5 // layer_bytes))
    model = replace(MIXTRAL_LAYER, num_layers=num_layers, dtype=dtype)
    budget_bytes = int(device_memory_gib * GIB)
    return Check(
        model, 544, 64, 1024, budget_bytes, QUICK, most_rounds=5, steps_per_round=3, host_memory_bytes=available
    )


def spec_of(config: DecoderConfig) -> MoeModelSpec:
    return MoeModelSpec(
        name=f"{config.num_layers} layers of the plain decoder",
        model_type="mixtral",
        num_layers=config.num_layers,
        num_dense_layers=0,
        hidden=config.hidden,
        vocab=config.vocab_size,
        num_experts=config.num_experts,
        top_k=config.top_k,
        expert_intermediate=config.intermediate,
        attention=AttentionSpec.grouped_query(config.hidden, config.num_heads, config.num_kv_heads, config.head_dim),
        tied_embeddings=True,
    )


def capped(check: Check, profile: HardwareProfile) -> HardwareProfile:
    """The machine with one GPU of the budget's size."""
    memory_bytes = int(check.device_memory_bytes / profile.efficiencies.gpu_memory)
    gpu = msgspec.structs.replace(profile.gpu, memory_bytes=memory_bytes, num_gpus=1)
    return msgspec.structs.replace(profile, gpu=gpu)


def plan_for(check: Check, profile: HardwareProfile) -> PlannedPolicy:
    """No layer is resident, so that what the stock-like arm keeps its KV in stays free."""
    spec = spec_of(check.model)
    limits = PlanLimits(
        max_num_seqs=check.max_num_seqs,
        num_resident_layers=0,
        attention_on_gpu=False,
        ffn_on_gpu=True,
        kv_on_host=True,
        **prompt_places(MoeLightningConfig(), spec, profile),
    )
    workload = Workload(prompt_len=check.context_len - check.gen_len // 2, gen_len=check.gen_len)
    return find_policy(spec, profile, workload, limits)


def options_of(check: Check, planned: PlannedPolicy | None) -> tuple[MoeLightningConfig, int]:
    """(options of the engine, sequences of a step), as planned or, where there is no plan, fixed."""
    policy = None if planned is None else planned.policy
    options = MoeLightningConfig(
        num_micro_batches=UNPLANNED_MICRO_BATCHES if policy is None else policy.num_micro_batches,
        num_resident_layers=0,
        lookahead=2 if policy is None else policy.lookahead,
        attention_threads=attention_threads(usable_cpus()),
    )
    return options, min(UNPLANNED_SEQS, check.max_num_seqs) if policy is None else policy.batch_size


def predicted_and_measured(
    check: Check, profile: HardwareProfile, planned: PlannedPolicy, row: dict[str, Any]
) -> dict[str, Any]:
    """Of CGOPipe's decode step, by resource: the cost model's seconds beside those of the streams."""
    load = SweepLoad(decode_seqs=planned.policy.batch_size, decode_context=check.context_len)
    cost = sweep_cost(spec_of(check.model), profile, planned.policy, load)
    by_resource = {
        resource: {"predicted_s": float(cost.busy_s[resource]), "measured_s": row["busy_s"][stream]["median"]}
        for resource, stream in STREAM_OF.items()
    }
    return {
        "resources": by_resource,
        "predicted_step_s": float(cost.time_s),
        "measured_step_s": row["step_s"]["median"],
        "error": float(cost.time_s) / row["step_s"]["median"] - 1.0,
        "predicted_bottleneck": str(cost.bottleneck),
        "measured_bottleneck": max(by_resource, key=lambda resource: by_resource[resource]["measured_s"]),
    }
