"""What the planner decided for one engine, as plain data that travels inside vLLM's configuration.

Made once, in the front end (integration/planning); read by the scheduler and by every worker, so that all processes
agree. Decides nothing itself.
"""

from __future__ import annotations

from typing import Any

import msgspec

from vllm_moe_lightning.pipeline.batching import QUERY_TOKEN_COST

GIVEN, PLANNED = "given", "planned"
"""Reasons of an EnginePlan."""
PLAN_KEY = "moe_lightning_plan"
"""Key of `additional_config`. Written by us, not by users."""


class PredictedFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Steady state of continuous batching with all slots taken, by the cost model."""

    generated_tokens_per_s: float
    """Whole job: generated tokens over the time of all sweeps, prefill included."""
    total_tokens_per_s: float
    """Prompt tokens counted too."""
    sweep_s: float
    bottleneck: str
    """A resource's name: gpu, cpu, h2d, d2h, host_memory, disk."""
    busy: dict[str, float]
    """Resource -> share (0..1) of a sweep that it is busy."""


class EnginePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    expected_prompt_tokens: float
    expected_generation_tokens: float
    max_num_seqs: int
    """Sequences in flight: the batch N of the policy."""
    max_num_batched_tokens: int
    """Most tokens of a sweep, decode and prefill together; buffers are sized for it."""
    prefill_tokens_per_sweep: int
    """Prompt tokens that a sweep takes beside its decode tokens when all slots are taken."""
    num_micro_batches: int
    micro_batch_size: int
    query_token_cost: int = QUERY_TOKEN_COST
    """Work of a query token outside of attention, in units of a context token that attention reads: what balances the
    micro-batches."""
    kv_bytes: int
    """Memory for keys and values, per rank: the host's, or with attention on the device the device's."""
    attention_on_device: bool = False
    """By vLLM's own backend, so that only weights are paged."""
    num_resident_layers: int
    block_size: int = 0
    """Tokens per KV block; 0 where the plan does not say."""
    num_kv_blocks: int = 0
    """Of each rank, the null block included: kv_bytes in whole blocks."""
    max_model_len: int = 0
    page_bytes: int = 0
    expert_layer_bytes: int = 0
    """Routed experts of one MoE layer, per rank, as planned with; the worker compares what it has loaded."""
    other_weight_bytes: int = 0
    """All other weights, per rank."""
    hardware: str = ""
    """Name of the machine that was planned for."""
    attention_threads: int = 0
    """Of each rank's CPU attention, when the machine was measured that the plan is for and that the engine runs on. 0:
    the figures are of another machine, or the plan has no attention on the CPU."""
    prompts_on_device: bool = True
    """Attention of prompts without cached context."""
    context_query_tokens: int = 0
    """New tokens of a row with cached context from which on the context comes up to the device. 0: never."""
    cpu_expert_layers: list[tuple[int, int]] = []
    """(most tokens of a sweep, streamed layers whose experts the CPU computes then), ascending; beyond: none."""
    expert_slots: int = 0
    """Experts that have room on the device, one by one; 0: none is fetched."""
    fetched_up_to_tokens: int = 0
    """The largest sweep that fetches experts."""
    reasons: dict[str, str] = {}
    """Name of a value above (or of a vLLM flag) -> why it is what it is: planned, given by the user, ..."""
    predicted: PredictedFigures


def plan_of(vllm_config: Any) -> EnginePlan | None:
    """The plan inside a vLLM configuration; None where the user's options alone decide."""
    additional = vllm_config.additional_config
    raw = additional.get(PLAN_KEY) if isinstance(additional, dict) else None
    return None if raw is None else msgspec.convert(raw, EnginePlan, strict=True)


def store_plan(vllm_config: Any, plan: EnginePlan) -> None:
    """Plain JSON values, since vLLM hashes `additional_config` as JSON. In a dict of its own: the given one may be
    the user's, for the next engine too."""
    vllm_config.additional_config = {**vllm_config.additional_config, PLAN_KEY: msgspec.to_builtins(plan)}


LARGEST_DIFFERENCE = 0.05


def weight_difference(what: str, planned_bytes: int, loaded_bytes: int) -> str | None:
    """A sentence if weights, once loaded, are not what was planned with; a plan that leaves them out says 0."""
    if abs(loaded_bytes - planned_bytes) <= LARGEST_DIFFERENCE * planned_bytes or not planned_bytes:
        return None
    return (
        f"{what} take {loaded_bytes} bytes per rank and were planned with {planned_bytes} "
        f"({loaded_bytes / planned_bytes - 1.0:+.1%}), so the plan's times and memory are off by as much"
    )


def thread_difference(measured: int, threads: int) -> str | None:
    """A sentence if CPU attention has other threads than it was measured with; a plan that does not say has 0."""
    if measured in (0, threads):
        return None
    return (
        f"CPU attention has {threads} threads on this rank and was measured with {measured}: the plan's times of the "
        "CPU are off; if the reason is that only a part of the CPUs is beside the GPU, start the engine on these alone "
        "(numactl --cpunodebind): they are then what is measured"
    )
