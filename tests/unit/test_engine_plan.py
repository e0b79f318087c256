# SPDX-License-Identifier: Apache-2.0
"""The plan as data: through vLLM's configuration and back, as a table, and beside the weights that were loaded."""

import json
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from vllm_moe_lightning.engine_plan import (
    PLAN_KEY,
    EnginePlan,
    PredictedFigures,
    plan_of,
    store_plan,
    weight_difference,
)
from vllm_moe_lightning.plan_table import plan_table

PLAN = EnginePlan(
    expected_prompt_tokens=77.5,
    expected_generation_tokens=64,
    max_num_seqs=96,
    max_num_batched_tokens=300,
    prefill_tokens_per_sweep=117,
    num_micro_batches=4,
    micro_batch_size=24,
    kv_bytes=3 << 20,
    num_resident_layers=2,
    expert_layer_bytes=1000,
    other_weight_bytes=2000,
    hardware="a box",
    reasons={"max_num_seqs": "given", "num_micro_batches": "planned", "kv_bytes": "planned: 97 blocks"},
    predicted=PredictedFigures(
        generated_tokens_per_s=1234.5,
        total_tokens_per_s=2700.0,
        sweep_s=0.0777,
        bottleneck="h2d",
        busy={"gpu": 0.31, "h2d": 0.99, "disk": 0.0},
    ),
)


def test_a_plan_survives_json() -> None:
    vllm_config = SimpleNamespace(additional_config={"moe_lightning": {}})
    store_plan(vllm_config, PLAN)
    vllm_config.additional_config = json.loads(json.dumps(vllm_config.additional_config))
    assert plan_of(vllm_config) == PLAN


def test_the_user_s_dict_is_left_alone() -> None:
    given: dict[str, object] = {"moe_lightning": {}}
    vllm_config = SimpleNamespace(additional_config=given)
    store_plan(vllm_config, PLAN)
    assert PLAN_KEY not in given


@pytest.mark.parametrize("additional", [{}, object()])
def test_without_a_plan_there_is_none(additional: object) -> None:
    assert plan_of(SimpleNamespace(additional_config=additional)) is None


@pytest.mark.parametrize(("planned", "loaded"), [(1000, 1050), (1000, 950), (1000, 1000), (0, 5)])
def test_weights_about_as_planned_or_not_planned_at_all_are_not_worth_a_word(planned: int, loaded: int) -> None:
    assert weight_difference("experts", planned, loaded) is None


@pytest.mark.parametrize(("loaded", "share"), [(1051, "+5.1%"), (500, "-50.0%")])
def test_weights_that_differ_are_named_with_both_figures(loaded: int, share: str) -> None:
    sentence = weight_difference("experts", 1000, loaded)
    assert sentence is not None
    assert f"experts take {loaded} bytes per rank and were planned with 1000 ({share})" in sentence


def test_the_table_says_what_was_chosen_and_why_and_what_is_expected_of_it() -> None:
    table = plan_table(PLAN, "a model", 2)
    lines = [line.split() for line in table.splitlines()]
    assert table.startswith("plan for a model on a box, each of 2 ranks:")
    assert ["max_num_seqs", "96", "given"] in lines
    assert ["num_micro_batches", "4", "x", "24", "planned"] in lines
    assert ["kv_bytes", "3.0", "MiB", "planned:", "97", "blocks"] in lines
    assert "1234.5 generated tokens/s (2700.0 with prompts), a sweep of 0.0777 s; bottleneck H2D link" in table
    assert "busy: H2D link 99%, device compute 31%" in table
    assert "disk" not in table


def test_the_table_says_what_else_was_taken_into_account() -> None:
    table = plan_table(replace(PLAN, reasons={"in_flight": "at most 20, by --kv-cache-memory-bytes"}), "a model", 1)
    assert ["in_flight", "at", "most", "20,", "by", "--kv-cache-memory-bytes"] in [
        line.split() for line in table.splitlines()
    ]
