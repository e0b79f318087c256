"""What balances micro-batches, by the cost model: a new token's work against that of one context token it reads."""

from __future__ import annotations

from dataclasses import replace

from vllm_moe_lightning.cost_model import TaskCosts, task_costs
from vllm_moe_lightning.hardware import HardwareProfile
from vllm_moe_lightning.model_spec import MoeModelSpec
from vllm_moe_lightning.pipeline.batching import QUERY_TOKEN_COST
from vllm_moe_lightning.workload import HrmPolicy, SweepLoad

MORE_SEQS = 1.25
"""The loads between which a token's own share is measured: what a micro-batch costs with none is nobody's."""


def query_token_cost(spec: MoeModelSpec, profile: HardwareProfile, policy: HrmPolicy, load: SweepLoad) -> int:
    """Seconds that one more token takes outside of attention, over the seconds in which attention reads one context
    token; at least 1. QUERY_TOKEN_COST for a load that reads no context."""
    share = load.divided(policy.num_micro_batches)
    read = share.decode_seqs * share.decode_context  # by decoding rows; prompts' attention is another kernel
    if not read:
        return QUERY_TOKEN_COST
    costs = task_costs(spec, profile, policy, load)
    more = task_costs(spec, profile, policy, replace(load, decode_seqs=load.decode_seqs * MORE_SEQS))
    token_s = (_outside_of_attention_s(more) - _outside_of_attention_s(costs)) / ((MORE_SEQS - 1) * share.decode_seqs)
    decoding = task_costs(spec, profile, policy, replace(load, prefill_seqs=0.0))
    context_token_s = (decoding.attention_s + decoding.device_attention_s) / read
    return max(1, round(token_s / context_token_s))


def _outside_of_attention_s(costs: TaskCosts) -> float:
    return costs.pre_attention_s + costs.moe_post_attention_s
