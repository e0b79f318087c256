#!/usr/bin/env python
"""What others would pick on a CPU, on the same small model: llama.cpp, transformers, accelerate; and stock vLLM.

At batch 1 and 64, so that a reader sees where we lose and where we win. All have the weights in RAM and all CPUs; our
engine pages its experts through an emulated device and computes on one thread. A package that is not installed is a row
with the reason and what installs it, into a folder of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.arm_engine import ArmEngine, EngineSettings
from benchmarks.baseline_arms import (
    PACKAGES,
    TRANSFORMERS,
    BaselineArm,
)
from benchmarks.competition import order_of_round
from benchmarks.job_checkpoint import CheckpointShape, write_checkpoint
from benchmarks.machine import ROOT, describe
from benchmarks.round_figures import ratios, spread
from benchmarks.throughput_arms import BLOCK_SIZE
from benchmarks.workloads import PaperWorkload, encoded_passages, make_prompts

PACKAGES_FOLDER = ROOT / "build" / "baselines"
PROMPT_LEN, GEN_LEN = 77, 32
EQUAL_LENGTHS = PaperWorkload("equal lengths", PROMPT_LEN, PROMPT_LEN, GEN_LEN)
BATCHES = (1, 64)
SLOW_S = 20.0
"""An arm that takes longer for a batch is measured once."""
OURS, OURS_AUTO, STOCK = "ours", "ours with experts auto", "vLLM"
DEVICE_MEMORY_MIB = 100.0  # of 151 MB of experts and 13 MB of other weights
QUICK_CHECKPOINT = CheckpointShape(num_layers=4, hidden=256, intermediate=512, num_heads=4)
QUICK_DEVICE_MEMORY_MIB = 24.0


class Arms:
    """All that start; the others with their reasons."""

    def __init__(
        self, folder: Path, shape: CheckpointShape, packages: Path, names: Sequence[str], budget: float
    ) -> None:
        self._folder, self._shape, self._packages, self._budget = folder, shape, packages, budget
        self._stack = ExitStack()
        self.engines: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        for name in names:
            try:
                engine = self._stack.enter_context(self._start(name))
            except RuntimeError as error:
                self.missing[name] = _with_cure(name, str(error), packages)
                continue
            self.engines[name] = engine
            started = engine.started
            self.facts[name] = started if name in PACKAGES else started.conditions

    def _start(self, name: str) -> Any:
        most = max(BATCHES) * (PROMPT_LEN + GEN_LEN)
        if name in PACKAGES:
            return BaselineArm(name, self._folder, self._shape, self._packages, most)
        blocks = max(BATCHES) * -(-(PROMPT_LEN + GEN_LEN) // BLOCK_SIZE) + 1
        args = {
            "block_size": BLOCK_SIZE,
            "kv_cache_memory_bytes": blocks * BLOCK_SIZE * self._shape.kv_bytes_per_token,
            "max_model_len": PROMPT_LEN + GEN_LEN,
            "enable_prefix_caching": False,
            "enforce_eager": True,
        }
        if name == STOCK:
            threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
            return ArmEngine(self._folder, EngineSettings(args, None, threads))
        options = {
            "expected_prompt_tokens": PROMPT_LEN,
            "expected_generation_tokens": GEN_LEN,
            "schedule": "cgopipe",
            "device_memory_mib": self._budget,
            "experts": "auto" if name == OURS_AUTO else "device",
        }
        return ArmEngine(self._folder, EngineSettings(args, options))

    def run(self, name: str, prompts: tuple[tuple[int, ...], ...]) -> tuple[float, list[int]]:
        """(seconds, the first token of each answer where the arm tells them)"""
        run = self.engines[name].run(prompts, GEN_LEN)
        expected = len(prompts) * GEN_LEN
        if run.num_generated != expected:
            raise RuntimeError(f"{name} generated {run.num_generated} tokens of {expected}")
        if name == OURS and not run.bytes_paged:
            raise RuntimeError(f"{name} moved no page to the device")
        return run.elapsed_s, [answer[0] for answer in getattr(run, "answers", ())]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _with_cure(name: str, reason: str, packages: Path) -> str:
    wanted = [package for package in PACKAGES.get(name, ()) if not _is_there(package, packages)]
    if not wanted:
        return reason
    return f"{reason}; pip install --target {_shown(packages)} --no-deps {' '.join(wanted)}"


def _is_there(package: str, packages: Path) -> bool:
    module = package.removesuffix("-python").replace("-", "_")
    return (packages / module).is_dir() or importlib.util.find_spec(module) is not None


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def measure(arms: Arms, num_rounds: int, console: Console) -> list[dict[str, Any]]:
    """A row for each batch and arm."""
    passages = encoded_passages()
    rows = []
    for batch in BATCHES:
        elapsed_s: dict[str, list[float]] = {name: [] for name in arms.engines}
        first_tokens: dict[str, list[int]] = {}
        for index in range(-1, num_rounds):  # the first does not count
            prompts = make_prompts(EQUAL_LENGTHS, batch, passages, seed=1000 * batch + index + 1).token_ids
            for name in order_of_round(list(elapsed_s), max(index, 0)):
                if elapsed_s[name] and elapsed_s[name][0] > SLOW_S:
                    continue
                try:
                    seconds, answer = arms.run(name, prompts)
                except RuntimeError as error:
                    arms.missing[f"{name}, batch {batch}"] = str(error)
                    elapsed_s.pop(name)
                    continue
                if index < 0:
                    first_tokens[name] = answer
                    continue
                elapsed_s[name].append(seconds)
                console.print(f"  batch {batch}, round {index + 1}, {name}: {seconds:.2f} s", markup=False)
        rows += [_row(arms, batch, name, elapsed_s, first_tokens) for name in elapsed_s]
    return rows


def _row(
    arms: Arms,
    batch: int,
    name: str,
    elapsed_s: Mapping[str, Sequence[float]],
    first_tokens: Mapping[str, Sequence[int]],
) -> dict[str, Any]:
    rates = spread(batch * GEN_LEN / seconds for seconds in elapsed_s[name])
    row: dict[str, Any] = {
        "batch_size": batch,
        "arm": name,
        "device": "emulated" if name in (OURS, OURS_AUTO) else "cpu",
        "prompt_len": PROMPT_LEN,
        "gen_len": GEN_LEN,
        "tokens_per_s": rates["median"],
        "tokens_per_s_spread": rates["spread"],
        "elapsed_s_rounds": list(elapsed_s[name]),
        "facts": arms.facts[name],
    }
    if name != OURS and OURS in elapsed_s:
        row["ours_is_faster_by"] = ratios(elapsed_s[name], elapsed_s[OURS][: len(elapsed_s[name])])
    reference, tokens = first_tokens.get(TRANSFORMERS), first_tokens[name]
    if name != TRANSFORMERS and reference and tokens:
        same = sum(ours == theirs for ours, theirs in zip(tokens, reference, strict=True))
        row["first_tokens_as_transformers"] = same / batch
    return row


def show(result: Mapping[str, Any], console: Console) -> None:
    table = Table(title=f"Generated tokens/s, prompts of {PROMPT_LEN}, {GEN_LEN} generated, prefill included; CPU only")
    for column in ("batch", "arm", "tokens/s", "min..max", "ours is faster by", "same first token", "version"):
        table.add_column(column, justify="left" if column in ("arm", "version") else "right")
    for row in result["rows"]:
        low, high = row["tokens_per_s_spread"]
        over = row.get("ours_is_faster_by")
        same = row.get("first_tokens_as_transformers")
        table.add_row(
            str(row["batch_size"]),
            row["arm"],
            f"{row['tokens_per_s']:.1f}",
            f"{low:.1f}..{high:.1f}",
            f"{over['median']:.2f}" if over else "",
            "" if same is None else f"{same:.0%}",
            str(row["facts"].get("version", "")),
        )
    console.print(table)
    for name, reason in result["not_run"].items():
        console.print(f"not run: {name}: {reason}", markup=False)
    head = result["machine"]
    console.print(
        f"{head['cpu']}, {head['num_cpus']} CPUs, load {head['load_average']:.1f}, commit {head['commit']}. Ours pages "
        f"through an emulated device and computes on one thread. Not measured: a GPU, other models, quantised weights."
    )


def main(
    json_file: Annotated[Path, typer.Option("--json", help="Where the results go.")],
    packages: Annotated[Path, typer.Option(help="Folder that pip installed the others into.")] = PACKAGES_FOLDER,
    arms: Annotated[str | None, typer.Option(help="Names, comma-separated. Default: all.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in each of which every arm answers.")] = 3,
    quick: Annotated[bool, typer.Option(help="A smaller model: shows that it runs.")] = False,
) -> None:
    """Measure all arms in turns, print a table, write JSON."""
    known = [OURS, OURS_AUTO, STOCK, *PACKAGES]
    names = known if arms is None else arms.split(",")
    if unknown := sorted(set(names) - set(known)):
        raise typer.BadParameter(f"--arms {unknown}; there are {', '.join(known)}")
    shape = QUICK_CHECKPOINT if quick else CheckpointShape()
    console = Console(width=max(Console().width, 130))
    head = describe()
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), shape, max_positions=1024)
        with Arms(
            Path(folder), shape, packages, names, QUICK_DEVICE_MEMORY_MIB if quick else DEVICE_MEMORY_MIB
        ) as all_arms:
            rows = measure(all_arms, rounds, console)
            missing = all_arms.missing
    result = {
        "machine": head,
        "rows": rows,
        "not_run": missing,
        "checkpoint": {**asdict(shape), "expert_bytes": shape.expert_bytes},
        "num_rounds": rounds,
    }
    show(result, console)
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
