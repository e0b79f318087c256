# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu_check.py in small, on the emulated device: every part of it runs, and finds nothing wrong."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import gpu_check
from benchmarks.gpu_check import DeviceKind, main
from benchmarks.gpu_engine import ARMS, STOCK, GpuEngine
from benchmarks.gpu_report import failures, summarise
from benchmarks.torch_decoder import SparseMlp
from tests.helpers.recording_cuda import RecordingCuda
from vllm_moe_lightning.config import MoeLightningConfig
from vllm_moe_lightning.hardware_presets import preset_profile

Result = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """On matrices this small, its pool spends a hundred times longer in meeting than in working."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.set_grad_enabled(True)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("gpu_check")
    app = typer.Typer()
    app.command()(main)
    outcome = CliRunner().invoke(app, ["--device", "emulated", "--out", str(folder)], catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    assert "emulated: CGOPipe's throughput over" in outcome.output
    return json.loads((folder / "gpu_check.json").read_text())


def test_every_check_is_within_its_tolerance(result: Result) -> None:
    checks = result["checks"]
    assert {row["check"].split()[0] for row in checks["schedules"]} == {"cgopipe", "serial", "s2", "s3", "s4"}
    assert {" ".join(row["check"].split()[:2]) for row in checks["kernels"]} == {"CPU attention", "CPU experts"}
    assert failures(result) == []


def test_all_arms_are_measured_at_one_budget(result: Result) -> None:
    rows = {row["arm"]: row for row in result["arms"]["rows"]}
    assert set(rows) == set(ARMS)
    assert 0 < rows[STOCK]["num_seqs"] < rows["cgopipe"]["num_seqs"]
    for row in rows.values():
        assert row["step_s"]["median"] > 0
        assert row["h2d_bytes_per_s"]["median"] > 0
    streamed = result["arms"]["experts_bytes"]
    assert all(row["h2d_bytes_per_s"]["median"] * row["step_s"]["median"] >= 0.9 * streamed for row in rows.values())


def test_predicted_stands_beside_measured_for_each_resource(result: Result) -> None:
    resources = result["prediction"]["resources"]
    assert set(resources) == {"gpu", "cpu", "h2d", "d2h"}
    assert all(entry["predicted_s"] > 0 and entry["measured_s"] > 0 for entry in resources.values())
    assert result["plan"]["policy"]["num_resident_layers"] == 0
    assert not result["plan"]["policy"]["prompts_on_gpu"]  # nor are they in an engine on the emulated device


def test_an_emulated_run_says_so_and_is_not_judged(result: Result) -> None:
    assert result["summary"]["device"] == "emulated"
    assert result["summary"]["goals_met"] is None
    assert "emulated" in result["machine"]["gpu"]
    assert result["arms"]["sweep_without_host_sync"] is None


def test_a_gpus_figures_are_held_against_the_goals() -> None:
    profile = preset_profile("a10")

    def row(arm: str, num_seqs: float, link_share: float) -> Result:
        h2d = link_share * profile.link.h2d_bytes_per_s
        figures = {"tokens_per_s": num_seqs, "h2d_bytes_per_s": h2d, "step_over_busiest_resource": 1.05}
        return {"arm": arm, **{name: {"median": value} for name, value in figures.items()}}

    arms = {"rows": [row("cgopipe", 400, 0.96), row("serial", 200, 0.5), row(STOCK, 160, 0.99)]}
    summary = summarise("cuda", profile, arms, {"error": -0.2})
    assert summary["throughput_over"] == {"serial": 2.0, STOCK: 2.5}
    assert summary["goals_met"] == {
        "h2d_share_of_peak": True,
        "step_over_busiest_resource": True,
        "throughput_over_stock_like": False,
        "prediction_error": False,
    }
    without_stock = {"rows": arms["rows"][:2]}
    assert summarise("cuda", profile, without_stock, {"error": 0.0})["goals_met"]["throughput_over_stock_like"] is None


def test_a_wrong_result_is_named(result: Result) -> None:
    wrong = json.loads(json.dumps(result))
    wrong["checks"]["schedules"][2] |= {"ok": False}
    wrong["arms"]["difference_from_cgopipe"]["s4"] = 0.3
    assert failures(wrong) == [result["checks"]["schedules"][2]["check"], "s4"]


def test_the_arms_run_on_a_cuda_device_whose_calls_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a GPU's speed: that the arms need nothing that only the emulated device has, and order all they do."""
    cuda = RecordingCuda()
    monkeypatch.setattr(
        gpu_check, "make_device", lambda kind, memory_bytes: cuda.device(memory_budget_bytes=memory_bytes)
    )
    check = gpu_check.check_for(DeviceKind.EMULATED, 0.0)
    planned = gpu_check.plan_for(check, gpu_check.capped(check, preset_profile("a10")))
    arms = gpu_check.measure_arms(check, DeviceKind.EMULATED, planned, Console(quiet=True))
    assert {row["arm"] for row in arms["rows"]} == set(ARMS)
    assert max(arms["difference_from_cgopipe"].values()) == 0.0
    assert any("pinned" in line for line in arms["memory"])
    cuda.log.check()


def test_an_arm_without_room_is_left_out_with_the_reason_and_the_others_go_on() -> None:
    check = gpu_check.check_for(DeviceKind.EMULATED, 0.0)
    device = gpu_check.make_device(DeviceKind.EMULATED, check.device_memory_bytes)
    options = MoeLightningConfig(num_micro_batches=2)
    bench = GpuEngine(check.model, device, options, num_seqs=8, context_len=check.context_len)
    assert device.memory_budget_bytes is not None
    device.reserve(device.memory_budget_bytes - device.memory_used_bytes - 70_000, "somebody else's")
    for name in ("s4", STOCK, "s4", "cgopipe"):
        bench.measure(name, 1)
    assert set(bench.null_reasons) == {"s4"}, "70 kB are a sequence's KV, and less than two frames"
    assert "kv_frame[1]" in bench.null_reasons["s4"]
    assert bench.arms[STOCK].num_seqs == 1
    assert len(bench.arms["cgopipe"].step_s) == 1
    assert "s4" not in bench.differences()
    bench.close()


def test_every_token_through_every_expert_is_what_routing_gives() -> None:
    """What the decoder computes on a GPU, where it must not wait to learn how many tokens an expert has."""
    rng = torch.Generator().manual_seed(0)
    x, w13, w2 = (torch.randn(*shape, generator=rng) for shape in ((7, 16), (4, 24, 16), (4, 16, 12)))
    weights = torch.rand(7, 4, generator=rng) * (torch.rand(7, 4, generator=rng) > 0.5)
    expected = torch.zeros_like(x)
    for expert in range(4):
        expected += SparseMlp._expert(x, w13[expert], w2[expert]) * weights[:, expert, None]
    torch.testing.assert_close(SparseMlp._every_expert(x, w13, w2, weights), expected)
