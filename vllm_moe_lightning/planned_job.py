"""A planned engine's whole job, predicted: what its slots and sweeps make of so many requests, ends included."""

from __future__ import annotations

from vllm_moe_lightning.engine_plan import EnginePlan, PredictedFigures
from vllm_moe_lightning.hardware import HardwareProfile
from vllm_moe_lightning.job_prediction import Job, SweepLimits, predict_job
from vllm_moe_lightning.model_spec import MoeModelSpec
from vllm_moe_lightning.workload import HrmPolicy


def limits_of(plan: EnginePlan) -> SweepLimits:
    """As the scheduler sets them (integration/request_mix, PrefillShare)."""
    beside = max(plan.prefill_tokens_per_sweep, round(plan.expected_prompt_tokens))
    return SweepLimits(plan.max_num_seqs, min(plan.max_num_batched_tokens, plan.max_num_seqs + beside))


def policy_of(plan: EnginePlan) -> HrmPolicy:
    return HrmPolicy(
        micro_batch_size=plan.micro_batch_size,
        num_micro_batches=plan.num_micro_batches,
        attention_on_gpu=plan.attention_on_device,
        kv_gpu_ratio=float(plan.attention_on_device),
        num_resident_layers=plan.num_resident_layers,
        prefill_tokens_per_sweep=1,  # no sweep parks its hidden states on the host
        prompts_on_gpu=plan.prompts_on_device,
        context_query_tokens=plan.context_query_tokens,
    )


def predict_planned_job(plan: EnginePlan, spec: MoeModelSpec, machine: HardwareProfile, job: Job) -> PredictedFigures:
    """spec, machine: as the plan was made for, of one rank."""
    prediction = predict_job(spec, machine, policy_of(plan), job, limits_of(plan))
    generated_per_s = job.num_generated / prediction.time_s
    busy = {name: seconds / prediction.time_s for name, seconds in prediction.busy_s.items()}
    return PredictedFigures(
        generated_tokens_per_s=generated_per_s,
        total_tokens_per_s=generated_per_s * (1.0 + job.prompt_len / job.gen_len),
        sweep_s=prediction.time_s / prediction.num_sweeps,
        bottleneck=max(busy, key=lambda name: busy[name]),
        busy=busy,
    )
