"""benchmarks/cpu_ffn.py on layers of a few kilobytes: what it compares, what it refuses, how it adds up."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console

from benchmarks import cpu_ffn
from benchmarks.ffn_arms import OURS, Arm, Batch, Layer, check_agreement, our_arms
from benchmarks.ffn_rows import summarise
from benchmarks.ffn_shapes import HUGE_PAGES, MEMORY, Setting, Shape, full_settings, quick_settings

TINY = Shape("tiny", num_experts=4, hidden_size=64, intermediate_size=96, top_k=2)
QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ffn, "vllm_weights", lambda layer: {"vllm vec": "not in this test"})


def tiny_rows(group: str = MEMORY) -> list[dict[str, Any]]:
    return cpu_ffn.run_setting(Setting(group, TINY, (2, 40), (1, 2)), 1, QUIET)


def test_every_expert_of_a_batch_gets_as_many_tokens() -> None:
    batch = Batch(Layer(Setting(MEMORY, TINY, (6,), (1,))), 6)
    assert torch.bincount(batch.topk_ids.flatten()).tolist() == [6, 6, 6, 6]
    assert (batch.topk_ids.sort(dim=1).values.diff(dim=1) > 0).all()


def test_a_number_of_tokens_that_cannot_be_dealt_out_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match="no whole number of tokens"):
        Shape("odd", 3, 64, 96, top_k=2).num_tokens(1)


def test_all_settings_can_be_dealt_out_and_are_larger_than_caches() -> None:
    for setting in full_settings() + quick_settings():
        assert all(setting.shape.num_tokens(tokens) for tokens in setting.tokens_per_expert)
        assert setting.shape.weight_bytes >= 512 << 20


def test_rows_compare_ours_with_both_bounds() -> None:
    few_1, many_1, _few_2, many_2 = tiny_rows()
    assert [row["num_threads"] for row in (few_1, many_1, many_2)] == [1, 1, 2]
    assert (few_1["clock"], many_2["clock"]) == ("cpu", "wall")
    for row in (few_1, many_2):
        ours = row["arms"][OURS]
        assert ours["fraction_of_read_bw"]["median"] > 0
        assert ours["fraction_of_torch_mm"]["median"] > 0
        assert ours["token_error"] < 0.01
        assert row["arms"]["vllm vec"] == {"null_reason": "not in this test"}
    assert "ours avx2" in few_1["arms"]
    assert "ours avx2" not in many_1["arms"]


def test_huge_pages_hold_the_same_weights() -> None:
    layers = [Layer(Setting(group, TINY, (2,), (1,))) for group in (MEMORY, HUGE_PAGES)]
    assert torch.equal(layers[0].weights, layers[1].weights)


def test_an_arm_that_computes_something_else_is_refused() -> None:
    batch = Batch(Layer(Setting(MEMORY, TINY, (6,), (1,))), 6)
    arms = our_arms(batch, None, has_other_isas=False)
    arms["vllm vec"] = Arm(lambda: batch.hidden)
    with pytest.raises(ValueError, match="'vllm vec' is off by"):
        check_agreement(batch, arms)


def test_a_summary_leaves_out_contended_rows_and_says_why_a_figure_is_missing() -> None:
    rows = tiny_rows()
    for row in rows:
        row["tokens_per_expert"] = {2: 16, 40: 128}[row["tokens_per_expert"]]
        row["is_contended"] = row["num_threads"] == 2
    summary = summarise(rows)
    expected = rows[0]["arms"][OURS]["fraction_of_read_bw"]["median"]
    assert summary["ffn_fraction_of_read_bw_m16_one_thread"] == expected
    assert summary["ffn_fraction_of_read_bw_m16"] is None
    assert summary["ffn_vs_torch_mm_m128_one_thread"] > 0
    reasons = summary["summary_null_reasons"]
    assert reasons["ffn_fraction_of_read_bw_m16"] == "no such row was measured undisturbed"
    assert reasons["ffn_vs_vllm_vec_m16_one_thread"] == "not in this test"
    assert (summary["num_rows"], summary["num_rows_contended"]) == (4, 2)


def test_a_run_in_parts_adds_up_to_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [Setting(MEMORY, TINY, (2, 40), (1, 2))]
    monkeypatch.setattr(cpu_ffn, "full_settings", lambda: settings)
    file = tmp_path / "ffn.json"
    for threads in (2, 1, 1):
        cpu_ffn.main(file, rounds=1, threads=threads, add=True)
    rows = json.loads(file.read_text())["rows"]
    assert [(row["num_threads"], row["tokens_per_expert"]) for row in rows] == [(1, 2), (1, 40), (2, 2), (2, 40)]
    with pytest.raises(typer.BadParameter, match="leave nothing to measure"):
        cpu_ffn.main(file, shape="mixtral")
