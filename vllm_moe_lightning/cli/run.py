"""`run`: a file of prompts in, answers and figures out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_moe_lightning.cli.plan import KvCacheType
from vllm_moe_lightning.cli.usage import checked
from vllm_moe_lightning.errors import MoeLightningError


class Schedule(StrEnum):
    cgopipe = "cgopipe"
    serial = "serial"
    s2 = "s2"
    s3 = "s3"
    s4 = "s4"


def run(
    model: Annotated[Path, typer.Option(help="Folder of a Hugging Face checkpoint.")],
    prompts: Annotated[Path, typer.Option(help="Text, a prompt a line (\\n for newlines), or JSONL with 'prompt'.")],
    report: Annotated[Path | None, typer.Option(help="Where the figures go, as JSON.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where prompts and answers go, as JSONL.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate per prompt.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    seed: Annotated[int, typer.Option()] = 0,
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or auto.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest prompt and answer, in tokens.")] = None,
    hardware: Annotated[
        str | None, typer.Option(help="GPU preset or profile (JSON) to plan for. Default: this machine.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences in a step. Default: planned.")] = None,
    kv_cache_gib: Annotated[
        float | None, typer.Option(min=0.01, help="Host memory for keys and values. Default: planned.")
    ] = None,
    kv_cache_dtype: Annotated[
        KvCacheType, typer.Option(help="8 bits hold about twice the tokens; auto: the model's own type.")
    ] = KvCacheType.auto,
    num_micro_batches: Annotated[int | None, typer.Option(min=1, help="Default: planned.")] = None,
    num_resident_layers: Annotated[
        int | None, typer.Option(min=0, help="MoE layers that stay on the device. Default: planned.")
    ] = None,
    page_mib: Annotated[float | None, typer.Option(help="Size of one transfer.")] = None,
    schedule: Annotated[Schedule, typer.Option()] = Schedule.cgopipe,
    device_memory_mib: Annotated[float | None, typer.Option(help="Budget of the emulated device.")] = None,
    h2d_gb_per_s: Annotated[float | None, typer.Option(help="Speed of the emulated link.")] = None,
    trace_file: Annotated[Path | None, typer.Option(help="Chrome trace of the last sweeps.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Any other of the README's options, again for each: experts=fetched, stall_timeout_s=60.",
        ),
    ] = None,
    show_texts: Annotated[bool, typer.Option(help="Print the answers.")] = True,
) -> None:
    """Answer a file of prompts with the experts paged, and report what moved and what was busy."""
    from vllm_moe_lightning.integration.bulk_run import BulkJob, prompts_of, run_bulk_job

    given = {
        "hardware": hardware,
        "kv_cache_gib": kv_cache_gib,
        "num_micro_batches": num_micro_batches,
        "num_resident_layers": num_resident_layers,
        "page_mib": page_mib,
        "schedule": None if schedule is Schedule.cgopipe else schedule.value,
        "device_memory_mib": device_memory_mib,
        "h2d_gb_per_s": h2d_gb_per_s,
        "trace_file": None if trace_file is None else str(trace_file.absolute()),
    }
    flags = {name: value for name, value in given.items() if value is not None}
    job = BulkJob(
        model=model,
        prompts_file=prompts,
        options=checked(lambda: _with_others(flags, option or [])),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_cache_dtype=kv_cache_dtype.value,
    )
    prompts_to_answer = checked(lambda: prompts_of(job))
    try:
        run_bulk_job(job, prompts_to_answer, report_file=report, output_file=output, show_texts=show_texts)
    except MoeLightningError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


def _with_others(flags: dict[str, Any], others: Sequence[str]) -> dict[str, Any]:
    """others: `name=value`, the value as JSON, or as it stands where it is none. Raises ValueError for what is given
    twice, or without a value; names and values are for parse_options to judge."""
    options = dict(flags)
    for other in others:
        name, separator, text = other.partition("=")
        if not separator:
            raise ValueError(f"--option {other}: expected NAME=VALUE")
        if name in options:
            raise ValueError(f"--option {other}: {name} is given twice, the other time as {options[name]!r}")
        try:
            options[name] = json.loads(text)
        except json.JSONDecodeError:
            options[name] = text
    return options
