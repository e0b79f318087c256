# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu_check.py in small, on the emulated device: every part of it runs, and finds nothing wrong."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import (
    gpu_check,
    host_sync,
    paged_moe_checks,
    paged_moe_speed,
    result_checks,
    schedule_arms,
    small_batches,
    staging_speed,
)
from benchmarks.check_run import CheckRun
from benchmarks.gpu_check import main, run_stages
from benchmarks.gpu_device import DeviceKind, make_device
from benchmarks.gpu_engine import ARMS, STOCK, GpuEngine
from benchmarks.gpu_plan import check_for, options_of
from benchmarks.gpu_report import show, summarise
from benchmarks.paged_moe_checks import NUM_TOKENS, SHAPE, cases
from benchmarks.schedule_arms import measure_schedules
from benchmarks.torch_decoder import SparseMlp
from tests.helpers.recording_cuda import RecordingCuda
from vllm_moe_lightning.config import MoeLightningConfig
from vllm_moe_lightning.device import Buffer, CudaDevice, Device
from vllm_moe_lightning.errors import DeviceStalledError, MoeLightningError
from vllm_moe_lightning.hardware_presets import preset_profile
from vllm_moe_lightning.kernels.tile_configs import CONFIGS_16_BIT, CONFIGS_FLOAT8, config_for, configs_of

Result = dict[str, Any]
ROOT = Path(__file__).parents[2]


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


def emulated_run(folder: Path, deadline_s: float = 600.0) -> CheckRun:
    return CheckRun(folder / "gpu_check.json", Console(quiet=True), deadline_s, on_gpu=False)


def stages_of(folder: Path) -> Result:
    """All stages of the emulated check that are not optional. What is in the file then."""
    run = emulated_run(folder, deadline_s=0.0)
    run_stages(check_for(DeviceKind.EMULATED, 0.0), DeviceKind.EMULATED, folder, run)
    show(run.result, Console(quiet=True))
    return json.loads(run.path.read_text())


def test_every_check_is_within_its_tolerance(result: Result) -> None:
    checks = result["checks"]
    assert {name.split()[0].rstrip(",") for name in names_of(checks["results"])} == {*ARMS} - {STOCK}
    assert {name.rpartition(" ")[0] for name in names_of(checks["results"]) if "," in name} == {*result_checks.PLACES}
    assert {" ".join(name.split()[:2]) for name in names_of(checks["cpu_kernels"])} == {"CPU attention", "CPU experts"}
    assert len(checks["page_table_moe"]) == len(list(cases(DeviceKind.EMULATED)))
    assert all(row["ok"] for rows in checks.values() for row in rows)
    assert result["failed"] == []
    assert result["dropped"] == {}
    assert result["status"] == "complete"
    assert {entry["status"] for entry in result["stages"].values()} == {"ok"}


def names_of(rows: list[Result]) -> list[str]:
    return [row["check"] for row in rows]


def test_steps_of_few_tokens_are_measured_in_each_place(result: Result) -> None:
    small = result["small_batches"]
    assert small["expert_slots"] == small["num_experts"] // 2
    rows = {(row["place"], row["num_tokens"]): row for row in small["rows"]}
    assert set(rows) == {(place, count) for place in small_batches.PLACES for count in small_batches.NUM_TOKENS}
    for (place, _), row in rows.items():
        assert row["tokens_per_s"]["median"] > 0
        assert (row["hit_ratio"] is not None) == (place == "fetched")
    assert rows["on the CPU", 1]["h2d_bytes_over_streamed"]["median"] < 0.05
    assert 0 < rows["fetched", 1]["h2d_bytes_over_streamed"]["median"] < 0.5
    assert max(small["difference_from_streamed"].values()) < 1e-4


def test_the_page_table_kernel_s_speed_stands_beside_the_peaks_and_torch_s_mm(result: Result) -> None:
    rows = result["page_table_speed"]
    assert [row["num_tokens"] for row in rows] == [1, 16, 256, 2048]
    assert all(row["over_mm"] > 0 and row["share_of_memory_peak"] > 0 and row["share_of_gemm_peak"] > 0 for row in rows)
    assert {row["kernel"] for row in rows} == {"its reference in plain torch"}, "no figure of the kernel's own"


CHIPS = [(chip, num_bytes) for num_bytes, table in ((2, CONFIGS_16_BIT), (1, CONFIGS_FLOAT8)) for chip in table]


@pytest.mark.parametrize(("capability", "weight_bytes"), CHIPS)
def test_the_page_table_checks_have_a_batch_for_each_size_of_tile(capability: int, weight_bytes: int) -> None:
    sizes = {"top_k": SHAPE.top_k, "num_experts": SHAPE.num_experts}
    taken = [config_for(capability, weight_bytes, num_tokens=count, **sizes) for count in NUM_TOKENS]
    tiles = configs_of(capability, weight_bytes)
    assert {*taken} == {tiles.small, tiles.medium, tiles.large}


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


def test_goals_want_no_more_than_there_is() -> None:
    summary = summarise("cuda", None, {"rows": []}, None)
    assert summary["goals_met"] == dict.fromkeys(summary["goals"])
    assert summary["throughput_over"] == {}


def test_a_stage_that_raises_costs_no_more_than_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu_check, "measure_machine", fail)
    monkeypatch.setattr(gpu_check, "describe_gpu", fail)
    monkeypatch.setattr(gpu_check, "result_checks", lambda kind, run: None)
    result = stages_of(tmp_path)
    assert result["stages"]["profile"]["error"] == ["OutOfMemoryError: CUDA out of memory"]
    assert result["stages"]["plan"]["status"] == "failed"
    assert {row["arm"] for row in result["arms"]["rows"]} == {"cgopipe", STOCK}, "with options that no plan gave"
    assert result["summary"]["prediction_error"] is None
    assert result["summary"]["throughput_over_stock_like"] > 0
    assert [line.partition(":")[0] for line in result["failed"]] == ["GPU", "profile", "plan"]


def test_a_check_that_raises_or_is_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = result_checks.decoder_error

    def error(device: Device, dtype: torch.dtype, options: Result) -> float:
        if options.get("experts") == "cpu":
            raise MoeLightningError("no kernel")
        return 0.3 if options.get("schedule") == "s3" else right(device, dtype, options)

    monkeypatch.setattr(result_checks, "decoder_error", error)
    run = emulated_run(tmp_path)
    result_checks.result_checks(DeviceKind.EMULATED, run)
    assert run.result["failed"] == [
        "s3 torch.float32: 0.3, allowed 0.0001",
        "cgopipe, experts on the CPU torch.float32: MoeLightningError: no kernel",
    ]
    assert len(run.result["checks"]["results"]) == len(ARMS) - 1 + len(result_checks.PLACES)


def test_an_arm_that_raises_sits_out_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = fail_arms(monkeypatch, serial=torch.OutOfMemoryError("CUDA out of memory"))
    arms, run = measured_arms(tmp_path, most_rounds=2)
    assert arms["rounds"] == 2
    assert tried.count("serial") == 1
    assert arms["failures"]["serial"]["error"] == ["OutOfMemoryError: CUDA out of memory"]
    assert {row["arm"] for row in arms["rows"]} == {*ARMS} - {"serial"}
    assert tried.count(STOCK) == 2, "with room for its KV in the second round too"
    assert set(arms["difference_from_cgopipe"]) == {*ARMS} - {"serial", STOCK}
    assert run.result["failed"] == ["arm serial: OutOfMemoryError: CUDA out of memory"]


def test_after_an_arm_that_stalls_the_device_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = fail_arms(monkeypatch, serial=DeviceStalledError("waited 60 s for stream 'h2d'"))
    arms, run = measured_arms(tmp_path, most_rounds=2)
    assert tried == ["cgopipe", STOCK, "serial"]
    assert {row["arm"] for row in arms["rows"]} == {"cgopipe", STOCK}, "what was measured before counts"
    assert arms["failures"]["s4"]["error"] == ["not run: the device has stalled"]
    assert run.stage("later", lambda: 1) is None
    assert run.result["stages"]["later"]["reason"] == "the device has stalled"


def test_without_time_rounds_go_first_and_all_that_is_needed_is_there(tmp_path: Path) -> None:
    arms, run = measured_arms(tmp_path, most_rounds=3, deadline_s=100.0, reserve_s=200.0)
    assert arms["rounds"] == 1
    assert list(run.result["dropped"]) == ["rounds 2 to 3 of all arms"]
    result = stages_of(tmp_path)
    assert [name for name in result["dropped"] if "its reference" not in name] == [
        *("arm serial", "arm s2", "arm s3", "arm s4"),
        *(gpu_check.SMALL_BATCHES, gpu_check.PAGE_TABLE_SPEED, gpu_check.CPU_KERNELS),
    ]
    assert len(result["checks"]["page_table_moe"]) == len(NUM_TOKENS), "16-bit weights are always checked"
    assert {row["arm"] for row in result["arms"]["rows"]} == {"cgopipe", STOCK}
    assert result["failed"] == []


def measured_arms(
    folder: Path, *, most_rounds: int, deadline_s: float = 600.0, reserve_s: float = 0.0
) -> tuple[Result, CheckRun]:
    check = replace(check_for(DeviceKind.EMULATED, 0.0), most_rounds=most_rounds, steps_per_round=1)
    options, num_seqs = options_of(check, None)
    run = emulated_run(folder, deadline_s)
    return measure_schedules(check, DeviceKind.EMULATED, options, num_seqs, run, reserve_s), run


def fail_arms(monkeypatch: pytest.MonkeyPatch, **errors: Exception) -> list[str]:
    """The arms that are tried from now on; those named raise."""
    measure, tried = GpuEngine.measure, list[str]()

    def measure_or_fail(self: GpuEngine, name: str, num_steps: int) -> None:
        tried.append(name)
        if name in errors:
            raise errors[name]
        measure(self, name, num_steps)

    monkeypatch.setattr(GpuEngine, "measure", measure_or_fail)
    return tried


def test_it_runs_without_vllm_and_ends_with_1_if_something_failed_or_hangs(tmp_path: Path) -> None:
    """In a process where nothing can be imported that a bare machine with torch and this package lacks."""
    program = f"""
import sys, time, typer
for name in ("vllm", "transformers", "pytest", "matplotlib"):
    sys.modules[name] = None
from benchmarks import gpu_check
def fail(run):
    raise RuntimeError("no such instruction")
gpu_check.check_cpu_kernels = fail
gpu_check.OPTIONAL_S = dict.fromkeys(gpu_check.OPTIONAL_S, 1.0) | {{gpu_check.SMALL_BATCHES: 1e9}}
sys.argv = ["gpu_check.py", "--device", "emulated", "--out", {str(tmp_path)!r}]
try:
    typer.run(gpu_check.main)
except SystemExit as ended:
    print("ended with", ended.code, flush=True)
gpu_check.end_in_time(0.2, gpu_check.Path({str(tmp_path / "stacks")!r}))
time.sleep(60)  # as a part that hangs
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "ended with 1" in ended.stdout, ended.stderr
    assert ended.returncode == 1
    assert 'File "<string>", line' in (tmp_path / "stacks").read_text()
    result = json.loads((tmp_path / "gpu_check.json").read_text())
    assert result["failed"] == ["CPU kernels against float64: RuntimeError: no such instruction"]
    assert list(result["dropped"])[-1] == gpu_check.SMALL_BATCHES
    assert "FAILED CPU kernels against float64: RuntimeError: no such instruction" in ended.stdout


def test_all_of_a_gpu_s_parts_run_on_a_device_whose_calls_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a GPU's speed: that nothing needs what only the emulated device has, and that all is ordered."""
    doubles, modes = list[RecordingCuda](), list[str]()

    def double(kind: DeviceKind, memory_bytes: int | None, **options: Any) -> CudaDevice:
        assert kind is DeviceKind.CUDA
        doubles.append(RecordingCuda())
        device = doubles[-1].device(memory_budget_bytes=memory_bytes, **options)
        allocate_host = device.allocate_host

        def allocate_and_tell(num_bytes: int, name: str) -> Buffer:
            buffer = allocate_host(num_bytes, name)
            doubles[-1].treat_as_host(buffer.tensor)  # also where it is not pinned
            return buffer

        monkeypatch.setattr(device, "allocate_host", allocate_and_tell)
        return device

    for module in (result_checks, schedule_arms, small_batches, host_sync, staging_speed):
        monkeypatch.setattr(module, "make_device", double)
    for module in (result_checks, paged_moe_checks, paged_moe_speed, host_sync):
        monkeypatch.setattr(module, "half_types", lambda kind: [torch.bfloat16])
    for module in (paged_moe_checks, paged_moe_speed):
        monkeypatch.setattr(module, "torch_device", lambda kind: torch.device("cpu"))
    monkeypatch.setitem(paged_moe_speed.SHAPES, DeviceKind.CUDA, paged_moe_speed.SHAPES[DeviceKind.EMULATED])
    monkeypatch.setattr(staging_speed, "NUM_BYTES", 1 << 16)
    monkeypatch.setattr(small_batches, "ACTIVATIONS_BYTES", 0)
    monkeypatch.setattr(gpu_check, "describe_gpu", lambda kind: {"gpu": "a double"})
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    run = emulated_run(tmp_path)
    run_stages(check_for(DeviceKind.EMULATED, 0.0), DeviceKind.CUDA, tmp_path, run)
    show(run.result, Console(quiet=True))
    result = json.loads(run.path.read_text())
    assert result["failed"] == []
    assert {entry["status"] for entry in result["stages"].values()} == {"ok"}
    names = names_of(result["checks"]["results"])
    assert f"{result_checks.PAGEABLE} torch.bfloat16" in names
    assert "cgopipe, experts fetched torch.float32" not in names, "of which the Triton kernel has none"
    assert {row["arm"] for row in result["arms"]["rows"]} == {*ARMS}
    assert max(result["arms"]["difference_from_cgopipe"].values()) == 0.0
    assert any("pinned" in line for line in result["arms"]["memory"])
    assert result["arms"]["sweep_without_host_sync"] == "ok"
    assert len(result["small_batches"]["rows"]) == 9
    assert [row["found"] for row in result["host_sync"]] == ["ok"] * 3
    assert modes == ["error", "default"] * 4
    assert set(result["staging"]["pageable_over_pinned"]) == {"h2d_bytes_per_s", "d2h_bytes_per_s"}
    assert set(result["summary"]["goals_met"]) == set(result["summary"]["goals"])
    for cuda in doubles:
        cuda.log.check()


def test_a_wait_that_torch_sees_is_a_finding_and_other_errors_stay_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)

    def fail(text: str) -> None:
        raise RuntimeError(text)

    wait = "called a synchronizing CUDA operation"
    assert host_sync.launches_without_host_sync(lambda: fail(f"{wait}\nmore")) == wait
    with pytest.raises(RuntimeError, match="another"):
        host_sync.launches_without_host_sync(lambda: fail("another"))


def test_an_arm_without_room_is_left_out_with_the_reason_and_the_others_go_on() -> None:
    check = check_for(DeviceKind.EMULATED, 0.0)
    device = make_device(DeviceKind.EMULATED, check.device_memory_bytes)
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
