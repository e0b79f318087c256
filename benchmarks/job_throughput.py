#!/usr/bin/env python
"""Predicts the throughput of whole jobs on the real vLLM engine, then measures it; device emulated.

Three arms on the same requests, the same device memory and the same KV cache: the planner's engine with prompts and
decode tokens in the same sweeps; the same number of slots in static batches, all prompts of a batch before its decodes;
and the planner off, with vLLM's own limits. Predictions, rows and the summary are job_rows.py's.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.job_checkpoint import CheckpointShape, write_checkpoint
from benchmarks.job_engine import JobEngine, JobRun
from benchmarks.job_rows import (
    ARMS,
    BLOCK_SIZE,
    DEFAULTS,
    MIXED,
    PHASED,
    PREDICTED_GAIN,
    Shape,
    predictions,
    row_of,
    summary_of,
)
from benchmarks.machine import describe
from vllm_moe_lightning.job_prediction import Job

# Static batches take their prompts in as few sweeps as the device's memory allows, down to one prompt a sweep.
HALVINGS = 8

SHAPES = (
    Shape("short prompts, short answers", Job(300, prompt_len=32, gen_len=16), h2d_gb_per_s=1.0),
    Shape("short prompts, long answers", Job(300, prompt_len=32, gen_len=64), h2d_gb_per_s=2.0),
    Shape("long prompts, short answers", Job(300, prompt_len=128, gen_len=8), h2d_gb_per_s=2.0),
    # Computing prompts takes about as long as bringing the weights for the answers.
    Shape("long prompts, long answers", Job(300, prompt_len=128, gen_len=16), h2d_gb_per_s=1.0),
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

    def _start(self, options: Mapping[str, Any], limits: Mapping[str, Any]) -> JobEngine:
        return self._stack.enter_context(JobEngine(self._model, options, {**self._engine_args, **limits}))

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
            row = row_of(shape, arm, started, predictions(shape, arm, started, engines.num_slots), taken)
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
        table.add_row(
            row["workload"],
            row["arm"],
            f"{row['predicted_tokens_per_s']:.0f}",
            f"{row['tokens_per_s']:.0f}",
            f"{low:.0f}..{high:.0f}",
            f"{row['error']:+.1%}",
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
        f"{times(summary['mixed_over_phased'])} where at least {PREDICTED_GAIN}x is predicted "
        f"({times(summary['mixed_over_phased_predicted'])}), {times(summary['mixed_over_phased_all'])} over all; over "
        f"vLLM's defaults {times(summary['policy_over_vllm_defaults'])}, predicted "
        f"{times(summary['policy_over_vllm_defaults_predicted'])}; "
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
