# SPDX-License-Identifier: Apache-2.0
"""A micro-batch's forward pass pauses and goes on where it was."""

import pytest

from vllm_moe_lightning.pipeline.coroutine import LAYER_ENTRY, MicroBatchCoroutine, yield_to_executor


def test_a_body_hands_out_its_values_in_order_and_then_its_result() -> None:
    def body() -> str:
        yield_to_executor(LAYER_ENTRY)
        yield_to_executor("request")
        return "hidden states"

    coroutine = MicroBatchCoroutine(0, body)
    assert [coroutine.resume(), coroutine.resume()] == [LAYER_ENTRY, "request"]
    assert (coroutine.finished, coroutine.result) == (False, None)
    assert coroutine.resume() is None
    assert (coroutine.finished, coroutine.result) == (True, "hidden states")


def test_bodies_take_turns_from_deep_in_their_calls() -> None:
    log: list[tuple[int, int]] = []

    def layer(index: int, depth: int) -> None:
        if depth:
            layer(index, depth - 1)
        else:
            yield_to_executor(None)

    def body(index: int) -> None:
        for step in range(3):
            layer(index, 5)
            log.append((index, step))

    coroutines = [MicroBatchCoroutine(index, lambda index=index: body(index)) for index in range(2)]
    while not all(c.finished for c in coroutines):
        for coroutine in coroutines:
            coroutine.resume()
    assert log == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


def test_an_exception_in_the_body_comes_out_of_resume() -> None:
    def body() -> None:
        yield_to_executor(None)
        raise ValueError("router")

    coroutine = MicroBatchCoroutine(0, body)
    coroutine.resume()
    with pytest.raises(ValueError, match="router"):
        coroutine.resume()
    assert not coroutine.finished


def test_unwinding_runs_the_body_s_finally_blocks_and_is_quiet() -> None:
    log = []

    def body() -> None:
        try:
            yield_to_executor(None)
        finally:
            log.append("unwound")

    coroutine = MicroBatchCoroutine(0, body)
    coroutine.resume()
    coroutine.unwind()
    coroutine.unwind()
    assert log == ["unwound"]


def test_unwinding_a_body_that_never_ran_or_has_finished_does_nothing() -> None:
    never_run, finished = MicroBatchCoroutine(0, lambda: 1 / 0), MicroBatchCoroutine(1, lambda: 7)
    finished.resume()
    never_run.unwind()
    finished.unwind()
    assert finished.result == 7


def test_a_finished_body_is_not_resumed() -> None:
    coroutine = MicroBatchCoroutine(3, lambda: None)
    coroutine.resume()
    with pytest.raises(AssertionError, match="micro-batch 3 has finished"):
        coroutine.resume()


def test_yielding_outside_of_a_micro_batch_is_refused() -> None:
    with pytest.raises(AssertionError, match="outside of a micro-batch"):
        yield_to_executor(None)
