"""Seconds of single kernels: Eqs 8 and 14 with the profile's efficiencies, and the FLOPs and bytes of each kernel.

cost_model adds them up to tasks and sweeps. FLOPs of attention count QK^T and PV, bytes of experts those that are
touched; the artifact's counts, which do neither, are in paper_model.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_moe_lightning.hardware import HardwareProfile
from vllm_moe_lightning.model_spec import FLOPS_PER_PARAM, MoeModelSpec
from vllm_moe_lightning.rowwise import larger, smaller
from vllm_moe_lightning.workload import SweepLoad

# Float32 logits are written once and read by the passes of sampling: temperature, maximum, softmax.
LOGITS_BYTES = 4
LOGITS_PASSES = 4


@dataclass(frozen=True)
class Machine:
    """The profile's peaks with the efficiencies applied, and Eqs 8 and 14 on each processor."""

    profile: HardwareProfile

    def gpu_s(
        self, flops: float, num_bytes: float, flops_efficiency: float, bandwidth_efficiency: float | None = None
    ) -> float:
        gpu, reached = self.profile.gpu, self.profile.efficiencies
        flops_s = flops / (gpu.total_flops_per_s * flops_efficiency)
        memory_s = num_bytes / (gpu.total_bandwidth_bytes_per_s * (bandwidth_efficiency or reached.gpu_bandwidth))
        return larger(flops_s, memory_s) + (1.0 - reached.gpu_overlap) * smaller(flops_s, memory_s)

    def gpu_gemm_s(self, flops: float, num_bytes: float) -> float:
        return self.gpu_s(flops, num_bytes, self.profile.efficiencies.gpu_gemm)

    def gpu_experts_s(self, flops: float, num_bytes: float) -> float:
        reached = self.profile.efficiencies
        return self.gpu_s(flops, num_bytes, reached.gpu_experts or reached.gpu_gemm, reached.gpu_experts_bandwidth)

    def gpu_attention_s(self, flops: float, num_bytes: float) -> float:
        return self.gpu_s(flops, num_bytes, self.profile.efficiencies.gpu_attention)

    def cpu_attention_s(self, flops: float, num_bytes: float) -> float:
        cpu, reached = self.profile.cpu, self.profile.efficiencies
        return larger(
            flops / (cpu.flops_per_s * reached.cpu_attention_flops),
            num_bytes / (cpu.bandwidth_bytes_per_s * reached.cpu_attention_bandwidth),
        )

    def cpu_prompt_attention_s(self, flops: float, num_bytes: float) -> float:
        cpu, reached = self.profile.cpu, self.profile.efficiencies
        return larger(
            flops / (cpu.flops_per_s * (reached.cpu_prompt_attention or reached.cpu_attention_flops)),
            num_bytes / (cpu.bandwidth_bytes_per_s * reached.cpu_attention_bandwidth),
        )

    def cpu_experts_s(self, flops: float, num_bytes: float) -> float:
        cpu, reached = self.profile.cpu, self.profile.efficiencies
        return larger(
            flops / (cpu.flops_per_s * reached.cpu_gemm),
            num_bytes / (cpu.bandwidth_bytes_per_s * reached.cpu_experts_bandwidth),
        )


def pre_attention_kernel_s(spec: MoeModelSpec, machine: Machine, load: SweepLoad, prompt_pairs: float) -> float:
    """QKV projection of all tokens, and attention of prompts on the GPU, of so many (query, key) pairs."""
    attention = spec.attention
    params = attention.pre_params
    projection_s = machine.gpu_gemm_s(FLOPS_PER_PARAM * params * load.tokens, params * spec.widths.linear_bytes)
    prompt_s = machine.gpu_attention_s(attention.prefill_flops_per_pair * prompt_pairs, 0.0)
    return projection_s + prompt_s + machine.profile.overheads.gpu_task_s


def attention_work(spec: MoeModelSpec, load: SweepLoad) -> tuple[float, float]:
    """(FLOPs, bytes) of decode attention of one layer: QK^T and PV, each cached token read once."""
    read = load.decode_seqs * spec.mean_context_read(load.decode_context)
    new = load.decode_seqs * (spec.attention.q_elements_per_token + spec.attention.out_elements_per_token)
    return (
        spec.attention.decode_flops_per_pair * read,
        read * spec.kv_bytes_per_token_layer + new * spec.widths.activation_bytes,
    )


def experts_work(spec: MoeModelSpec, tokens: float) -> tuple[float, float]:
    """(FLOPs, bytes) of the routed experts of one layer: k experts per token, weights of those touched, activations."""
    flops = FLOPS_PER_PARAM * spec.params_per_expert * spec.top_k * tokens
    weights = spec.expected_experts_touched(tokens) * spec.params_per_expert * spec.widths.expert_bytes
    elements_per_token = 2 * spec.hidden + spec.top_k * (3 * spec.expert_intermediate + 2 * spec.hidden)
    return flops, weights + tokens * elements_per_token * spec.widths.activation_bytes


def _linear_s(machine: Machine, params: float, tokens: float, bytes_per_param: float) -> float:
    return machine.gpu_gemm_s(FLOPS_PER_PARAM * params * tokens, params * bytes_per_param) if params else 0.0


def post_attention_kernel_s(spec: MoeModelSpec, machine: Machine, load: SweepLoad) -> tuple[float, float, float]:
    """Output projection and FFN: (a dense layer, an MoE layer without its routed experts, the routed experts)."""
    widths, tokens = spec.widths, load.tokens
    common_s = _linear_s(machine, spec.attention.post_params, tokens, widths.linear_bytes)
    common_s += machine.profile.overheads.gpu_task_s
    dense_s = common_s + _linear_s(machine, spec.dense_params_per_layer, tokens, widths.linear_bytes)
    moe_s = common_s + _linear_s(machine, spec.shared_params_per_layer, tokens, widths.linear_bytes)
    moe_s += _linear_s(machine, spec.router_params_per_layer, tokens, widths.other_bytes)
    return dense_s, moe_s, machine.gpu_experts_s(*experts_work(spec, tokens))


def head_s(spec: MoeModelSpec, machine: Machine, load: SweepLoad) -> float:
    """LM head and sampling, once per sweep for the last token of every sequence."""
    params = spec.vocab * spec.hidden
    logits_bytes = load.seqs * spec.vocab * LOGITS_BYTES * LOGITS_PASSES
    return machine.gpu_gemm_s(FLOPS_PER_PARAM * params * load.seqs, params * spec.widths.other_bytes + logits_bytes)
