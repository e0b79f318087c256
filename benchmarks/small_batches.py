"""Decode steps of few tokens, with experts where they may be: streamed by the layer, on the CPU, fetched one by one.

Few tokens ask for few experts, which a layer that streams does not care about. Each step has tokens of its own, since
the same ones would find their experts on the device; drawn weights route all alike, the worst case for residency.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import msgspec
import torch

from benchmarks.check_run import CheckRun, Row
from benchmarks.decoder_engine import Step
from benchmarks.fp64_checks import token_error
from benchmarks.gpu_device import DeviceKind, make_device
from benchmarks.gpu_engine import Arm, GpuEngine
from benchmarks.gpu_plan import Check
from benchmarks.round_figures import ratios, spread
from benchmarks.schedule_arms import MOST_DIFFERENCE, ROUND_VARIES
from vllm_moe_lightning.config import ExpertsPlace, MoeLightningConfig
from vllm_moe_lightning.hardware import MIB

NUM_TOKENS = (1, 4, 16)
PLACES: dict[str, ExpertsPlace] = {"streamed": "device", "on the CPU": "cpu", "fetched": "fetched"}
RESIDENT_RATIO = 0.5
"""Of all experts, those that have room on the device where they are fetched: of four layers what two slots take."""
MOST_ROUNDS = 3
STEPS_PER_ROUND = 6
NUM_STEPS = 64
"""Different ones, so that no round finds what the round before has fetched for the same tokens."""
ACTIVATIONS_BYTES = 1024 * MIB  # on a GPU left to torch


@dataclass
class _Case:
    place: str
    num_tokens: int
    arm: Arm
    steps: Iterator[Step]
    """The same for all places, round by round."""
    hit_ratios: list[float] = field(default_factory=list)


def measure_small_batches(
    check: Check, kind: DeviceKind, options: MoeLightningConfig, run: CheckRun, reserve_s: float
) -> dict[str, Any]:
    """In run.result["small_batches"] after each round. reserve_s: what later parts take."""
    check.require_host_memory()
    found = run.result["small_batches"] = {"rows": [], "failures": {}}
    one_micro_batch = msgspec.structs.replace(options, num_micro_batches=1)
    with ExitStack() as stack:
        device = make_device(kind, None)
        stack.callback(device.close)
        bench = GpuEngine(check.small_batch_model, device, one_micro_batch, max(NUM_TOKENS), check.context_len)
        stack.callback(bench.close)
        num_slots = _slots(bench)
        num_experts = bench.config.num_layers * bench.config.num_experts
        found |= {"expert_slots": num_slots, "num_experts": num_experts, "num_layers": bench.config.num_layers}
        steps = {count: list(_steps(bench, count)) for count in NUM_TOKENS}
        found["difference_from_streamed"] = _differences(bench, steps[max(NUM_TOKENS)][0], num_slots, found, run)
        cases = [_Case(place, count, Arm(count), cycle(steps[count])) for count in NUM_TOKENS for place in PLACES]
        round_s = 0.0
        for index in range(MOST_ROUNDS):
            rounds = f"rounds {index + 1} to {MOST_ROUNDS} of small batches"
            if index and not run.has_time_for(rounds, round_s, reserve_s):
                break
            started_s = time.monotonic()
            for case in cases[index:] + cases[:index]:
                if case.place not in found["failures"]:
                    _round(bench, case, num_slots, found, run)
            round_s = ROUND_VARIES * (time.monotonic() - started_s)
            found["rows"] = list(_rows(cases))
            run.write()
    return found


def _slots(bench: GpuEngine) -> int:
    """Half of all experts, or as many as the device has room for."""
    config, device = bench.config, bench.device
    expert_bytes = 3 * config.hidden * config.intermediate * config.dtype.itemsize
    wanted = max(1, int(RESIDENT_RATIO * config.num_layers * config.num_experts))
    if device.memory_budget_bytes is None:
        return wanted
    room = device.memory_budget_bytes - device.memory_used_bytes - ACTIVATIONS_BYTES
    return max(1, min(wanted, room // expert_bytes))


def _steps(bench: GpuEngine, num_tokens: int) -> Iterator[Step]:
    """Of the same sequences, each with other tokens."""
    rng = torch.Generator().manual_seed(num_tokens)
    whole, rows = bench.step, list(range(num_tokens))
    _, selected = whole.select(rows)
    for _ in range(NUM_STEPS):
        token_ids = torch.randint(0, bench.config.vocab_size, (num_tokens,), generator=rng)
        lens = whole.query_lens[:num_tokens], whole.seq_lens[:num_tokens]
        yield Step(token_ids, whole.positions[:num_tokens], *lens, selected)


def _round(bench: GpuEngine, case: _Case, num_slots: int, found: dict[str, Any], run: CheckRun) -> None:
    def take() -> torch.Tensor:
        return bench.model.greedy(bench.engine.step(next(case.steps)))

    def measure() -> None:
        _place(bench, case.place, num_slots)
        counters = bench.engine.executor.residency_counters
        hits, misses = counters.num_hits, counters.num_misses
        bench.add_round(case.arm, take, STEPS_PER_ROUND)
        hits, misses = counters.num_hits - hits, counters.num_misses - misses
        if hits + misses:
            case.hit_ratios.append(hits / (hits + misses))

    _attempt(case.place, measure, found, run)


def _place(bench: GpuEngine, place: str, num_slots: int) -> None:
    bench.device.synchronize()
    bench.engine.place_experts(PLACES[place], num_slots if place == "fetched" else None)


def _attempt(place: str, function: Callable[[], Any], found: dict[str, Any], run: CheckRun) -> Any:
    attempt = run.attempt(function)
    if attempt.why is not None:
        found["failures"][place] = attempt.failure or {"error": [f"not run: {attempt.not_run}"]}
        run.fail(f"small batches, experts {place}", attempt.why)
    return attempt.value


def _differences(
    bench: GpuEngine, step: Step, num_slots: int, found: dict[str, Any], run: CheckRun
) -> dict[str, float]:
    """Error of the hidden states against those with streamed experts."""
    hidden: dict[str, torch.Tensor] = {}

    def compute(place: str) -> torch.Tensor:
        _place(bench, place, num_slots)
        return bench.engine.step(step).cpu()

    for place in PLACES:
        result = _attempt(place, lambda place=place: compute(place), found, run)
        if result is not None:
            hidden[place] = result
    if "streamed" not in hidden:
        return {}
    differences = {place: token_error(result, hidden["streamed"]) for place, result in hidden.items()}
    for place, error in differences.items():
        if not error <= MOST_DIFFERENCE:
            run.fail(f"small batches, experts {place}", f"hidden states differ from streamed ones' by {error:.2g}")
    return differences


def _rows(cases: list[_Case]) -> Iterator[Row]:
    """Ratios are of one round each."""
    streamed = {case.num_tokens: case.arm for case in cases if case.place == "streamed"}
    for case in cases:
        arm, other = case.arm, streamed[case.num_tokens]
        if not arm.step_s:
            continue
        row = {
            "place": case.place,
            "num_tokens": case.num_tokens,
            "step_s": spread(arm.step_s),
            "tokens_per_s": spread(case.num_tokens / step_s for step_s in arm.step_s),
            "h2d_bytes_per_step": spread(arm.h2d_bytes),
            "hit_ratio": spread(case.hit_ratios) if case.hit_ratios else None,
        }
        if len(arm.step_s) == len(other.step_s):
            row["throughput_over_streamed"] = ratios(other.step_s, arm.step_s)
            row["h2d_bytes_over_streamed"] = ratios(arm.h2d_bytes, other.h2d_bytes)
        yield row
