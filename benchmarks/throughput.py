#!/usr/bin/env python
"""Throughput on the paper's workloads: several engines on the same prompts, in turns, each with its best settings.

On the CPU build the device is emulated and the arms are our engine under five schedules, at the same memory budget and
link; stock vLLM with all weights in RAM runs beside them. On a GPU (never run yet) they are our plugin and stock vLLM's
two kinds of offload at the same budget. Generated tokens per second of whole jobs, prefill included, as in the paper.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.competition import Competition, rows_of, summary_of
from benchmarks.job_checkpoint import CheckpointShape, write_checkpoint
from benchmarks.machine import describe
from benchmarks.throughput_arms import GIB, OURS, EmulatedBudget, Field, cuda_field, emulated_field
from benchmarks.workloads import TOKENIZER_FILE, WORKLOADS, PaperWorkload, encoded_passages

FULL_REQUESTS = {"synthetic-reasoning": 40, "summarisation": 10}
MTBENCH_REQUESTS = 80  # MTBench's questions
QUICK_WORKLOADS, QUICK_REQUESTS = ("mtbench-32", "synthetic-reasoning"), 16
QUICK_CHECKPOINT = CheckpointShape(num_layers=4, hidden=256, intermediate=512, num_heads=4)
QUICK_BUDGET = EmulatedBudget(device_memory_mib=24.0, link_gb_per_s=1.0, slots=8)

WorkloadOption = Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(WORKLOADS)}. Default: all.")]
ArmsOption = Annotated[str | None, typer.Option(help="Names of arms, comma-separated. Default: all.")]
ModelOption = Annotated[Path | None, typer.Option(help="Checkpoint folder with a tokenizer, for a GPU.")]


def run_workload(
    workload: PaperWorkload, field: Field, model: Path, tokenizer: Path, requests: int, rounds: int, padded: bool,
    console: Console,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:  # fmt: skip
    """(a row for each arm; what was searched, and why arms did not run)"""
    with Competition(field, model, workload, encoded_passages(tokenizer), requests, padded=padded) as competition:
        competition.search(console)
        competition.play(rounds, console)
        return rows_of(competition), competition.remarks


def show(result: Mapping[str, Any], console: Console) -> None:
    table = Table(title="Generated tokens/s of whole jobs; medians of the rounds, prefill included")
    columns = (
        "workload", "arm", "tokens/s", "min..max", "bound", "x slower", "computed/s", "text, padding, generated",
        "slots", "micro-b.", "h2d", "prefix hits",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column in ("workload", "arm") else "right")
    for row in result["rows"]:
        low, high = row["tokens_per_s_spread"]
        bound, over = row.get("modelled_tokens_per_s"), row.get("cgopipe_is_faster_by")
        table.add_row(
            f"{row['workload']}{', padded' if row['padded'] else ''}",
            row["arm"],
            f"{row['tokens_per_s']:.1f}",
            f"{low:.1f}..{high:.1f}",
            f"{bound:.0f}" if bound else "",
            f"{over['median']:.2f}" if over else "",
            f"{row['computed_tokens_per_s']:.0f}",
            f"{row['text_tokens']} + {row['padding_tokens']} + {row['generated_tokens']}",
            f"{row['conditions']['max_num_seqs']}",
            f"{row['conditions']['num_micro_batches']}",
            f"{row['busy']['h2d']:.0%}" if row["busy"] else "",
            f"{row['prefix_hits']}",
        )
    console.print(table)
    for remark in result["remarks"]:
        console.print(json.dumps(remark), markup=False, highlight=False)
    for name, value in result["summary"]["cgopipe_is_faster_by"].items():
        console.print(f"cgopipe is {value['median']:.2f} times as fast as {name} (median over the workloads)")
    for name, values in result["summary"]["unequal_conditions"].items():
        console.print(f"not equal in all arms: {name}: {values}", markup=False, highlight=False)
    machine = result["machine"]
    console.print(
        f"{result['device']}; {machine['cpu']}, {machine['num_cpus']} CPUs, load {machine['load_average']:.1f}, other "
        f"processes had {result['summary']['others_cpu_share']:.0%} of the CPUs meanwhile, commit {machine['commit']}. "
        + ("Not measured: a GPU, a real link, stock vLLM's offload." if result["device"] == "emulated" else "")
    )


def merged(json_file: Path, result: dict[str, Any]) -> dict[str, Any]:
    """With the rows of other workloads that are in the file already."""
    before = json.loads(json_file.read_text())
    done = {(row["workload"], row["padded"]) for row in result["rows"]}
    for name in ("rows", "remarks"):
        kept = [entry for entry in before[name] if (entry["workload"], entry["padded"]) not in done]
        result[name] = kept + result[name]
    result["machines"] = {**before["machines"], **result["machines"]}
    return result | {"summary": summary_of(result["rows"])}


def main(
    json_file: Annotated[Path, typer.Option("--json", help="Where the results go.")],
    workload: WorkloadOption = None,
    padded: Annotated[bool, typer.Option(help="Fill all prompts up to the workload's longest.")] = False,
    arms: ArmsOption = None,
    requests: Annotated[int | None, typer.Option(min=2, help="Default: by workload.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in each of which every arm answers the prompts.")] = 3,
    quick: Annotated[bool, typer.Option(help="A small model, two workloads, few requests.")] = False,
    append: Annotated[bool, typer.Option(help="Keep the file's rows of other workloads.")] = False,
    model: ModelOption = None,
    device_memory_gib: Annotated[float | None, typer.Option(min=0.1, help="Budget of all arms, on a GPU.")] = None,
    link_gb_per_s: Annotated[float | None, typer.Option(min=0.001, help="Of the emulated link.")] = None,
) -> None:
    """Measure the arms in turns, print a table, write JSON."""
    import torch

    unknown = sorted(set(workload or ()) - set(WORKLOADS))
    if unknown:
        raise typer.BadParameter(f"--workload {unknown}; there are {', '.join(WORKLOADS)}")
    on_gpu = torch.version.cuda is not None and torch.cuda.is_available()
    if on_gpu and (model is None or device_memory_gib is None):
        raise typer.BadParameter("on a GPU --model and --device-memory-gib say what is compared")
    if not on_gpu and (model is not None or device_memory_gib is not None):
        raise typer.BadParameter("--model and --device-memory-gib are for a GPU; the emulated device has its own model")
    console = Console(width=max(Console().width, 150))
    chosen = [WORKLOADS[name] for name in workload or (QUICK_WORKLOADS if quick else WORKLOADS)]
    checkpoint, budget = (QUICK_CHECKPOINT, QUICK_BUDGET) if quick else (CheckpointShape(), EmulatedBudget())
    if link_gb_per_s is not None:
        budget = EmulatedBudget(budget.device_memory_mib, link_gb_per_s, budget.slots)
    head, rows, remarks = describe(), list[dict[str, Any]](), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        if not on_gpu:
            model = Path(folder)
            write_checkpoint(model, checkpoint, max_positions=max(each.longest for each in chosen))
        assert model is not None, "given, or written here"
        for each in chosen:
            console.print(f"{each.name}{', padded' if padded else ''}: {each}")
            if on_gpu:
                field = _gpu_field(each, model, device_memory_gib or 0.0, padded)
            else:
                field = emulated_field(each, checkpoint, budget, padded=padded)
            count = requests or (QUICK_REQUESTS if quick else FULL_REQUESTS.get(each.name, MTBENCH_REQUESTS))
            tokenizer = model / "tokenizer.json" if on_gpu else TOKENIZER_FILE
            of_workload, more = run_workload(
                each, field.only(arms.split(",")) if arms else field, model, tokenizer, count, rounds, padded, console
            )
            rows += of_workload
            remarks += more
    device = torch.cuda.get_device_name() if on_gpu else "emulated"
    result = {
        "device": device,
        "summary": summary_of(rows),
        "machine": head,
        "machines": {f"{each.name}{', padded' if padded else ''}": head for each in chosen},
        "rows": rows,
        "remarks": remarks,
        "model": str(model) if on_gpu else {**asdict(checkpoint), "expert_bytes": checkpoint.expert_bytes},
        "budget": {"device_memory_gib": device_memory_gib} if on_gpu else asdict(budget),
    }
    if append and json_file.exists():
        result = merged(json_file, result)
    show(result, console)
    if not any(row["arm"] == OURS for row in rows):
        raise typer.Exit(1)  # nothing to compare with, and nothing to keep
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(result, indent=2) + "\n")


def _gpu_field(workload: PaperWorkload, model: Path, device_memory_gib: float, padded: bool) -> Field:
    import torch

    from vllm_moe_lightning.model_config import spec_from_config

    spec = spec_from_config(json.loads((model / "config.json").read_text()), model.name)
    gpu_bytes = torch.cuda.get_device_properties(0).total_memory
    return cuda_field(workload, spec, int(device_memory_gib * GIB), gpu_bytes, padded=padded)


if __name__ == "__main__":
    typer.run(main)
