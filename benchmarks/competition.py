"""Arms that take turns on the same prompts: starts their engines, plays the rounds, and makes rows of the runs.

Each round has prompts of its own, the same for all arms, and another order; warm-up runs have others and don't count.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from benchmarks.arm_engine import ArmEngine, ArmRun, ArmStarted, EngineSettings
from benchmarks.round_figures import ratios, spread
from benchmarks.stock_offload import StockSetting
from benchmarks.throughput_arms import OURS, Arm, Field, best_settings, check_run
from benchmarks.workloads import PaperWorkload, PromptSet, make_prompts
from vllm_moe_lightning.job_prediction import Job
from vllm_moe_lightning.planned_job import predict_planned_job

WARM_REQUESTS, WARM_TOKENS = 4, 2
SEARCH_SEED = 1_000_003  # other prompts than any round's


def order_of_round(names: Sequence[str], index: int) -> list[str]:
    """Every other round backwards, and each two rounds from another one on: who runs after whom changes too."""
    first = index // 2 * 2 % len(names)
    order = [*names[first:], *names[:first]]
    return order[::-1] if index % 2 else order


class Competition:
    """One workload. Engines start when their arm's turn comes first, and stay unless there is no room for all."""

    def __init__(
        self,
        field: Field,
        model: Path,
        workload: PaperWorkload,
        passages: Sequence[Sequence[int]],
        num_requests: int,
        *,
        padded: bool,
    ) -> None:
        self.field, self.workload, self.padded = field, workload, padded
        self.arms = {arm.name: arm for arm in field.arms}
        self.runs: dict[str, list[ArmRun]] = {}
        self.started: dict[str, ArmStarted] = {}
        self.remarks: list[dict[str, Any]] = []
        self.sets: list[PromptSet] = []
        self._model, self._passages, self._num_requests = model, passages, num_requests
        self._engines: dict[str, ArmEngine] = {}
        self._settings = dict(field.engines)
        self._stack = ExitStack()

    def prompts(self, seed: int) -> PromptSet:
        return make_prompts(self.workload, self._num_requests, self._passages, seed, padded=self.padded)

    def search(self, console: Console) -> None:
        """The best setting of each arm that has several, on other prompts than the rounds'."""
        prompts = self.prompts(SEARCH_SEED)

        def rate_of(setting: StockSetting) -> float:
            console.print(f"  trying {setting.arm}: {setting.label}", markup=False)
            with ArmEngine(self._model, self._searched_engine(setting)) as engine:
                self._warm(engine)
                run = engine.run(prompts.token_ids, self.workload.gen_len)
            return run.num_generated / run.elapsed_s

        best, tried = best_settings(self.field.searched, rate_of)
        for arm, setting in best.items():
            self.arms[arm] = Arm(arm, arm, must_page=True)
            self._settings[arm] = self._searched_engine(setting)
        self.remarks += [self._remark(record) for record in tried]

    def _searched_engine(self, setting: StockSetting) -> EngineSettings:
        return EngineSettings(setting.engine_args, None, self.field.engines[OURS].environment)

    def _remark(self, record: Mapping[str, Any]) -> dict[str, Any]:
        return {"workload": self.workload.name, "padded": self.padded, **record}

    def play(self, num_rounds: int, console: Console) -> None:
        """An arm that does not start, or fails in a run, is out, and a remark says why."""
        self.runs = {name: [] for name in self.arms}
        self.sets = [self.prompts(index) for index in range(num_rounds)]
        for index, prompts in enumerate(self.sets):
            for name in order_of_round(list(self.arms), index):
                if name not in self.runs:
                    continue
                try:
                    run = self._take(self.arms[name], prompts)
                except RuntimeError as error:
                    self.runs.pop(name)
                    self.remarks.append(self._remark({"arm": name, "not_run": str(error)}))
                    console.print(f"  not run: {name}: {error}", markup=False)
                    continue
                self.runs[name].append(run)
                rate = run.num_generated / run.elapsed_s
                console.print(f"  round {index + 1}, {name}: {run.elapsed_s:.1f} s, {rate:.1f} tokens/s", markup=False)

    def _take(self, arm: Arm, prompts: PromptSet) -> ArmRun:
        engine = self._engine(arm.engine)
        self.started[arm.name] = engine.started
        run = engine.run(prompts.token_ids, self.workload.gen_len, arm.schedule)
        check_run(arm, engine.started, run, prompts.num_requests * self.workload.gen_len)
        return run

    def _engine(self, name: str) -> ArmEngine:
        if name not in self._engines:
            if not self.field.alive_at_once:
                self._stack.close()
                self._engines.clear()
            engine = self._stack.enter_context(ArmEngine(self._model, self._settings[name]))
            self._warm(engine)
            self._engines[name] = engine
        return self._engines[name]

    def _warm(self, engine: ArmEngine) -> None:
        engine.run(self.prompts(SEARCH_SEED + 1).token_ids[:WARM_REQUESTS], WARM_TOKENS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def modelled_tokens_per_s(started: ArmStarted, job: Job) -> float | None:
    """By the cost model over the job's sweeps, all resources overlapped: the HRM's bound, with prompts of the mean
    length. None where nothing was planned."""
    if started.plan is None or started.spec is None or started.machine is None:
        return None
    return predict_planned_job(started.plan, started.spec, started.machine, job).generated_tokens_per_s


def rows_of(competition: Competition) -> list[dict[str, Any]]:
    workload, padded = competition.workload, competition.padded
    ours_s = [run.elapsed_s for run in competition.runs.get(OURS, ())]
    rows = []
    for name, runs in competition.runs.items():
        started, sets = competition.started[name], competition.sets
        elapsed_s = [run.elapsed_s for run in runs]
        # Lengths are the same in all rounds, in another order.
        text, padding, generated = sets[0].text_tokens, sets[0].padding_tokens, runs[0].num_generated
        rates = spread(generated / seconds for seconds in elapsed_s)
        last = runs[-1]
        row: dict[str, Any] = {
            "workload": workload.name,
            "padded": padded,
            "arm": name,
            "device": started.conditions["device"],
            "num_requests": sets[0].num_requests,
            "prompt_mean": workload.prompt_mean,
            "prompt_max": workload.prompt_max,
            "gen_len": workload.gen_len,
            "text_tokens": text,
            "padding_tokens": padding,
            "generated_tokens": generated,
            "tokens_per_s": rates["median"],
            "tokens_per_s_spread": rates["spread"],
            "text_tokens_per_s": (text + generated) / statistics.median(elapsed_s),
            "computed_tokens_per_s": (text + padding + generated) / statistics.median(elapsed_s),
            "elapsed_s_rounds": elapsed_s,
            "others_cpu_share_rounds": [run.others_cpu_share for run in runs],
            "prefix_hits": sum(run.prefix_hits for run in runs),
            "num_preemptions": None if last.num_preemptions is None else sum(run.num_preemptions for run in runs),
            "num_sweeps": last.num_sweeps,
            "bytes_paged": last.bytes_paged,
            "stock_offloaded_bytes": started.stock_offloaded_bytes,
            "busy": last.busy,
            "conditions": started.conditions,
        }
        if name == OURS:
            prompt_len = workload.prompt_max if padded else workload.prompt_mean
            job = Job(sets[0].num_requests, prompt_len, workload.gen_len)
            row["modelled_tokens_per_s"] = modelled_tokens_per_s(started, job)
        elif ours_s:
            row["cgopipe_is_faster_by"] = ratios(elapsed_s, ours_s)
        rows.append(row)
    return rows


def unequal_conditions(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Settings that are not the same in all arms of a workload: name -> arm -> value, of the first such workload."""
    unequal: dict[str, dict[str, Any]] = {}
    for workload in dict.fromkeys((row["workload"], row["padded"]) for row in rows):
        of_workload = [row for row in rows if (row["workload"], row["padded"]) == workload]
        for name in dict.fromkeys(name for row in of_workload for name in row["conditions"]):
            values = {row["arm"]: row["conditions"].get(name) for row in of_workload}
            if len(set(map(str, values.values()))) > 1:
                unequal.setdefault(name, values)
    return unequal


def summary_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over the workloads, of medians over their rounds."""
    others: dict[str, list[float]] = {}
    for row in rows:
        if "cgopipe_is_faster_by" in row:
            others.setdefault(row["arm"], []).append(row["cgopipe_is_faster_by"]["median"])
    shares = [row["tokens_per_s"] / row["modelled_tokens_per_s"] for row in rows if row.get("modelled_tokens_per_s")]
    return {
        "cgopipe_is_faster_by": {name: spread(values) for name, values in others.items()},
        "cgopipe_share_of_modelled_bound": spread(shares) if shares else None,
        "num_rounds": min((len(row["elapsed_s_rounds"]) for row in rows), default=0),
        "prefix_hits": sum(row["prefix_hits"] for row in rows),
        "others_cpu_share": statistics.median(share for row in rows for share in row["others_cpu_share_rounds"])
        if rows
        else 0.0,
        "unequal_conditions": unequal_conditions(rows),
    }
