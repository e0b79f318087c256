"""The one table that a start prints: every value of the plan, and why it is what it is. Text for a log."""

from __future__ import annotations

from vllm_moe_lightning.engine_plan import EnginePlan
from vllm_moe_lightning.hardware import MIB
from vllm_moe_lightning.resources import LABELS

IDLE = 0.005  # shares below this are left out


def plan_table(plan: EnginePlan, model: str, num_ranks: int) -> str:
    """Lines under a heading. Sizes are of one rank."""
    rows = [("value", "chosen", "why"), *_rows(plan)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"  {name:<{widths[0]}}  {chosen:>{widths[1]}}  {why}" for name, chosen, why in rows]
    ranks = f", each of {num_ranks} ranks" if num_ranks > 1 else ""
    predicted = plan.predicted
    busy = ", ".join(
        f"{LABELS[name]} {share:.0%}"
        for name, share in sorted(predicted.busy.items(), key=lambda item: -item[1])
        if share > IDLE
    )
    return "\n".join(
        [
            f"plan for {model} on {plan.hardware}{ranks}:",
            *lines,
            f"  predicted: {predicted.generated_tokens_per_s:.1f} generated tokens/s "
            f"({predicted.total_tokens_per_s:.1f} with prompts), a sweep of {predicted.sweep_s:.3g} s; bottleneck "
            f"{LABELS[predicted.bottleneck]}; busy: {busy}",
        ]
    )


def _rows(plan: EnginePlan) -> list[tuple[str, str, str]]:
    chosen = {
        "expected_prompt_tokens": f"{plan.expected_prompt_tokens:g}",
        "expected_generation_tokens": f"{plan.expected_generation_tokens:g}",
        "max_model_len": str(plan.max_model_len),
        "max_num_seqs": str(plan.max_num_seqs),
        "max_num_batched_tokens": str(plan.max_num_batched_tokens),
        "prefill_tokens_per_sweep": str(plan.prefill_tokens_per_sweep),
        "num_micro_batches": f"{plan.num_micro_batches} x {plan.micro_batch_size}",
        "attention": "on the device" if plan.attention_on_device else "on the CPU",
        "prefill_attention": "on the device" if plan.prompts_on_device else "on the CPU",
        "num_resident_layers": str(plan.num_resident_layers),
        "expert_slots": str(plan.expert_slots),
        "fetched_up_to_tokens": str(plan.fetched_up_to_tokens),
        "page_bytes": f"{plan.page_bytes / MIB:.2f} MiB",
        "kv_bytes": f"{plan.kv_bytes / MIB:.1f} MiB",
    }
    rows = [(name, value, plan.reasons[name]) for name, value in chosen.items() if name in plan.reasons]
    # What else was taken into account: limits that bind, options that are not figures of the plan.
    return rows + [(name, "", why) for name, why in plan.reasons.items() if name not in chosen]
