# SPDX-License-Identifier: Apache-2.0
"""The engine gives the plain forward's hidden states, bit by bit, whatever the schedule; and it survives failures."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.decoder_engine import DecoderEngine
from benchmarks.torch_decoder import DecoderConfig
from tests.helpers.decoder import (
    NUM_SEQS,
    STEPS,
    all_equal,
    make_engine,
    plain_dummy,
    plain_run,
    run,
    run_dummy,
    steps_of,
)
from vllm_moe_lightning.errors import DeviceStalledError, DeviceTaskError, MoeLightningError
from vllm_moe_lightning.kernels import native
from vllm_moe_lightning.kv_cache_type import ElementKind
from vllm_moe_lightning.pipeline.executor import MicroBatch

NAMES = ("cgopipe", "serial", "s2", "s3", "s4")
COUNTS = (1, 2, 3, 7)
CHECKED = {"check_hazards": True, "poison": True}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", NAMES)
def test_the_result_is_that_of_the_plain_forward(name: str, count: int) -> None:
    with make_engine(device=CHECKED, schedule=name, num_micro_batches=count) as engine:
        assert all_equal(run(engine), plain_run(num_micro_batches=count))


@pytest.mark.parametrize("count", COUNTS)
def test_the_plain_forward_is_that_of_plain_torch(count: int) -> None:
    """The other tests' yardstick, checked against float32 attention without our kernel and without micro-batches."""
    for got, expected in zip(plain_run(num_micro_batches=count), plain_run(reference=True), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact(dtype: torch.dtype, count: int) -> None:
    config = DecoderConfig(dtype=dtype)
    with make_engine(config, device=CHECKED, num_micro_batches=count) as engine:
        assert all_equal(run(engine), plain_run(config, count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["cgopipe", "s4"])
def test_quantised_caches_are_as_exact_wherever_attention_runs(
    name: str, kind: ElementKind, dtype: torch.dtype
) -> None:
    config = DecoderConfig(dtype=dtype)
    expected = plain_run(config, 3, kind=kind)
    with make_engine(config, device=CHECKED, kind=kind, schedule=name, num_micro_batches=3) as engine:
        assert all_equal(run(engine), expected)
    assert not all_equal(expected, plain_run(config, 3)), "nothing was quantised"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (DecoderConfig(num_layers=1), {}),
        (DecoderConfig(num_layers=3), {}),
        (DecoderConfig(num_layers=5, dense_layers=(0,)), {}),
        (DecoderConfig(num_layers=4, dense_layers=(1, 2)), {}),
        (DecoderConfig(num_layers=4, dense_layers=(0, 1, 3)), {}),
        (DecoderConfig(num_layers=2, dense_layers=(1,)), {}),
        (DecoderConfig(num_layers=5), {"num_resident_layers": 2}),
        (DecoderConfig(num_layers=3), {"num_resident_layers": 2}),
        (DecoderConfig(num_layers=3), {"num_resident_layers": 3}),
        (DecoderConfig(num_layers=3), {"page_mib": 100}),
        (DecoderConfig(num_layers=3), {"lookahead": 1}),
        (DecoderConfig(num_layers=3), {"lookahead": 5}),
        (DecoderConfig(num_heads=6, num_kv_heads=2, head_dim=8), {"attention_threads": 2}),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else None,
)
def test_layers_may_be_odd_in_number_dense_single_or_resident(
    name: str, config: DecoderConfig, options: dict[str, Any]
) -> None:
    with make_engine(config, device=CHECKED, schedule=name, num_micro_batches=3, **options) as engine:
        assert all_equal(run(engine), plain_run(config, 3))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(NAMES),
    num_layers=st.integers(1, 5),
    count=st.integers(1, 8),
    lookahead=st.integers(1, 4),
    pages=st.sampled_from([0.004, 0.012, 1.0]),
    data=st.data(),
)
def test_any_shape_gives_the_plain_result_without_a_hazard(
    name: str, num_layers: int, count: int, lookahead: int, pages: float, data: st.DataObject
) -> None:
    dense = tuple(sorted(data.draw(st.sets(st.integers(0, num_layers - 1), max_size=num_layers - 1))))
    resident = data.draw(st.integers(0, num_layers - len(dense)))
    lens = tuple(tuple(data.draw(st.lists(st.integers(1, 9), min_size=NUM_SEQS, max_size=NUM_SEQS))) for _ in range(2))
    config = DecoderConfig(num_layers=num_layers, dense_layers=dense)
    options = {"num_micro_batches": count, "lookahead": lookahead, "page_mib": pages, "num_resident_layers": resident}
    with make_engine(config, device=CHECKED, schedule=name, **options) as engine:
        run_dummy(engine)
        assert all_equal(run(engine, lens), plain_run(config, count, lens))


def test_a_step_with_fewer_rows_than_micro_batches_has_as_many_as_rows() -> None:
    lens = ((5, 3), (1, 1), (1, 1))
    with make_engine(num_micro_batches=7) as engine:
        assert all_equal(run(engine, lens), plain_run(num_micro_batches=2, lens=lens))


@pytest.mark.parametrize("name", NAMES)
def test_a_dummy_sweep_pages_the_weights_and_disturbs_nothing(name: str) -> None:
    with make_engine(device=CHECKED, schedule=name, num_micro_batches=2) as engine:
        got = []
        for step in steps_of():
            assert torch.equal(run_dummy(engine), plain_dummy())
            got.append(engine.step(step))
        assert all_equal(got, plain_run(num_micro_batches=2))
        assert (engine.executor.counters.dummy_sweeps, engine.executor.counters.sweeps) == (4, 4)


@pytest.mark.parametrize("timing", ["eager", "lazy"])
@pytest.mark.parametrize(("first", "second"), list(permutations(NAMES, 2)))
def test_the_schedule_may_change_between_sweeps(first: str, second: str, timing: str) -> None:
    with make_engine(device={**CHECKED, "timing": timing}, num_micro_batches=3) as engine:
        got = []
        for index, step in enumerate(steps_of()):
            engine.executor.policy = replace(engine.executor.policy, schedule=(first, second)[index % 2])
            got.append(engine.step(step))
        assert all_equal(got, plain_run(num_micro_batches=3))


def test_the_number_of_micro_batches_may_change_between_sweeps() -> None:
    counts = (4, 1, 7, 2)
    for name in NAMES:
        with make_engine(device={**CHECKED, "timing": "lazy"}, schedule=name) as engine:
            for index, step in enumerate(steps_of()):
                engine.executor.policy = replace(engine.executor.policy, num_micro_batches=counts[index])
                torch.testing.assert_close(engine.step(step), plain_run()[index], rtol=1e-4, atol=1e-4)


# Counters


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", COUNTS)
def test_pages_moved_are_layers_times_sweeps(name: str, count: int) -> None:
    with make_engine(DecoderConfig(num_layers=3), schedule=name, num_micro_batches=count) as engine:
        run(engine)
        engine.device.synchronize()
        executor, store = engine.executor, engine.store
        per_sweep, first = sum(map(store.num_pages, range(3))), store.num_pages(0)
        extra = first if name != "serial" else 0  # the first layer, brought up once before the first sweep
        assert executor.pages_of_first_layer() == first
        assert executor.ring.pages_moved == per_sweep * len(STEPS) + extra
        extra_bytes = store.layers[0].layout.num_bytes if extra else 0
        assert executor.ring.bytes_paged == store.sweep_bytes() * len(STEPS) + extra_bytes
        assert executor.counters.refills == (name != "serial")
        assert (executor.counters.sweeps, executor.counters.aborted_sweeps) == (len(STEPS), 0)
        assert engine.device.totals()["cpu"].num_operations == 3 * count * len(STEPS)


def test_waits_of_the_compute_stream_are_counted_by_kind() -> None:
    with make_engine(device={"h2d_bytes_per_s": 20e6}) as engine:
        run(engine)
        waits = engine.executor.counters.wait_s
        assert set(waits) <= set(engine.executor.schedule_for(4).wait_names())
        assert waits["post_attention<-hidden_load"] > 0
        assert engine.executor.counters.total_wait_s <= engine.executor.counters.sweep_s


# Failures


def fail_native_call(engine: DecoderEngine, number: int) -> None:
    """The number-th call of the cpu stream returns an error code, on its thread."""
    call, calls = engine.device.cpu.call, 0

    @native.CallFunction
    def failing(argument: int) -> int:
        return native.ERROR_INJECTED

    def count_and_call(function: object, argument: ctypes.Structure, label: str, **options: Any) -> None:
        nonlocal calls
        calls += 1
        call(failing if calls == number else function, argument, label, **options)

    engine.device.cpu.call = count_and_call  # type: ignore[method-assign]


def take_all_steps(engine: DecoderEngine, expected_error: type[Exception], match: str) -> list[torch.Tensor]:
    """Every step, once more after it failed."""
    got, failures = [], 0
    for step in steps_of(config=engine.model.config):
        try:
            got.append(engine.step(step))
        except expected_error as error:
            assert match in str(error)  # noqa: PT017
            failures += 1
            got.append(engine.step(step))
    assert failures == 1
    assert engine.executor.counters.aborted_sweeps == 1
    assert not engine.executor.in_sweep
    return got


# A task of the first, a middle and the last layer of one of four sweeps with 4 x 3 attention tasks each.
@pytest.mark.parametrize("number", [1, 18, 36, 48])
@pytest.mark.parametrize("timing", ["eager", "lazy"])
@pytest.mark.parametrize("name", ["cgopipe", "serial", "s2", "s3"])
def test_after_a_failed_attention_task_the_step_can_be_taken_again(name: str, timing: str, number: int) -> None:
    device = {**CHECKED, "timing": timing}
    with make_engine(device=device, schedule=name, num_micro_batches=3) as engine:
        fail_native_call(engine, number)
        got = take_all_steps(engine, DeviceTaskError, "error injected by a test")
        assert all_equal(got, plain_run(num_micro_batches=3))


def test_in_s4_a_failed_append_is_reported_by_the_time_its_result_would_be_read() -> None:
    with make_engine(schedule="s4", num_micro_batches=3) as engine:
        fail_native_call(engine, 6)
        with pytest.raises(DeviceTaskError, match="error injected"):
            run(engine)
        assert all_equal(run(engine), plain_run(num_micro_batches=3))


@pytest.mark.parametrize("name", NAMES)
def test_an_attention_task_can_be_made_to_fail_by_option(name: str) -> None:
    debug = {"fail_attention_at": 20}
    with make_engine(device=CHECKED, schedule=name, num_micro_batches=3, debug=debug) as engine:
        got = take_all_steps(engine, DeviceTaskError, "debug.fail_attention_at")
        assert all_equal(got, plain_run(num_micro_batches=3))


@pytest.mark.parametrize("name", NAMES)
def test_a_task_that_fails_on_the_attention_thread_fails_the_step_and_no_other(name: str) -> None:
    debug = {"fail_attention_at": 8, "attention_fault": "error"}
    with make_engine(device=CHECKED, schedule=name, num_micro_batches=3, debug=debug) as engine:
        if name == "s4":  # reported by the time its result would be read, which may be in the next step
            with pytest.raises(DeviceTaskError, match="error injected"):
                run(engine)
            return
        assert all_equal(take_all_steps(engine, DeviceTaskError, "error injected"), plain_run(num_micro_batches=3))


@pytest.mark.parametrize(
    ("fault", "state"),
    [("hang", r"cpu \(\d+ of \d+ done\) runs attention\(2,0\), begun"), ("end_thread", r"ended in attention\(2,0\)")],
)
def test_a_task_that_never_returns_ends_the_step_with_a_name_and_the_engine_with_it(fault: str, state: str) -> None:
    debug = {"fail_attention_at": 7, "attention_fault": fault}
    with make_engine(device={"stall_timeout_s": 0.5}, num_micro_batches=3, debug=debug) as engine:
        with pytest.raises(DeviceStalledError, match=state):
            run(engine)
        with pytest.raises(DeviceStalledError, match="has stalled before"):
            run(engine)
        assert engine.device.stalled


class Interruption(Exception):
    """Raised inside the model."""


def fail_in_layer(engine: DecoderEngine, layer: int, number: int) -> None:
    """The number-th time that the layer's MLP is run, it raises."""
    mlp, calls = engine.model.layers[layer].mlp, 0

    def count_and_run(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == number:
            raise Interruption("router")
        return mlp(*arguments)

    engine.model.layers[layer].mlp = count_and_run  # type: ignore[assignment]


@pytest.mark.parametrize(("layer", "number"), [(0, 1), (1, 5), (3, 6), (3, 12)])
@pytest.mark.parametrize("name", NAMES)
def test_after_the_model_raised_the_step_can_be_taken_again(name: str, layer: int, number: int) -> None:
    with make_engine(device={**CHECKED, "timing": "lazy"}, schedule=name, num_micro_batches=3) as engine:
        fail_in_layer(engine, layer, number)
        got = take_all_steps(engine, Interruption, "router")
        assert all_equal(got, plain_run(num_micro_batches=3))


def test_a_failure_unwinds_the_other_micro_batches() -> None:
    unwound = []

    def body(index: int, engine: DecoderEngine) -> Callable[[], None]:
        def forward() -> None:
            try:
                engine.executor.layer_entry()
                if index == 1:
                    raise Interruption
                engine.executor.layer_entry()
            finally:
                unwound.append(index)

        return forward

    with make_engine(DecoderConfig(num_layers=2), num_micro_batches=3) as engine:
        micro_batches = [MicroBatch(body(index, engine), None) for index in range(3)]
        with pytest.raises(Interruption):
            engine.executor.run_sweep(micro_batches, is_dummy=True)
    assert unwound == [1, 0]  # micro-batch 2 had not begun


def test_a_model_that_ends_too_early_is_refused() -> None:
    with make_engine(DecoderConfig(num_layers=2)) as engine:
        with pytest.raises(MoeLightningError, match="yielded NoneType where LayerEntry was due"):
            engine.executor.run_sweep([MicroBatch(lambda: None, None)], is_dummy=True)
        assert all_equal(run(engine), plain_run(DecoderConfig(num_layers=2), 4))


def test_a_model_with_more_layers_than_the_schedule_is_refused() -> None:
    with make_engine(DecoderConfig(num_layers=2)) as engine:

        def body() -> None:
            for _ in range(3):
                engine.executor.layer_entry()

        with pytest.raises(MoeLightningError, match="yielded LayerEntry where NoneType was due"):
            engine.executor.run_sweep([MicroBatch(body, None)], is_dummy=True)


def test_a_step_larger_than_the_staging_buffers_is_refused_and_the_next_one_runs() -> None:
    with make_engine() as engine:
        with pytest.raises(ValueError, match="a step of 160 tokens, but staging was sized for 128"):
            run(engine, [(20,) * 8])
        assert all_equal(run(engine), plain_run(num_micro_batches=4))


def test_the_model_is_not_run_outside_of_a_sweep() -> None:
    with make_engine() as engine, pytest.raises(MoeLightningError, match="outside of a sweep"):
        engine.executor.layer_entry()


def test_each_micro_batch_s_context_is_entered_before_it_runs() -> None:
    current: list[int] = []
    seen: list[Sequence[int]] = []

    with make_engine(DecoderConfig(num_layers=3), num_micro_batches=2) as engine:

        def body(index: int) -> Callable[[], None]:
            def forward() -> None:
                for _ in range(3):
                    engine.executor.layer_entry()
                    seen.append((index, current[-1]))

            return forward

        engine.executor.run_sweep(
            [MicroBatch(body(i), None, enter=lambda i=i: current.append(i)) for i in range(2)], is_dummy=True
        )
    assert len(seen) == 6
    assert all(index == entered for index, entered in seen)
