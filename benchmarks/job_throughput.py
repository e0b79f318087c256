#!/usr/bin/env python
"""Predicts the throughput of whole jobs on the real vLLM engine, then measures it; device emulated.

Three arms on the same requests, the same device memory and the same KV cache: the planner's engine with prompts and
decode tokens in the same sweeps; the same number of slots in static batches, all prompts of a batch before its decodes;
and the planner off, with vLLM's own limits. The prediction steps the cost model over the job's sweeps, the first and
the last ones too (vllm_moe_lightning/job_prediction.py). Nothing is fitted to these engines.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.job_checkpoint import CheckpointShape, write_checkpoint
from benchmarks.job_engine import EngineProcess, JobRun, Started
from benchmarks.machine import describe
from vllm_moe_lightning.job_prediction import Job, JobPrediction, SweepLimits, predict_job
from vllm_moe_lightning.workload import HrmPolicy

BLOCK_SIZE = 32  # tokens: short sequences waste less of the last block than with the planner's 128
MIXED, PHASED, DEFAULTS = "mixed", "phased", "vllm defaults"
ARMS = (MIXED, PHASED, DEFAULTS)
# Static batches take their prompts in as few sweeps as the device's memory allows, down to one prompt a sweep.
HALVINGS = 8


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

    def kv_bytes(self, checkpoint: CheckpointShape) -> int:
        blocks = self.slots * -(-self.max_model_len // BLOCK_SIZE) + 1  # and vLLM's null block
        return blocks * BLOCK_SIZE * checkpoint.kv_bytes_per_token


# The link bounds the first two, computing the third.
SHAPES = (
    Shape("short prompts, short answers", Job(300, prompt_len=32, gen_len=16), h2d_gb_per_s=1.0),
    Shape("short prompts, long answers", Job(300, prompt_len=32, gen_len=64), h2d_gb_per_s=2.0),
    Shape("long prompts, short answers", Job(300, prompt_len=128, gen_len=8), h2d_gb_per_s=2.0),
)
DEVICE_MEMORY_MIB = 100.0  # of 151 MB of experts and 13 MB of other weights


class Engines:
    """The three arms of one shape, all alive, so that they can take turns."""

    def __init__(self, shape: Shape, checkpoint: CheckpointShape, model: Path, stack: ExitStack) -> None:
        self.shape, self._model, self._stack = shape, model, stack
        self._device = {"device_memory_mib": DEVICE_MEMORY_MIB, "h2d_gb_per_s": shape.h2d_gb_per_s}
        self._engine_args = {
            "block_size": BLOCK_SIZE,
            "kv_cache_memory_bytes": shape.kv_bytes(checkpoint),
            "max_model_len": shape.max_model_len,
            "enable_prefix_caching": False,
        }
        mixed = self._start(self._planned(), {})
        self.num_slots = mixed.started.max_num_seqs
        self.engines = {MIXED: mixed}
        self.refusals: dict[str, str] = {}
        self.phased_prefill_tokens = 0
        self._start_phased()
        try:
            # Preemption and admission are vLLM's here too.
            self.engines[DEFAULTS] = self._start({"planner": "off", "admission": "vllm", **self._device}, {})
        except RuntimeError as error:
            self.refusals[DEFAULTS] = str(error)

    def _planned(self) -> dict[str, Any]:
        job = self.shape.job
        lengths = {"expected_prompt_tokens": job.prompt_len, "expected_generation_tokens": job.gen_len}
        return {**lengths, **self._device}

    def _start(self, options: Mapping[str, Any], limits: Mapping[str, Any]) -> EngineProcess:
        return self._stack.enter_context(EngineProcess(self._model, options, {**self._engine_args, **limits}))

    def _start_phased(self) -> None:
        """With room for all prompts of a batch in one sweep; or for half of them, and so on."""
        tokens = self.num_slots * self.shape.job.prompt_len
        for _ in range(HALVINGS):
            options = {**self._planned(), "prefill_tokens_per_sweep": tokens}
            try:
                self.engines[PHASED] = self._start(options, {"max_num_seqs": self.num_slots})
            except RuntimeError as error:
                self.refusals[PHASED] = str(error)
                tokens //= 2
                continue
            self.phased_prefill_tokens = tokens
            self.refusals.pop(PHASED, None)  # of the larger sizes
            return

    def run(self, arm: str, seed: int) -> JobRun:
        return self.engines[arm].run(self.shape.job, self.num_slots if arm == PHASED else None, seed)


def limits_of(started: Started) -> SweepLimits:
    """As the scheduler sets them from the plan (integration/request_mix, PrefillShare)."""
    plan = started.plan
    assert plan is not None, "planned engines only"
    beside = max(plan.prefill_tokens_per_sweep, round(plan.expected_prompt_tokens))
    return SweepLimits(started.max_num_seqs, min(started.max_num_batched_tokens, started.max_num_seqs + beside))


def predicted_s(started: Started, jobs: Sequence[Job]) -> list[JobPrediction]:
    policy = HrmPolicy(
        micro_batch_size=-(-started.max_num_seqs // started.num_micro_batches),
        num_micro_batches=started.num_micro_batches,
        num_resident_layers=started.num_resident_layers,
        prefill_tokens_per_sweep=1,  # no sweep parks its hidden states on the host
    )
    return [predict_job(started.spec, started.machine, policy, job, limits_of(started)) for job in jobs]


def row_of(
    shape: Shape, arm: str, started: Started, predictions: Sequence[JobPrediction], runs: Sequence[JobRun]
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
    if not predictions:
        return row
    time_s = sum(prediction.time_s for prediction in predictions)
    bounds: dict[str, float] = {}
    for prediction in predictions:
        for name, seconds in prediction.bottleneck_s.items():
            bounds[name] = bounds.get(name, 0.0) + seconds
    assert started.plan is not None, "only planned engines are predicted"
    return row | {
        "predicted_job_s": time_s,
        "predicted_tokens_per_s": generated / time_s,
        "predicted_num_sweeps": sum(prediction.num_sweeps for prediction in predictions),
        "predicted_bottleneck_share": {name: seconds / time_s for name, seconds in bounds.items()},
        "predicted_steady_tokens_per_s": started.plan.predicted.generated_tokens_per_s,
        "error": measured_s / time_s - 1.0,
    }


def summary_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over the workloads; a ratio is null where an arm did not run."""
    rates = {(row["workload"], row["arm"]): row["tokens_per_s"] for row in rows}
    errors = [abs(row["error"]) for row in rows if row["arm"] == MIXED]

    def ratio(over: str) -> float | None:
        ratios = [rates[name, MIXED] / rates[name, arm] for name, arm in rates if arm == over]
        return statistics.median(ratios) if ratios else None

    return {
        "device": "emulated",
        "predicted_abs_error_median": statistics.median(errors),
        "predicted_abs_error_worst": max(errors),
        "mixed_over_phased": ratio(PHASED),
        "policy_over_vllm_defaults": ratio(DEFAULTS),
    }


def run_shape(
    shape: Shape, checkpoint: CheckpointShape, model: Path, num_rounds: int
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """(a row for each arm that runs, why the others don't)"""
    with ExitStack() as stack:
        engines = Engines(shape, checkpoint, model, stack)
        runs: dict[str, list[JobRun]] = {arm: [] for arm in ARMS if arm in engines.engines}
        warm = replace(shape.job, num_requests=4, gen_len=2)
        for engine in engines.engines.values():
            engine.run(warm)
        for index in range(num_rounds):
            for position in range(len(runs)):  # another one first in each round
                arm = list(runs)[(index + position) % len(runs)]
                runs[arm].append(engines.run(arm, seed=index))
        rows = []
        for arm, taken in runs.items():
            started = engines.engines[arm].started
            jobs = {MIXED: [shape.job], PHASED: shape.job.batches(engines.num_slots), DEFAULTS: []}[arm]
            row = row_of(shape, arm, started, predicted_s(started, jobs), taken)
            if arm == PHASED:
                row |= {"prefill_tokens_per_sweep": engines.phased_prefill_tokens}
            rows.append(row)
        return rows, {f"{shape.name}, {arm}": reason for arm, reason in engines.refusals.items()}


def run(shapes: Sequence[Shape], checkpoint: CheckpointShape, num_rounds: int, console: Console) -> dict[str, Any]:
    rows, refusals = list[dict[str, Any]](), dict[str, str]()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        write_checkpoint(model, checkpoint, max_positions=max(shape.max_model_len for shape in shapes))
        for shape in shapes:
            console.print(f"{shape.name}: {shape.job}")
            of_shape, refused = run_shape(shape, checkpoint, model, num_rounds)
            rows += of_shape
            refusals |= refused
    others = statistics.median(share for row in rows for share in row["others_cpu_share_rounds"])
    return {
        "summary": {**summary_of(rows), "num_rounds": num_rounds, "others_cpu_share": others, **describe()},
        "rows": rows,
        "not_run": refusals,
        "checkpoint": {**asdict(checkpoint), "expert_bytes": checkpoint.expert_bytes},
        "device_memory_mib": DEVICE_MEMORY_MIB,
    }


def show(result: Mapping[str, Any], console: Console) -> None:
    summary = result["summary"]
    table = Table(
        title=f"Generated tokens/s of whole jobs, emulated device; median of {summary['num_rounds']} round(s)"
    )
    for column in ("workload", "arm", "predicted", "achieved", "min..max", "error", "gpu", "h2d", "sweeps", "slots"):
        table.add_column(column, justify="left" if column in ("workload", "arm") else "right")
    for row in result["rows"]:
        low, high = row["tokens_per_s_spread"]
        is_predicted = "error" in row
        table.add_row(
            row["workload"],
            row["arm"],
            f"{row['predicted_tokens_per_s']:.0f}" if is_predicted else "",
            f"{row['tokens_per_s']:.0f}",
            f"{low:.0f}..{high:.0f}",
            f"{row['error']:+.1%}" if is_predicted else "",
            f"{row['busy']['gpu']:.0%}",
            f"{row['busy']['h2d']:.0%}",
            f"{row['num_sweeps']}",
            f"{row['max_num_seqs']}",
        )
    console.print(table)
    for name, reason in result["not_run"].items():
        console.print(f"not run: {name}: {reason}", markup=False)

    def times(value: float | None) -> str:
        return "not run" if value is None else f"{value:.2f}x"

    console.print(
        f"emulated: median error {summary['predicted_abs_error_median']:.1%}; mixed over phased "
        f"{times(summary['mixed_over_phased'])}, over vLLM's defaults {times(summary['policy_over_vllm_defaults'])}; "
        f"{summary['cpu']}, {summary['num_cpus']} CPUs, load {summary['load_average']:.1f}, other "
        f"processes had {summary['others_cpu_share']:.0%} of the CPUs meanwhile, commit {summary['commit']}. "
        f"Not measured: a GPU, a real link."
    )


def main(
    json_file: Annotated[Path, typer.Option("--json", help="Where the results go.")],
    quick: Annotated[
        bool, typer.Option(help="A smaller model, few requests and one round: shows that it runs.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in each of which every arm runs the job.")] = 3,
) -> None:
    """Predict and measure three kinds of jobs in three arms, print a table, write JSON."""
    checkpoint, shapes = CheckpointShape(), list(SHAPES)
    if quick:
        shapes = [replace(shape, job=replace(shape.job, num_requests=48), slots=16) for shape in shapes]
        rounds = 1
    console = Console(width=max(Console().width, 130))
    result = run(shapes, checkpoint, rounds, console)
    show(result, console)
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
