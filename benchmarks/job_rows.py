"""What the job benchmark says of its arms: predictions before they run, rows of figures after, and the summary.

A prediction steps the cost model over the job's sweeps (vllm_moe_lightning/job_prediction.py). Nothing is fitted to
these engines.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.job_checkpoint import CheckpointShape
from benchmarks.job_engine import JobRun, Started
from vllm_moe_lightning.config import MoeLightningConfig
from vllm_moe_lightning.job_prediction import Job, JobPrediction, SweepLimits, predict_job
from vllm_moe_lightning.planned_job import limits_of, policy_of
from vllm_moe_lightning.prompt_place import prompt_places
from vllm_moe_lightning.workload import HrmPolicy

BLOCK_SIZE = 32  # tokens: short sequences waste less of the last block than with the planner's 128
MIXED, PHASED, DEFAULTS = "mixed", "phased", "vllm defaults"
ARMS = (MIXED, PHASED, DEFAULTS)
PREDICTED_GAIN = 1.3
"""Mixed sweeps are judged by the jobs for which the model predicts at least so much over phases."""


@dataclass(frozen=True)
class Shape:
    name: str
    job: Job
    h2d_gb_per_s: float
    slots: int = 64
    """Sequences that the KV cache of all arms holds."""

    @property
    def max_model_len(self) -> int:
        return self.job.prompt_len + self.job.gen_len

    @property
    def num_blocks(self) -> int:
        return self.slots * -(-self.max_model_len // BLOCK_SIZE)

    def kv_bytes(self, checkpoint: CheckpointShape) -> int:
        return (self.num_blocks + 1) * BLOCK_SIZE * checkpoint.kv_bytes_per_token  # and vLLM's null block

    @property
    def running_by_need(self) -> int:
        """Sequences that run at once where blocks are taken as they are needed: the cache over a sequence's mean."""
        lengths = range(self.job.prompt_len, self.max_model_len + 1)
        return int(self.num_blocks * len(lengths) / sum(-(-length // BLOCK_SIZE) for length in lengths))


def predictions(shape: Shape, arm: str, started: Started, num_slots: int) -> list[JobPrediction]:
    """Of the job, or of each static batch of num_slots. vLLM's own admission preempts, which is not predicted."""
    if started.plan is not None:
        policy, limits = policy_of(started.plan), limits_of(started.plan)
    else:
        num_seqs = min(started.max_num_seqs, shape.running_by_need)
        limits = SweepLimits(num_seqs, started.max_num_batched_tokens)
        policy = HrmPolicy(
            micro_batch_size=-(-num_seqs // started.num_micro_batches),
            num_micro_batches=started.num_micro_batches,
            num_resident_layers=started.num_resident_layers,
            prefill_tokens_per_sweep=1,  # no sweep parks its hidden states on the host
            **prompt_places(MoeLightningConfig(), started.spec, started.machine),
        )
    jobs = shape.job.batches(num_slots) if arm == PHASED else [shape.job]
    return [predict_job(started.spec, started.machine, policy, job, limits) for job in jobs]


def row_of(
    shape: Shape, arm: str, started: Started, predicted: Sequence[JobPrediction], runs: Sequence[JobRun]
) -> dict[str, Any]:
    generated, elapsed = shape.job.num_generated, [run.elapsed_s for run in runs]
    measured_s = statistics.median(elapsed)
    last = runs[-1]
    row: dict[str, Any] = {
        "workload": shape.name,
        "arm": arm,
        "device": "emulated",
        **asdict(shape.job),
        "h2d_gb_per_s": shape.h2d_gb_per_s,
        "max_num_seqs": started.max_num_seqs,
        "max_num_batched_tokens": started.max_num_batched_tokens,
        "num_micro_batches": started.num_micro_batches,
        "num_resident_layers": started.num_resident_layers,
        "job_s": measured_s,
        "job_s_rounds": elapsed,
        "tokens_per_s": generated / measured_s,
        "tokens_per_s_spread": [generated / max(elapsed), generated / min(elapsed)],
        "others_cpu_share_rounds": [run.others_cpu_share for run in runs],
        "num_sweeps": last.num_sweeps,
        "num_preemptions": last.num_preemptions,
        "busy": {name: busy_s / last.elapsed_s for name, busy_s in last.busy_s.items()},
    }
    time_s = sum(prediction.time_s for prediction in predicted)
    bounds: dict[str, float] = {}
    for prediction in predicted:
        for name, seconds in prediction.bottleneck_s.items():
            bounds[name] = bounds.get(name, 0.0) + seconds
    plan = started.plan
    return row | {
        "attention_on_device": plan is not None and plan.attention_on_device,
        "predicted_job_s": time_s,
        "predicted_tokens_per_s": generated / time_s,
        "predicted_num_sweeps": sum(prediction.num_sweeps for prediction in predicted),
        "predicted_bottleneck_share": {name: seconds / time_s for name, seconds in bounds.items()},
        "predicted_steady_tokens_per_s": plan and plan.predicted.generated_tokens_per_s,
        "error": measured_s / time_s - 1.0,
    }


def summary_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over the workloads; a ratio is null where an arm did not run, or where nothing was predicted."""
    by_arm = {(row["workload"], row["arm"]): row for row in rows}
    errors = [abs(row["error"]) for row in rows if row["arm"] == MIXED]

    def ratios(over: str, key: str) -> dict[str, float]:
        return {name: by_arm[name, MIXED][key] / row[key] for (name, arm), row in by_arm.items() if arm == over}

    def median(values: Sequence[float]) -> float | None:
        return statistics.median(values) if values else None

    phased, phased_predicted = (ratios(PHASED, key) for key in ("tokens_per_s", "predicted_tokens_per_s"))
    defaults, defaults_predicted = (ratios(DEFAULTS, key) for key in ("tokens_per_s", "predicted_tokens_per_s"))
    gaining = [name for name, gain in phased_predicted.items() if gain >= PREDICTED_GAIN]
    return {
        "device": "emulated",
        "predicted_abs_error_median": statistics.median(errors),
        "predicted_abs_error_worst": max(errors),
        "mixed_over_phased": median([phased[name] for name in gaining]),
        "mixed_over_phased_predicted": median([phased_predicted[name] for name in gaining]),
        "mixed_over_phased_of": gaining,
        "mixed_over_phased_all": median(list(phased.values())),
        "policy_over_vllm_defaults": median(list(defaults.values())),
        "policy_over_vllm_defaults_predicted": median(list(defaults_predicted.values())),
        "policy_over_vllm_defaults_off_worst": max(
            (abs(defaults[name] / defaults_predicted[name] - 1.0) for name in defaults), default=None
        ),
    }
