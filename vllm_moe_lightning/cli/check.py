"""`check`: the same answers as stock vLLM? On the user's own model and prompts, in one verdict line."""

from __future__ import annotations

import json
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_moe_lightning.cli.usage import MoreOptions, checked, with_others

if TYPE_CHECKING:
    from vllm_moe_lightning.parity import CheckReport


class CheckedType(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


def check(
    model: Annotated[Path, typer.Option(help="Folder of a Hugging Face checkpoint in safetensors, not quantised.")],
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Text, a prompt a line, or JSONL with 'prompt'; the first 16 are taken, up to 512 tokens of each. "
            "Default: 16 built-in ones."
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Check the first so many layers. Default: as many as fit in memory here.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate per prompt.")] = 16,
    dtype: Annotated[
        CheckedType,
        typer.Option(help="float32: tokens must be equal. bfloat16: as near to float32 as stock vLLM (three engines)."),
    ] = CheckedType.float32,
    num_micro_batches: Annotated[int, typer.Option(min=1, max=64, help="Shares of a step in the pipeline.")] = 3,
    plant: Annotated[
        str | None,
        typer.Option(
            help="Plant a fault, to see that it is found: zero_page, or a wait to leave out, such as "
            "'hidden_load<-attention'."
        ),
    ] = None,
    option: MoreOptions = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where findings and settings go, as JSON.")] = None,
) -> None:
    """Check that paging changes no answer: run stock vLLM, then this engine, on your model and prompts, and compare.

    Compared are the experts as loaded (byte for byte), the bytes that were paged (layers x sweeps), tokens and
    log-probabilities. Our engine runs with copies as late as its waits allow, poisoned buffers and a checker of every
    access, so that a missing wait shows at once. The last line is the verdict; exit status 0 for PASS, 1 for FAIL.
    """
    from vllm_moe_lightning.errors import MoeLightningError
    from vllm_moe_lightning.integration.parity_run import CheckRequest
    from vllm_moe_lightning.integration.parity_run import check as run_check

    request = CheckRequest(
        model=model,
        prompts_file=prompts,
        num_layers=layers,
        max_tokens=tokens,
        dtype=dtype.value,
        num_micro_batches=num_micro_batches,
        plant=plant,
        options=checked(lambda: with_others({}, option or [])),
    )
    try:
        with tempfile.TemporaryDirectory(prefix="moe-lightning-check-") as scratch:
            report = checked(lambda: run_check(request, Path(scratch), progress=lambda what: typer.echo(f"{what} ...")))
    except MoeLightningError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    _show(report)
    raise typer.Exit(0 if report.parity.is_right else 1)


def _show(report: CheckReport) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    settings, figures = report.settings, report.to_dict()
    console = Console()
    console.print(
        f"{settings['model']}: {settings['layers']} of {settings['layers_of_model']} layers, {settings['dtype']}; "
        f"{settings['prompts']} prompts of {settings['prompt_tokens']} tokens in all, {settings['max_tokens']} tokens "
        "generated for each; prefix caching off in both engines",
        highlight=False,
    )
    table = Table("", "stock vLLM", "moe_lightning", box=None)
    for name, label in (
        ("duration_s", "seconds to answer"),
        ("torch_threads", "torch threads"),
        ("prefix_cache_hit_tokens", "prefix cache hits, tokens"),
        ("same_step_prefix_hits", "steps with prefix hits among their rows"),
        ("steps", "steps x micro-batches"),
        ("pages_moved", "pages moved"),
        ("bytes_paged", "bytes paged"),
    ):
        cells = [figures[side].get(name, "") for side in ("stock", "ours")]
        if any(value != "" for value in cells):
            table.add_row(label, *(_cell(value) for value in cells))
    console.print(table)
    for finding in report.parity.findings:
        mark = Text("ok   ", "green") if finding.is_right else Text("WRONG", "bold red")
        console.print(Text.assemble(mark, f" {finding.what}: {finding.detail}"))
    device = (report.ours.stats or {}).get("device")
    typer.echo(report.parity.verdict() + (f" (device: {device})" if device else ""))


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return ", ".join(f"{key}: {count}" for key, count in value.items()) if isinstance(value, dict) else str(value)
