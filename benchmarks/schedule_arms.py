"""All schedules and the stock-like prefetcher on one engine, in rounds that stand another arm first each time."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from benchmarks.check_run import CheckRun
from benchmarks.fp64_checks import token_error
from benchmarks.gpu_device import DeviceKind, make_device
from benchmarks.gpu_engine import ARMS, GpuEngine
from benchmarks.gpu_plan import Check
from benchmarks.host_sync import launches_without_host_sync
from vllm_moe_lightning.config import MoeLightningConfig
from vllm_moe_lightning.pipeline.schedule import SCHEDULE_NAMES

# Between schedules: they compute the same step, but S4's attention is another kernel.
MOST_DIFFERENCE = 0.05
ROUND_VARIES = 1.2
NEVER_DROPPED = 2
"""Of ARMS: CGOPipe, and what it is compared with."""


def measure_schedules(
    check: Check, kind: DeviceKind, options: MoeLightningConfig, num_seqs: int, run: CheckRun, reserve_s: float
) -> dict[str, Any]:
    """What each arm gave, in run.result["arms"] after each; an arm that failed sits out the rounds to come.

    reserve_s: what later parts take: a round but the first is dropped where it would eat into that.
    """
    check.require_host_memory()
    arms = run.result["arms"] = {"rows": [], "null_reasons": {}, "failures": {}, "rounds": 0, "arm_s": {}}
    with ExitStack() as stack:
        device = make_device(kind, check.device_memory_bytes)
        stack.callback(device.close)  # also where the engine cannot be made
        bench = GpuEngine(check.model, device, options, num_seqs, check.context_len)
        stack.callback(bench.close)
        arms |= {
            "memory": device.memory_report().splitlines(),
            "experts_bytes": bench.engine.store.host_bytes,
            "page_bytes": bench.engine.policy.page_bytes,
        }
        _round(0, check, bench, arms, run)
        arms["difference_from_cgopipe"] = _differences(bench, run)
        asks_for_host_sync = kind is DeviceKind.CUDA and bool(bench.arms["cgopipe"].step_s)
        arms["sweep_without_host_sync"] = _host_sync(bench, run) if asks_for_host_sync else None
        run.write()
        _further_rounds(check, bench, arms, run, reserve_s)
    return arms


def _further_rounds(check: Check, bench: GpuEngine, arms: dict[str, Any], run: CheckRun, reserve_s: float) -> None:
    for index in range(1, check.most_rounds):
        rounds, expected_s = f"rounds {index + 1} to {check.most_rounds} of all arms", sum(arms["arm_s"].values())
        if run.lost is not None or not run.has_time_for(rounds, expected_s * ROUND_VARIES, reserve_s):
            return
        _round(index, check, bench, arms, run)


def _round(index: int, check: Check, bench: GpuEngine, arms: dict[str, Any], run: CheckRun) -> None:
    """Of all arms but those that failed before. Of the first round, what the goals want is never dropped."""
    for position in range(len(ARMS)):
        name = ARMS[(index + position) % len(ARMS)]
        if name in arms["failures"]:
            continue
        if index == 0 and position >= NEVER_DROPPED:
            expected_s = ROUND_VARIES * max(arms["arm_s"].values(), default=0.0)
            if not run.has_time_for(f"arm {name}", expected_s):
                continue
        run.console.print(f"round {index + 1}: {name}", style="dim")
        started_s = time.monotonic()
        attempt = run.attempt(lambda name=name: bench.measure(name, check.steps_per_round))
        arms["arm_s"][name] = time.monotonic() - started_s
        if attempt.why is not None:
            arms["failures"][name] = attempt.failure or {"error": [f"not run: {attempt.not_run}"]}
            run.fail(f"arm {name}", attempt.why)
        arms["rows"] = [arm.row(name) for name, arm in bench.arms.items() if arm.step_s]
        arms["null_reasons"] = dict(bench.null_reasons)
        run.write()
    arms["rounds"] = index + 1
    run.write()


def _differences(bench: GpuEngine, run: CheckRun) -> dict[str, float]:
    """Error of each schedule's hidden states against CGOPipe's, of those that ran."""
    hidden = {}
    for name in SCHEDULE_NAMES:
        if not bench.arms[name].step_s:  # it failed, had no room, or no time
            continue
        attempt = run.attempt(lambda name=name: bench.hidden_states(name))
        if attempt.value is None:
            run.fail(f"hidden states of {name}", attempt.why or "")
        else:
            hidden[name] = attempt.value
    if "cgopipe" not in hidden:
        return {}
    differences = {name: token_error(result, hidden["cgopipe"]) for name, result in hidden.items()}
    for name, error in differences.items():
        if not error <= MOST_DIFFERENCE:
            run.fail(f"arm {name}", f"its hidden states differ from CGOPipe's by {error:.2g}")
    return differences


def _host_sync(bench: GpuEngine, run: CheckRun) -> str | None:
    """Of a step of CGOPipe's, with its kernels loaded and under its schedule."""

    def found() -> str:
        bench.hidden_states("cgopipe")
        return launches_without_host_sync(bench.take)

    attempt = run.attempt(found)
    if attempt.value is None:
        run.fail("host synchronisation, cgopipe", attempt.why or "")
    return attempt.value
