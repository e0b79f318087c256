"""`doctor`: whether a run will work, before any weight is read. Exit code 1 if something will fail, else 0."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vllm_moe_lightning.doctor.finding import Finding


def doctor(
    model: Annotated[Path, typer.Option(help="Folder of a Hugging Face checkpoint.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
    dtype: Annotated[str, typer.Option(help="As for vllm serve.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest prompt and answer, in tokens.")] = None,
    kv_cache_gib: Annotated[
        float | None, typer.Option(min=0.01, help="Host memory for keys and values, of each rank. Default: planned.")
    ] = None,
    device_memory_mib: Annotated[float | None, typer.Option(help="Budget of the emulated device.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Ranks.")] = 1,
) -> None:
    """Say what will fail, before any weight is read: each line with what was found, its limit and the cure."""
    from vllm_moe_lightning.doctor.examination import examine
    from vllm_moe_lightning.doctor.finding import State, worst_of
    from vllm_moe_lightning.doctor.question import Question

    started_s = time.monotonic()
    question = Question(
        model=str(model),
        dtype=dtype,
        max_model_len=max_model_len,
        kv_cache_gib=kv_cache_gib,
        device_memory_mib=device_memory_mib,
        tensor_parallel_size=tensor_parallel_size,
    )
    sections = examine(question)
    duration_s = time.monotonic() - started_s
    worst = worst_of(finding for findings in sections.values() for finding in findings)
    if as_json:
        _print_json(question.model, worst, sections, duration_s)
    else:
        _show(question.model, sections, duration_s)
    if worst is State.FAIL:
        raise typer.Exit(1)


def _print_json(model: str, worst: str, sections: Mapping[str, list[Finding]], duration_s: float) -> None:
    import msgspec

    findings = [
        {"section": section, **msgspec.to_builtins(finding)} for section, found in sections.items() for finding in found
    ]
    typer.echo(json.dumps({"model": model, "state": worst, "duration_s": duration_s, "findings": findings}, indent=2))


def _show(model: str, sections: Mapping[str, list[Finding]], duration_s: float) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from vllm_moe_lightning.doctor.finding import State

    styles = {State.OK: "", State.WARNING: "yellow", State.FAIL: "bold red"}
    table = Table(title=model, title_justify="left", show_header=False)
    for _ in range(3):
        table.add_column()
    table.add_column(overflow="fold")
    for section, findings in sections.items():
        for index, finding in enumerate(findings):
            # Text, since brackets in what was found are no mark-up.
            cells = ("" if index else section, finding.state.value, finding.name, _words(finding))
            table.add_row(*map(Text, cells), style=styles[finding.state])
        table.add_section()
    console = Console()
    console.print(table)
    found = [finding for findings in sections.values() for finding in findings]
    counts = {state: [f.name for f in found if f.state is state] for state in (State.FAIL, State.WARNING)}
    words = [f"{state.value}: {', '.join(names)}" for state, names in counts.items() if names]
    console.print("; ".join(words) or "nothing found that would fail", highlight=False)
    console.print(f"{len(found)} lines in {duration_s:.1f} s", style="dim", highlight=False)


def _words(finding: Finding) -> str:
    """What was found [what it is held against], and the cure on a line of its own."""
    limit = f" [{finding.limit}]" if finding.limit else ""
    cure = f"\ncure: {finding.cure}" if finding.cure else ""
    return f"{finding.found}{limit}{cure}"
