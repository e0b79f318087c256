"""`trace`: what limited a run, as a picture, a Perfetto file and one sentence. Of a short job of its own, of a file
that an engine has left, or of an engine that is running."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_moe_lightning.cli.usage import checked

if TYPE_CHECKING:
    from vllm_moe_lightning.pipeline.trace import Trace
    from vllm_moe_lightning.pipeline.trace_summary import TraceSummary

LIVE_TIMEOUT_S = 30.0
POLL_S = 0.1
GB = 1e9
MS_PER_S = 1e3


def trace(
    file: Annotated[
        Path | None,
        typer.Argument(help="A trace to summarise: what an engine with the option trace_file wrote, or --output."),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Ask the running engine whose trace_file this is to write it now.")
    ] = False,
    model: Annotated[
        Path | None, typer.Option(help="In place of a file: run a short job on this checkpoint folder.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="The job's prompts: text, one a line, or JSONL with 'prompt'.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for trace.json, sweep.png, layer.png and summary.json. Default with --model: trace."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Of the job: tokens to generate per prompt, a sweep each.")] = 16,
    dtype: Annotated[str, typer.Option(help="Of the job: bfloat16, float32 or auto.")] = "auto",
    hardware: Annotated[str | None, typer.Option(help="Of the job: GPU preset or profile to plan for.")] = None,
    options: Annotated[
        str | None,
        typer.Option(help="Of the job: moe_lightning options as JSON, as in --additional-config of vllm serve."),
    ] = None,
) -> None:
    """Show what limited a run: how busy each resource was, what the busiest one waited for, and what would help.

    Three ways: `trace --model DIR --prompts F` runs a short job and traces it; `trace FILE` reads a trace that an
    engine with the option trace_file has written; `trace FILE --live` has a running engine write it first.

    trace.json opens in https://ui.perfetto.dev (it stays in your browser) or chrome://tracing.
    """
    from vllm_moe_lightning.pipeline.trace import read_chrome_trace
    from vllm_moe_lightning.pipeline.trace_summary import summarise

    if (file is None) == (model is None):
        raise typer.BadParameter("give either a trace file, or --model and --prompts to run a job")
    if model is not None:
        if live or prompts is None:
            raise typer.BadParameter("--model needs --prompts, and knows no --live (the job writes its trace itself)")
        output = output or Path("trace")
        file = output / "trace.json"
        _run_job(model, prompts, file, steps, dtype, hardware, options)
    else:
        assert file is not None, "checked above"
        given = {"--prompts": prompts, "--hardware": hardware, "--options": options}
        if unread := [name for name, value in given.items() if value is not None]:
            raise typer.BadParameter(f"{', '.join(unread)} are of a job; drop them, or give --model in place of a file")
        if live:
            _ask_running_engine(file)
    recorded = checked(lambda: read_chrome_trace(file))
    summary = checked(lambda: summarise(recorded))
    files = [] if output is None else _write(output, recorded, summary)
    _show(summary, files)


def _run_job(
    model: Path, prompts: Path, file: Path, steps: int, dtype: str, hardware: str | None, options: str | None
) -> None:
    from vllm_moe_lightning.errors import MoeLightningError
    from vllm_moe_lightning.integration.bulk_run import BulkJob, prompts_of, run_bulk_job

    def given() -> dict[str, object]:
        raw = {} if options is None else json.loads(options)
        if not isinstance(raw, dict):
            raise ValueError(f"--options must be a JSON object, got {options!r}")
        hardware_given = {} if hardware is None else {"hardware": hardware}
        return {**raw, **hardware_given, "trace_file": str(file.absolute())}

    job = BulkJob(model=model, prompts_file=prompts, options=checked(given), max_tokens=steps, dtype=dtype)
    texts = checked(lambda: prompts_of(job))
    file.unlink(missing_ok=True)  # so that an older one is not taken for this job's
    try:
        run_bulk_job(job, texts, show_texts=False)
    except MoeLightningError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    if not file.exists():
        typer.echo(
            "stock vLLM ran this job, since the model fits the device: nothing was paged, so there is no trace. To see "
            "it paged, give the device less memory: --options '{\"device_memory_mib\": ...}'",
            err=True,
        )
        raise typer.Exit(1)


def _ask_running_engine(file: Path) -> None:
    """The engine looks for the request, writes the trace, and takes the request away."""
    from vllm_moe_lightning.pipeline.trace import request_file_of

    request = request_file_of(file)
    checked(request.touch)
    waited_until_s = time.monotonic() + LIVE_TIMEOUT_S
    while request.exists():
        if time.monotonic() > waited_until_s:
            request.unlink(missing_ok=True)
            typer.echo(
                f"no engine answered within {LIVE_TIMEOUT_S:.0f} s: none with trace_file {str(file.absolute())!r} runs "
                "here, or it is not this user's (with several ranks the file of the first is ...-rank0.json)",
                err=True,
            )
            raise typer.Exit(1)
        time.sleep(POLL_S)


def _write(output: Path, recorded: Trace, summary: TraceSummary) -> list[Path]:
    from vllm_moe_lightning.pipeline.gantt import plot_gantt
    from vllm_moe_lightning.pipeline.trace import write_chrome_trace
    from vllm_moe_lightning.pipeline.trace_window import layer_in_the_middle, spans_within, typical_sweep

    output.mkdir(parents=True, exist_ok=True)
    files = [output / name for name in ("trace.json", "summary.json", "sweep.png", "layer.png")]
    write_chrome_trace(files[0], recorded)
    files[1].write_text(json.dumps(summary.to_dict(), indent=2) + "\n")
    sweep = typical_sweep(recorded)
    about = f"{summary.schedule}, {sweep.num_micro_batches} micro-batches, device: {summary.device}"
    layer, begin_s, end_s = layer_in_the_middle(recorded, sweep)
    pictures = [
        (f"one sweep over all layers, {about}", sweep.start_s, sweep.end_s),
        (f"decoder layer {layer} of this sweep, {about}", begin_s, end_s),
    ]
    try:
        for (title, start_s, stop_s), path in zip(pictures, files[2:], strict=True):
            plot_gantt([(title, spans_within(recorded, start_s, stop_s))], path)
    except ImportError as error:
        typer.echo(f"no pictures: they need matplotlib ({error}): pip install matplotlib", err=True)
        return files[:2]
    return files


def _show(summary: TraceSummary, files: list[Path]) -> None:
    from rich.console import Console
    from rich.table import Table

    from vllm_moe_lightning.pipeline.bubbles import MEANINGS

    counts = ", ".join(f"{sweeps} with {count}" for count, sweeps in sorted(summary.micro_batches.items()))
    console = Console()
    console.print(
        f"{summary.num_sweeps} sweeps in {summary.time_s:.2f} s (device: {summary.device}, schedule "
        f"{summary.schedule}); micro-batches: {counts}; median sweep {summary.sweep_s * MS_PER_S:.1f} ms; "
        f"{summary.between_s / summary.time_s:.0%} of the time between sweeps",
        highlight=False,
    )
    table = Table("resource", box=None)
    for column in ("busy", "GB/s while busy"):
        table.add_column(column, justify="right")
    for resource in summary.by_share:
        moved, busy_s = summary.num_bytes[resource], summary.busy_s[resource]
        speed = f"{moved / busy_s / GB:.2f}" if moved and busy_s else ""
        table.add_row(summary.label(resource), f"{summary.share(resource):.1%}", speed)
    console.print(table)
    idle = Table(f"{summary.label(summary.busiest)} idle", box=None)
    idle.add_column("share", justify="right")
    idle.add_column("that is")
    for bubble in summary.bubbles:
        awaited = (
            MEANINGS.get(bubble.reason) if bubble.resource is None else f"{summary.label(bubble.resource)} not done"
        )
        idle.add_row(bubble.reason, f"{bubble.time_s / summary.time_s:.1%}", awaited)
    if summary.bubbles:
        console.print(idle)
    console.print(summary.sentence(), style="bold", highlight=False)
    for path in files:
        console.print(f"wrote {path}", style="dim", highlight=False)
