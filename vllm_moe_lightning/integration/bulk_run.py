"""The bulk runner: a file of prompts in, texts and a report of what the pipeline did out."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoTokenizer

from vllm_moe_lightning.config import OPTIONS_KEY, parse_options
from vllm_moe_lightning.engine_plan import PredictedFigures, plan_of
from vllm_moe_lightning.integration.register import WORKER_CLS
from vllm_moe_lightning.job_prediction import Job
from vllm_moe_lightning.pipeline.comparison import AchievedFigures, comparison
from vllm_moe_lightning.planned_job import predict_planned_job

MIB = 1 << 20


@dataclass(frozen=True)
class BulkJob:
    model: Path
    prompts_file: Path
    options: dict[str, Any]
    """Under additional_config["moe_lightning"]."""
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    """None: as planned."""
    kv_cache_dtype: str = "auto"
    """As for vllm serve."""


def read_prompts(file: Path) -> list[str]:
    """Prompts of a text file (a line each, `\\n` stands for a newline) or of a JSONL file (key "prompt").

    Raises ValueError naming the line that is not as it should be.
    """
    # Not splitlines(): it also cuts at separators that are legal inside a JSON string.
    numbered = enumerate(file.read_text(encoding="utf-8").split("\n"), start=1)
    lines = [(number, line.rstrip("\r")) for number, line in numbered if line.strip()]
    if not lines:
        raise ValueError(f"{file} holds no prompts")
    if file.suffix != ".jsonl":
        return [line.replace("\\n", "\n") for _, line in lines]
    prompts = []
    for number, line in lines:
        try:
            prompt = json.loads(line)["prompt"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f'{file}, line {number}: expected a JSON object with "prompt", got {line!r}') from error
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f'{file}, line {number}: "prompt" must be text, got {prompt!r}')
        prompts.append(prompt)
    return prompts


def prompts_of(job: BulkJob) -> list[str]:
    """The job's prompts, after a look at everything that can be wrong before vLLM starts any process (ValueError)."""
    parse_options(job.options)
    if not (job.model / "config.json").is_file():
        raise ValueError(f"{job.model} is not a checkpoint folder: it has no config.json")
    return read_prompts(job.prompts_file)


def run_bulk_job(
    job: BulkJob,
    prompts: list[str],
    *,
    report_file: Path | None = None,
    output_file: Path | None = None,
    show_texts: bool = True,
) -> dict[str, Any]:
    """Load the model, answer all prompts, print texts and the table. Returns the report."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(job.model),
        worker_cls=WORKER_CLS,
        additional_config={OPTIONS_KEY: {**_expected_lengths(job, prompts), **job.options}},
        dtype=job.dtype,
        seed=job.seed,
        max_model_len=job.max_model_len,
        max_num_seqs=job.max_num_seqs,
        kv_cache_dtype=job.kv_cache_dtype,
    )
    is_paged = llm.llm_engine.vllm_config.parallel_config.worker_cls == WORKER_CLS
    if is_paged:
        llm.collective_rpc("moe_lightning_reset")
    started_s = time.monotonic()
    outputs = llm.generate(
        prompts,
        SamplingParams(temperature=job.temperature, max_tokens=job.max_tokens, seed=job.seed),
        use_tqdm=True,
    )
    duration_s = time.monotonic() - started_s
    stats = llm.collective_rpc("moe_lightning_stats")[0] if is_paged else {"device": "stock vLLM, nothing paged"}
    texts = [output.outputs[0].text for output in outputs]
    report = _report(job, outputs, duration_s, stats)
    if is_paged:
        report["predicted_job"] = _predicted_job(llm.llm_engine.vllm_config, report)
    # Files first: nothing that goes wrong with the screen may lose a long job's answers.
    if output_file is not None:
        output_file.parent.mkdir(parents=True, exist_ok=True)
        rows = [json.dumps({"prompt": p, "text": t}) for p, t in zip(prompts, texts, strict=True)]
        output_file.write_text("\n".join(rows) + "\n", encoding="utf-8")
    if report_file is not None:
        report_file.parent.mkdir(parents=True, exist_ok=True)
        report_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    console = Console()
    if show_texts:
        for prompt, text in zip(prompts, texts, strict=True):
            console.print(Text.assemble((prompt, "bold"), text, "\n"))
    console.print(_table(report))
    if report_file is not None:
        console.print(f"report: {report_file}")
    return report


def _expected_lengths(job: BulkJob, prompts: list[str]) -> dict[str, Any]:
    """The planner need not guess: the prompts are here."""
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    mean = sum(len(tokenizer.encode(prompt)) for prompt in prompts) / len(prompts)
    longest = job.max_model_len or tokenizer.model_max_length
    return {
        "expected_prompt_tokens": max(1.0, mean),
        "expected_generation_tokens": max(1, min(job.max_tokens, int(longest - mean))),
    }


def _report(job: BulkJob, outputs: list[Any], duration_s: float, stats: dict[str, Any]) -> dict[str, Any]:
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    generated_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "model": str(job.model),
        "prompts": len(outputs),
        "prompt_tokens": prompt_tokens,
        "generated_tokens": generated_tokens,
        "duration_s": duration_s,
        "tokens_per_s": generated_tokens / duration_s,
        **stats,
    }


def _predicted_job(vllm_config: Any, report: dict[str, Any]) -> dict[str, Any] | None:
    """Of this job, by the number of requests and the mean lengths that came; None without a plan."""
    from vllm_moe_lightning.integration.planning import rank_of_plan

    plan = plan_of(vllm_config)
    if plan is None:
        return None
    count = report["prompts"]
    lengths = [max(1, round(report[name] / count)) for name in ("prompt_tokens", "generated_tokens")]
    spec, machine = rank_of_plan(vllm_config, parse_options(vllm_config.additional_config[OPTIONS_KEY]))
    figures: dict[str, Any] = msgspec.to_builtins(predict_planned_job(plan, spec, machine, Job(count, *lengths)))
    return figures


def _table(report: dict[str, Any]) -> Table:
    """One table: speed, and if experts were paged what moved and what was busy, predicted for this job and achieved."""
    table = Table("", "predicted", "achieved", title=f"moe_lightning, device: {report['device']}")
    is_paged = "policy" in report
    if is_paged:
        for row in comparison(_predicted(report), _achieved(report)):
            table.add_row(*row)
    else:
        table.add_row("generated tokens per second", "", f"{report['tokens_per_s']:.1f}")
    counts = f"{report['prompts']}, {report['prompt_tokens']}, {report['generated_tokens']}"
    table.add_row("prompts, prompt tokens, generated tokens", "", counts)
    for name, value in _paging_rows(report) if is_paged else ():
        table.add_row(name, "", value)
    return table


def _paging_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    policy = report["policy"]
    streamed, resident = len(policy["streamed_layers"]), len(policy["resident_layers"])
    on_host = report["expert_bytes_on_host"]
    experts = on_host / streamed * (streamed + resident) if streamed else report["expert_bytes_on_device"]
    return [
        ("sweeps over the layers", f"{report['sweeps']}"),
        ("pages moved to the device", f"{report['pages_moved']} ({report['bytes_paged'] / MIB:.1f} MiB)"),
        (
            "experts on the device",
            f"{report['expert_bytes_on_device'] / MIB:.1f} of {experts / MIB:.1f} MiB "
            f"({report['expert_bytes_on_device'] / experts:.0%})",
        ),
        ("waiting", f"{report['wait_s']:.2f} s of {report['sweep_s']:.2f} s in sweeps"),
        (
            "policy in force",
            f"{policy['schedule']}, {policy['num_micro_batches']} micro-batches, look-ahead {policy['lookahead']}, "
            f"{streamed} layers streamed, {resident} resident, pages of {policy['page_bytes'] / MIB:.2f} MiB",
        ),
    ]


def _predicted(report: dict[str, Any]) -> PredictedFigures | None:
    predicted = report["predicted_job"]
    return None if predicted is None else msgspec.convert(predicted, PredictedFigures)


def _achieved(report: dict[str, Any]) -> AchievedFigures:
    """Tokens per second of the whole job; shares from the first sweep to the last."""
    return AchievedFigures(
        generated_tokens_per_s=report["tokens_per_s"],
        computed_tokens_per_s=report["tokens"] / report["duration_s"],
        sweep_s=report["sweep_s"] / max(1, report["sweeps"]),
        busy={
            "gpu": report["gpu_busy"],
            "cpu": report["cpu_attention_busy"],
            "h2d": report["link_busy"],
            "d2h": report["d2h_busy"],
        },
    )
