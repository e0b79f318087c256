"""What a policy takes of device and host memory, item by item, in the engine's layout.

Decides nothing: `MemoryNeed` says what is needed and what there is, and the planner compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vllm_moe_lightning.affine import Affine, affine_terms
from vllm_moe_lightning.attention_memory import (
    CONTEXT_FRAME_BYTES,
    PROMPT_ATTENTION_BYTES,
    QUERY_COPIES,
    mask_bytes_per_pair,
)
from vllm_moe_lightning.cost_model import hidden_via_host, pages_per_layer
from vllm_moe_lightning.hardware import HardwareProfile
from vllm_moe_lightning.kernel_costs import LOGITS_BYTES
from vllm_moe_lightning.model_spec import MoeModelSpec
from vllm_moe_lightning.policy.policy import NUM_SLOTS
from vllm_moe_lightning.rowwise import larger, smaller
from vllm_moe_lightning.workload import HrmPolicy, SweepLoad, Workload

# Logits in float32, and the copy that sampling works on.
LOGITS_COPIES = 2
# Hidden state and residual of every token of a sweep.
HIDDEN_COPIES = 2
# Gate and up side by side, and their product.
MOE_INTERMEDIATES = 3


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes by item, and what may be used."""

    items: Mapping[str, float]
    budget_bytes: int

    @property
    def total_bytes(self) -> float:
        return sum(self.items.values())

    @property
    def free_bytes(self) -> float:
        return self.budget_bytes - self.total_bytes

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.budget_bytes


def _activation_bytes(
    spec: MoeModelSpec, profile: HardwareProfile, workload: Workload, policy: HrmPolicy, peak: SweepLoad
) -> float:
    """Widest point of a forward pass over a micro-batch: experts' inputs, gate and up, their product, outputs; or
    Q, K, V and the attention output, and what attention of prompts takes on the GPU."""
    k, width = spec.top_k, spec.widths.activation_bytes
    experts = k * (2 * spec.hidden + MOE_INTERMEDIATES * spec.expert_intermediate)
    ffn = max(experts, 3 * max(spec.shared_intermediate, spec.dense_intermediate))
    attention = spec.attention.q_elements_per_token + spec.attention.kv_elements_per_token
    attention += spec.attention.out_elements_per_token
    longest_sequence = workload.prompt_len_max or workload.prompt_len
    if workload.buffers is not None:
        longest_sequence = max(longest_sequence, workload.buffers.longest_sequence)
    # A share of the sweep; but one prompt may have all of its prefill tokens, and rows are not cut.
    longest_row = smaller(peak.prefill_tokens, longest_sequence)
    tokens = larger(peak.divided(policy.num_micro_batches).tokens, longest_row)
    attention_bytes = tokens * attention * width
    if policy.prompts_on_gpu or policy.context_query_tokens:
        num_keys = larger(longest_row, _frame_tokens(spec, profile, workload, policy))
        attention_bytes += _prompt_attention_bytes(spec, tokens, num_keys) * profile.gpu.num_gpus
    return larger(tokens * ffn * width, attention_bytes)


def _prompt_attention_bytes(spec: MoeModelSpec, num_queries: float, num_keys: float) -> float:
    """On each GPU, for a moment: slices, or for small prompts all at once; and the output that kernels for whole
    prompts make (kernels/sdpa.py)."""
    attention, width = spec.attention, spec.widths.activation_bytes
    group = attention.num_q_heads // attention.num_kv_heads
    at_once = num_queries * num_keys * group * mask_bytes_per_pair(width)
    at_once += num_queries * QUERY_COPIES * attention.out_elements_per_token * width
    at_once += num_keys * spec.kv_bytes_per_token_layer
    return smaller(PROMPT_ATTENTION_BYTES, at_once) + num_queries * attention.out_elements_per_token * width


def _frame_tokens(spec: MoeModelSpec, profile: HardwareProfile, workload: Workload, policy: HrmPolicy) -> float:
    """Of one frame for prompts' cached context (pipeline/context_frames), which is there from the start on each GPU."""
    if workload.buffers is None or policy.attention_on_gpu or not policy.context_query_tokens:
        return 0.0
    return min(
        workload.buffers.longest_sequence, CONTEXT_FRAME_BYTES * profile.gpu.num_gpus // spec.kv_bytes_per_token_layer
    )


def _staging_bytes(spec: MoeModelSpec, peak: SweepLoad) -> float:
    """Packed Q, K and V of a sweep's tokens: every micro-batch has its own region (pipeline/host_attention)."""
    attention = spec.attention
    values_per_token = attention.q_elements_per_token + attention.kv_elements_per_token
    return peak.tokens * values_per_token * spec.widths.activation_bytes


def kv_bytes(spec: MoeModelSpec, workload: Workload, policy: HrmPolicy) -> float:
    """KV cache of N sequences at their full length: admission reserves it, so that none is ever preempted."""
    kv = workload.kv
    return kv.num_blocks(policy.batch_size, workload.final_context) * kv.tokens_per_block * spec.kv_bytes_per_token


def _gpu_items(
    spec: MoeModelSpec, profile: HardwareProfile, workload: Workload, policy: HrmPolicy, peak: SweepLoad
) -> Mapping[str, float]:
    share = peak.divided(policy.num_micro_batches)
    hidden_tokens = share.tokens * 2 if hidden_via_host(policy, peak) else peak.tokens
    hidden_tokens = larger(hidden_tokens, policy.batch_size)
    hidden_bytes = spec.hidden * spec.widths.activation_bytes
    context = workload.final_context * spec.kv_bytes_per_token_layer
    frames = NUM_SLOTS * policy.micro_batch_size * context if policy.attention_on_gpu else 0.0
    streams = policy.ffn_on_gpu and policy.num_resident_layers < spec.num_moe_layers
    return MappingProxyType(
        {
            "weights that stay (attention, embeddings, shared experts)": spec.always_resident_bytes,
            "resident experts": policy.num_resident_layers * spec.expert_layer_bytes,
            "slots of streamed experts": NUM_SLOTS * spec.expert_layer_bytes if streams else 0.0,
            "slots of fetched experts": workload.expert_slots * spec.expert_layer_bytes / spec.num_experts,
            # Every GPU holds the whole hidden state; the rest is split among them.
            "hidden states": hidden_tokens * hidden_bytes * HIDDEN_COPIES * profile.gpu.num_gpus,
            "activations of a micro-batch": _activation_bytes(spec, profile, workload, policy, peak),
            "staging": _staging_bytes(spec, peak),
            "logits": larger(peak.seqs, policy.batch_size) * spec.vocab * LOGITS_BYTES * LOGITS_COPIES,
            "KV cache on the GPU": policy.kv_gpu_ratio * kv_bytes(spec, workload, policy),
            "KV frames": frames * (1.0 - policy.kv_gpu_ratio),
            "frames for prompts' contexts": NUM_SLOTS
            * _frame_tokens(spec, profile, workload, policy)
            * spec.kv_bytes_per_token_layer,
        }
    )


def _host_items(
    spec: MoeModelSpec, profile: HardwareProfile, workload: Workload, policy: HrmPolicy, peak: SweepLoad
) -> Mapping[str, float]:
    on_host = spec.num_moe_layers - policy.num_resident_layers - policy.num_disk_layers
    page_bytes = spec.expert_layer_bytes / pages_per_layer(spec, policy)
    hidden = peak.tokens * spec.hidden * spec.widths.activation_bytes if hidden_via_host(policy, peak) else 0.0
    return MappingProxyType(
        {
            "streamed experts": on_host * spec.expert_layer_bytes,
            "staging of disk pages": NUM_SLOTS * page_bytes if profile.disk is not None else 0.0,
            "KV cache": (1.0 - policy.kv_gpu_ratio) * kv_bytes(spec, workload, policy),
            "hidden states": hidden,
            # On their way down, and attention outputs on their way up.
            "staging": 2 * _staging_bytes(spec, peak),
        }
    )


def gpu_memory(
    spec: MoeModelSpec, profile: HardwareProfile, workload: Workload, policy: HrmPolicy, peak: SweepLoad
) -> MemoryNeed:
    """Of all GPUs together. `peak`: the largest sweep, which is the prefill or the steady state's."""
    return MemoryNeed(_gpu_items(spec, profile, workload, policy, peak), profile.gpu_memory_budget_bytes)


def host_memory(
    spec: MoeModelSpec, profile: HardwareProfile, workload: Workload, policy: HrmPolicy, peak: SweepLoad
) -> MemoryNeed:
    return MemoryNeed(_host_items(spec, profile, workload, policy, peak), profile.host_memory_budget_bytes)


def memory_terms(
    spec: MoeModelSpec, profile: HardwareProfile, workload: Workload, policy: HrmPolicy, peak: SweepLoad
) -> tuple[Affine, Affine]:
    """(GPU, host) bytes as lines in the continuous choices, as long as at least one layer is streamed: with all
    resident the slots are not needed, and the need is less than the line says."""

    def totals(choice: HrmPolicy) -> dict[str, float]:
        return {
            "gpu": sum(_gpu_items(spec, profile, workload, choice, peak).values()),
            "host": sum(_host_items(spec, profile, workload, choice, peak).values()),
        }

    terms = affine_terms(totals, policy)
    return terms["gpu"], terms["host"]
