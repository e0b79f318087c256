"""`profile` on the command line, with the measurement itself replaced by figures."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer
from msgspec.structs import replace
from typer.testing import CliRunner

from vllm_moe_lightning import profile_cache, profiling
from vllm_moe_lightning.cli import profile as profile_cli
from vllm_moe_lightning.hardware import read_profile
from vllm_moe_lightning.hardware_presets import preset_profile
from vllm_moe_lightning.machine_readings import BYTES_PER_S, READINGS_VERSION, MeasuredMachine, Reading

APP = typer.Typer()
APP.command()(profile_cli.profile)


def machine(*, quick: bool = False, age: timedelta = timedelta()) -> MeasuredMachine:
    taken_at = (datetime.now(UTC) - age).isoformat(timespec="seconds")
    return MeasuredMachine(
        fingerprint=profile_cache.fingerprint(),
        quick=quick,
        load_average=0.1,
        duration_s=12.0,
        readings=(
            Reading(name="host_read.2", unit=BYTES_PER_S, best=40e9, median=39e9, note="two streams"),
            Reading(name="cuda_h2d", unit=BYTES_PER_S, best=None, note="not run: no GPU"),
        ),
        profile=replace(preset_profile("t4"), measured_at=taken_at),
        warnings=("disk_read not run: /x is read-only",),
        version=READINGS_VERSION,
    )


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each measurement that was asked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    calls: list[dict[str, Any]] = []

    def measure(fingerprint: str, **arguments: Any) -> MeasuredMachine:
        arguments.pop("progress")("memcpy", 1, 2)
        calls.append(arguments)
        return machine(quick=arguments["quick"])

    monkeypatch.setattr(profiling, "measure_machine", measure)
    return calls


def run(*arguments: str) -> Any:
    return CliRunner().invoke(APP, arguments)


def test_the_table_shows_readings_limits_age_and_what_was_not_run(measured: list[dict[str, Any]]) -> None:
    result = run()
    assert result.exit_code == 0, result.output
    for words in ("host_read.2", "40 GB/s", "not run: no GPU", "locked memory", " s ago", "/x is read-only"):
        assert words in result.stdout


def test_json_is_all_that_goes_to_stdout(measured: list[dict[str, Any]]) -> None:
    result = run("--json", "--quick")
    shown = json.loads(result.stdout)
    assert shown["profile"]["gpu"]["name"] == "NVIDIA T4"
    assert shown["readings"][0]["best"] == 40e9
    assert shown["readings"][1]["best"] is None
    assert shown["quick"] is True
    assert shown["age_s"] >= 0
    assert shown["warnings"] == ["disk_read not run: /x is read-only"]


def test_a_second_run_reads_the_cache_and_refresh_measures_again(measured: list[dict[str, Any]]) -> None:
    run()
    run()
    assert len(measured) == 1
    run("--refresh")
    assert len(measured) == 2


def test_the_written_profile_opens_as_hardware(measured: list[dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    assert run("--output", str(file)).exit_code == 0
    assert read_profile(file).gpu.name == "NVIDIA T4"
    refused = run("--output", str(tmp_path / "no/such/folder.json"))
    assert refused.exit_code == 2
    assert "no/such" in refused.output


def test_an_old_measurement_says_so(measured: list[dict[str, Any]]) -> None:
    profile_cache.store_cached(profile_cache.cache_folder(), machine(age=timedelta(days=45)))
    assert "45 days ago; machines change" in run().stdout
    assert not measured


def test_a_refused_measurement_is_a_sentence_and_status_1(
    measured: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absurd(fingerprint: str, **_: Any) -> MeasuredMachine:
        return replace(machine(), readings=(Reading(name="memcpy.1", unit=BYTES_PER_S, best=0.0),))

    monkeypatch.setattr(profiling, "measure_machine", absurd)
    result = run()
    assert result.exit_code == 1
    assert "memcpy.1 = 0.0" in result.stderr
    assert "Traceback" not in result.output


def test_without_torch_it_says_what_to_install(measured: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_moe_lightning.profiling", None)
    result = run()
    assert result.exit_code == 1
    assert "torch" in result.stderr


def test_a_cached_profile_opens_without_torch(measured: list[dict[str, Any]]) -> None:
    profile_cache.store_cached(profile_cache.cache_folder(), machine())
    code = (
        "import sys; from vllm_moe_lightning.cli.profile import profile; "
        "profile(as_json=True); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
