# SPDX-License-Identifier: Apache-2.0
"""No wait is missing, and none is there for nothing: with each one removed, something must be seen to go wrong.

Two instruments. The hazard checker judges by the order that events guarantee and finds every missing wait that guards
data. Under `lazy` or `jitter` with `poison`, a missing wait shows in the result as well, if the emulated device can
get it wrong at all: its launching thread is the compute stream, so what waits for compute there cannot come too early.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.torch_decoder import DecoderConfig
from tests.helpers.decoder import all_equal, make_engine, plain_dummy, plain_run, run, run_dummy
from vllm_moe_lightning.errors import HazardError
from vllm_moe_lightning.pipeline.schedule import SweepShape, make_schedule
from vllm_moe_lightning.pipeline.simulator import simulate
from vllm_moe_lightning.pipeline.tasks import wait_name

NAMES = ("cgopipe", "serial", "s2", "s3", "s4")
COUNT = 3
# Some waits matter with several layers, others only where a sweep's last layer is its first, too. Dummy sweeps have
# no hidden states to wait for, so there only the waits for pages stand between a layer and its weights.
CONFIGS = (DecoderConfig(num_layers=4), DecoderConfig(num_layers=1))
LAZY = {"timing": "lazy", "poison": True}
JITTER_SEEDS = range(20)

# Not for safety: it keeps serial's first micro-batch from starting while the pages come up.
ORDER_ONLY = {("serial", "pre_attention<-weight_page")}

SHOWS_UNDER_LAZY = {
    **{
        name: {
            "attention<-qkv_offload",
            "hidden_load<-attention",
            "post_attention<-hidden_load",
            "post_attention<-weight_page",
        }
        for name in ("cgopipe", "serial", "s2", "s3")
    },
    "s4": {
        "device_attention<-kv_load",
        "kv_load<-sweep_start",
        "post_attention<-weight_page",
        "pre_attention<-qkv_offload",
        "pre_attention<-sweep_start",
        "qkv_offload<-kv_append",
    },
}
# Under lazy, the tasks that compute itself waits for pull this one along in time.
SHOWS_UNDER_JITTER = {("s4", "kv_append<-qkv_offload")}
# Their awaited task is the launching thread's own. In qkv_offload<-sweep_start (S4) it is the CPU's appends of the
# sweep before, and another wait happens to come first on the emulated device.
CHECKER_ONLY = {
    "qkv_offload<-pre_attention",
    "weight_page<-post_attention",
    "weight_page<-sweep_start",
    "kv_load<-device_attention",
    "qkv_offload<-sweep_start",
}


def all_waits() -> Iterator[tuple[str, str]]:
    for name in NAMES:
        for with_attention in (True, False):
            shape = SweepShape(4, COUNT, (5, 5, 5, 5), with_attention=with_attention)
            yield from ((name, wait) for wait in make_schedule(name, shape).wait_names())


WAITS = sorted(set(all_waits()))


def is_right(config: DecoderConfig, device: dict[str, Any], name: str, **options: Any) -> bool:
    """Whether dummy sweeps, prefill, mixed and decode steps, and dummy sweeps again all give the plain result."""
    with make_engine(config, device=device, schedule=name, num_micro_batches=COUNT, **options) as engine:
        dummies = [run_dummy(engine) for _ in range(3)]
        steps = run(engine)
        dummies += [run_dummy(engine) for _ in range(3)]
    return all_equal(steps, plain_run(config, COUNT)) and all(torch.equal(d, plain_dummy(config)) for d in dummies)


def is_right_without(wait: str, device: dict[str, Any], name: str) -> bool:
    return all(is_right(config, device, name, debug={"remove_wait": wait}) for config in CONFIGS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.num_layers}-layers")
def test_with_every_wait_in_place_the_checker_reports_nothing(name: str, config: DecoderConfig) -> None:
    assert is_right(config, {"check_hazards": True, "poison": True}, name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.num_layers}-layers")
def test_with_every_wait_in_place_lazy_copies_change_nothing(name: str, config: DecoderConfig) -> None:
    assert is_right(config, {**LAZY, "check_hazards": True}, name)


@pytest.mark.parametrize("name", NAMES)
def test_with_every_wait_in_place_delays_change_nothing(name: str) -> None:
    for seed in JITTER_SEEDS:
        device = {"timing": "jitter", "seed": seed, "jitter_max_s": 3e-4, "poison": True}
        assert is_right(CONFIGS[0], device, name), f"seed {seed}"


@pytest.mark.parametrize(("name", "wait"), [entry for entry in WAITS if entry not in ORDER_ONLY])
def test_a_removed_wait_is_reported_as_a_hazard(name: str, wait: str) -> None:
    with pytest.raises(HazardError, match=r"nothing orders that after"):
        is_right_without(wait, {"check_hazards": True}, name)


@pytest.mark.parametrize(("name", "wait"), [(name, wait) for name, wait in WAITS if wait in SHOWS_UNDER_LAZY[name]])
def test_a_removed_wait_changes_the_result_under_lazy(name: str, wait: str) -> None:
    assert not is_right_without(wait, LAZY, name)


@pytest.mark.parametrize(("name", "wait"), sorted(SHOWS_UNDER_JITTER))
def test_a_removed_wait_changes_the_result_under_jitter(name: str, wait: str) -> None:
    devices = ({"timing": "jitter", "seed": seed, "poison": True} for seed in JITTER_SEEDS)
    assert not all(is_right_without(wait, device, name) for device in devices)


def test_every_wait_is_known_to_show_or_to_be_for_the_checker_alone() -> None:
    shows = {(name, wait) for name, waits in SHOWS_UNDER_LAZY.items() for wait in waits} | SHOWS_UNDER_JITTER
    checker_only = {(name, wait) for name, wait in WAITS if wait in CHECKER_ONLY}
    assert set(WAITS) == shows | checker_only | ORDER_ONLY
    assert not shows & checker_only


@pytest.mark.parametrize(("name", "wait"), sorted(ORDER_ONLY))
def test_the_wait_that_guards_no_data_is_what_keeps_serial_serial(name: str, wait: str) -> None:
    plan = make_schedule(name, SweepShape(2, COUNT, (4, 4)))
    without = replace(
        plan,
        tasks=tuple(
            replace(task, after=tuple(key for key in task.after if wait_name(task.key, key) != wait))
            for task in plan.tasks
        ),
    )
    # Without it, projections and attention of a layer's first micro-batch run while its pages come up.
    assert simulate(without, lambda task: 1.0, 2).duration_s < simulate(plan, lambda task: 1.0, 2).duration_s
    assert is_right_without(wait, LAZY, name)
    assert is_right_without(wait, {"check_hazards": True}, name)
