"""benchmarks/cpu_attention.py on batches of a few kilobytes: what it compares, what it refuses, how it adds up."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console

from benchmarks import attention_rounds, cpu_attention
from benchmarks.attention_arms import (
    OURS,
    Arm,
    Batch,
    ContiguousContext,
    QuantisedContext,
    check_agreement,
    our_arms,
)
from benchmarks.attention_plot import plot_rows
from benchmarks.attention_rounds import measure
from benchmarks.attention_rows import others_share_allowed, summarise
from benchmarks.attention_shapes import MIB, Setting, Shape, full_settings, quick_settings
from vllm_moe_lightning.kernels import reference

TINY = Shape(3, 64, 16, num_heads=8, num_kv_heads=2, head_dim=64, working_set_bytes=300_000)
# Every figure is asked for by name elsewhere.
FIGURES = {
    "fraction_of_read_bw_block128",
    "fraction_of_read_bw_block32",
    "fraction_of_read_bw_avx2",
    "vs_vllm_amx_block32",
    "vs_vllm_amx_block128",
    "vs_vllm_best_block32",
    "vs_vllm_best_block128",
    "vs_vllm_vec",
    "vs_sdpa",
    "stolen_core_vs_vllm",
    "cache_warm_vs_vllm_amx",
    "cache_warm_vs_vllm_best",
    "int8_vs_bf16",
    "fp8_vs_bf16",
}


def no_others(batch: Batch, has_quantised: bool) -> Callable[[], dict[str, Arm]]:
    return lambda: {"vllm vec": Arm(None, "not in this test")}


def tiny_rows(group: str, **changed: Any) -> list[dict[str, Any]]:
    setting = Setting(group, TINY, thread_counts=(1, 2), num_passes=2, **changed)
    return cpu_attention.run_setting(setting, 2, no_others)


def fake_row(ours_s: float, others_s: dict[str, float], **changed: Any) -> dict[str, Any]:
    """A row whose rounds all took the same; reading takes a second."""
    arms: dict[str, Any] = {
        name: {
            "fraction_of_read_bw": {"median": 1.0 / seconds},
            "ours_is_faster_by": {"median": seconds / ours_s},
        }
        for name, seconds in {OURS: ours_s, **others_s}.items()
    }
    arms["vllm amx"] = {"null_reason": "no tiles here"}
    return {"group": "memory", "block_size": 32, "is_contended": False, "arms": arms} | changed


def test_each_pass_goes_through_so_many_layers_that_none_stays_in_a_cache() -> None:
    for setting in full_settings():
        if setting.is_warm:
            assert setting.shape.num_layers == 1
            assert setting.shape.pass_bytes * setting.num_passes >= 128 * MIB
        else:
            assert setting.shape.layer_bytes >= 128 * MIB
            assert setting.shape.pass_bytes >= 512 * MIB


def test_passes_over_gigabytes_are_repeated_less_but_five_times_at_least() -> None:
    counts = {setting.num_rounds(7) for setting in full_settings()}
    assert counts == {5, 7}
    assert {setting.num_rounds(2) for setting in full_settings()} == {2}


def test_the_quick_settings_have_all_groups() -> None:
    assert {setting.group for setting in quick_settings()} == {setting.group for setting in full_settings()}
    assert {setting.group for setting in full_settings()} == set(cpu_attention.GROUP_TITLES)


def test_a_context_of_broken_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="100 must be whole blocks of 16"):
        Shape(1, 100, 16)


def test_no_two_layers_or_sequences_share_a_block() -> None:
    batch = Batch(TINY)
    assert batch.shape.num_layers > 2
    assert batch.block_tables.flatten().sort().values.tolist() == list(range(batch.shape.num_blocks))


def test_the_others_are_given_the_context_that_our_kernel_finds_in_its_blocks() -> None:
    batch = Batch(TINY)
    key, value = reference.gather(batch.kv_cache, batch.block_tables[1, 2], 0, TINY.context_len)
    others_key, others_value = batch.context(layer=1, seq=2)
    torch.testing.assert_close(others_key.float(), key.transpose(0, 1))
    torch.testing.assert_close(others_value.float(), value.transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_arms_agree_with_the_reference(dtype: torch.dtype) -> None:
    batch = Batch(Shape(3, 64, 16, dtype, num_heads=8, num_kv_heads=2, head_dim=64, working_set_bytes=300_000))
    arms = our_arms(batch, None) | {"sdpa": ContiguousContext(batch).sdpa_arm()}
    arms |= {kind: QuantisedContext(batch, kind).arm(None) for kind in ("int8", "fp8")}
    errors = check_agreement(batch, arms)
    assert errors.keys() == {name for name, arm in arms.items() if arm.run_layer is not None}
    assert 0 < max(errors[name] for name in (OURS, "sdpa")) < 0.02
    assert 0.02 < errors["fp8"] < 0.35
    assert 0.005 < errors["int8"] < 0.1


@pytest.mark.parametrize("wrong", [0.9, float("nan")])
def test_an_arm_that_computes_something_else_is_refused(wrong: float) -> None:
    batch = Batch(TINY)
    arms = our_arms(batch, None)
    ours = arms[OURS].run_layer
    assert ours is not None

    def run_layer(layer: int) -> torch.Tensor:
        output = ours(layer).clone()
        if layer == TINY.num_layers - 1:
            output[-1, -1] *= wrong
        return output

    with pytest.raises(ValueError, match=r"3 x 64 tokens, blocks of 16, bfloat16: 'sly' is off"):
        check_agreement(batch, arms | {"sly": Arm(run_layer)})


def test_every_pass_runs_once_a_round_and_another_one_is_first() -> None:
    taken: list[str] = []
    passes = {name: lambda name=name: taken.append(name) for name in "abc"}
    rounds = measure(passes, 3)
    assert taken == [*"cab", *"abc", *"bca", *"cab"]  # the first round warms up
    assert all(len(seconds.cpu) == len(seconds.wall) == 3 for seconds in rounds.seconds.values())
    assert len(rounds.others_cpu_share) == 3


def test_a_run_up_comes_right_before_the_pass_that_counts() -> None:
    taken: list[str] = []
    measure({name: lambda name=name: taken.append(name) for name in "ab"}, 1, has_run_up=True)
    assert taken == [*"bbaa", *"aabb"]


def test_a_disturbed_round_is_taken_again_and_the_least_disturbed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.0, 0.5, 0.05, 0.4, 0.2])  # warm-up; a bad one and a good one; two bad ones

    class Clock:
        read = classmethod(lambda cls, cpus: cls())

        def others_share(self, later: object, num_cpus: int) -> float:
            return next(shares)

    monkeypatch.setattr(attention_rounds, "CpuClock", Clock)
    rounds = measure({"a": lambda: None}, 2, most_others_share=0.1)
    assert rounds.others_cpu_share == [0.05, 0.2]
    assert len(rounds.seconds["a"].wall) == 2


def test_others_may_have_the_cpus_that_we_leave_them_and_a_tenth_of_ours() -> None:
    memory, stolen = Setting("memory", TINY, (1, 2)), Setting("stolen core", TINY, (2,))
    assert others_share_allowed(memory, num_threads=1, num_cpus=2) == pytest.approx(0.55)
    assert others_share_allowed(memory, num_threads=2, num_cpus=2) == pytest.approx(0.1)
    assert others_share_allowed(memory, num_threads=1, num_cpus=1) == pytest.approx(0.1)
    assert others_share_allowed(stolen, num_threads=2, num_cpus=2) == pytest.approx(0.6)


@pytest.mark.parametrize("group", ["memory", "cache-warm", "stolen core"])
def test_a_row_has_every_arm_or_the_reason_why_not(group: str) -> None:
    rows = tiny_rows(group, has_quantised=group == "memory")
    assert [row["num_threads"] for row in rows] == [1, 2]
    assert [row["clock"] for row in rows] == (["wall"] * 2 if group == "stolen core" else ["cpu", "wall"])
    for row in rows:
        assert sum(name.startswith("read: ") for name in row["arms"]) == 4
        assert row["arms"]["vllm vec"] == {"null_reason": "not in this test"}
        for name in ("ours int8", "ours fp8"):
            assert (name in row["arms"]) == (group == "memory")
        assert len(row["arms"][OURS]["seconds_rounds"]) == 2
        assert row["arms"][OURS]["ours_is_faster_by"]["median"] == 1.0
        assert row["arms"]["read: " + row["anchor"]]["fraction_of_read_bw"]["median"] == 1.0
        assert ("sdpa" in row["arms"]) == (group != "stolen core")
    assert json.loads(json.dumps(rows)) == rows


def test_the_summary_is_the_median_over_the_rows_that_a_figure_is_about() -> None:
    rows = [
        fake_row(2.0, {"vllm vec": 4.0}),
        fake_row(2.0, {"vllm vec": 6.0}),
        fake_row(4.0, {"vllm vec": 20.0}),
        fake_row(1.25, {"vllm vec": 2.5}, block_size=128),
        fake_row(1.0, {"vllm vec": 9.0}, group="stolen core"),
    ]
    summary = summarise(rows)
    assert summary["fraction_of_read_bw_block32"] == 0.5
    assert summary["fraction_of_read_bw_block128"] == 0.8
    assert summary["vs_vllm_best_block32"] == 3.0
    assert summary["vs_vllm_vec"] == 2.5
    assert summary["stolen_core_vs_vllm"] == 9.0


def test_the_best_of_vllm_is_the_one_that_ours_is_least_ahead_of() -> None:
    row = fake_row(1.0, {"vllm vec": 3.0})
    row["arms"]["vllm amx"] = {"fraction_of_read_bw": {"median": 0.5}, "ours_is_faster_by": {"median": 2.0}}
    summary = summarise([row])
    assert summary["vs_vllm_best_block32"] == summary["vs_vllm_amx_block32"] == 2.0
    assert summary["vs_vllm_vec"] == 3.0


def test_8_bit_caches_are_compared_by_tokens_per_second() -> None:
    row = fake_row(3.0, {"ours int8": 2.0, "vllm fp8": 5.0})
    row["arms"]["ours fp8"] = {"null_reason": "not yet"}
    summary = summarise([row])
    assert summary["int8_vs_bf16"] == pytest.approx(1.5)
    assert summary["int8_vs_vllm_fp8"] == pytest.approx(2.5)
    assert summary["fp8_vs_bf16"] is None
    assert summary["summary_null_reasons"]["fp8_vs_bf16"] == "not yet"


def test_what_this_cpu_lacks_is_null_with_the_reason() -> None:
    summary = summarise([fake_row(1.0, {"vllm vec": 2.0})])
    assert summary.keys() >= FIGURES
    assert summary["vs_vllm_amx_block32"] is None
    assert summary["summary_null_reasons"]["vs_vllm_amx_block32"] == "no tiles here"
    assert summary["summary_null_reasons"]["cache_warm_vs_vllm_best"].startswith("no such row was measured")
    nulls = {name for name in FIGURES if summary[name] is None}
    assert nulls <= summary["summary_null_reasons"].keys()


def test_rows_that_others_disturbed_stay_out_of_the_summary() -> None:
    rows = [fake_row(1.0, {"vllm vec": 2.0}), fake_row(1.0, {"vllm vec": 9.0}, is_contended=True)]
    summary = summarise(rows)
    assert summary["vs_vllm_vec"] == 2.0
    assert (summary["num_rows"], summary["num_rows_contended"]) == (2, 1)


def test_the_command_writes_json_a_table_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    settings = [Setting("memory", TINY, (1,)), Setting("cache-warm", TINY, (1,))]
    monkeypatch.setattr(cpu_attention, "quick_settings", lambda: settings)
    monkeypatch.setattr(cpu_attention, "vllm_arms", no_others)
    cpu_attention.main(tmp_path / "a" / "b.json", plot=tmp_path / "b.png", quick=True, rounds=1, group=None)
    result = json.loads((tmp_path / "a" / "b.json").read_text())
    assert len(result["rows"]) == 2
    assert result["machine"].keys() >= {"cpu", "isa_flags", "num_cpus", "memory_gb", "commit", "command"}
    assert result["summary"]["summary_null_reasons"].keys() >= {"vs_vllm_vec", "int8_vs_bf16", "stolen_core_vs_vllm"}
    assert "3 x 64, 16" in capsys.readouterr().out
    assert (tmp_path / "b.png").stat().st_size > 1000


def test_a_group_that_is_not_there_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match=r"--group is one of .*got 'warm'"):
        cpu_attention.main(tmp_path / "b.json", quick=True, group="warm")
    with pytest.raises(typer.BadParameter, match="--plot draws the group 'memory'"):
        cpu_attention.main(tmp_path / "b.json", plot=tmp_path / "b.png", quick=True, group="cache-warm")


def test_shapes_too_large_for_the_memory_are_skipped_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attention, "total_memory_bytes", lambda: MIB)
    result = cpu_attention.run([Setting("memory", TINY, (1,))], 1, Console(quiet=True))
    assert result["rows"] == []
    assert result["skipped"] == [f"{TINY}: its caches would fill more than half of the memory"]


def test_the_plot_leaves_out_what_was_not_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_rows(tiny_rows("memory"), tmp_path / "rows.svg")
    drawn = (tmp_path / "rows.svg").read_text()
    assert "<!-- ours -->" in drawn
    assert "vllm" not in drawn
