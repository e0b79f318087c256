# SPDX-License-Identifier: Apache-2.0
"""Rows whose token is thrown away do not draw from their request's generator."""

from types import SimpleNamespace

import pytest

from vllm_moe_lightning.integration.partial_prompts import partial_prompts_draw_nothing


def runner() -> SimpleNamespace:
    return SimpleNamespace(
        discard_request_mask=SimpleNamespace(np=[False, True, True, False]),
        input_batch=SimpleNamespace(generators={0: "a", 1: "b", 3: "d"}),
    )


def test_generators_of_partial_prompts_are_put_aside_and_come_back() -> None:
    v1 = runner()
    with partial_prompts_draw_nothing(v1):
        assert v1.input_batch.generators == {0: "a", 3: "d"}
    assert v1.input_batch.generators == {0: "a", 1: "b", 3: "d"}


def test_they_come_back_after_a_failure_too() -> None:
    v1 = runner()
    with pytest.raises(RuntimeError), partial_prompts_draw_nothing(v1):
        raise RuntimeError
    assert 1 in v1.input_batch.generators


def test_a_runner_without_generators_is_left_alone() -> None:
    with partial_prompts_draw_nothing(SimpleNamespace()):
        pass
