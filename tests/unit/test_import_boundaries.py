"""Which room may import what: the plugin must be cheap to load, and the engine must live without vLLM."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "vllm_moe_lightning"
SOURCES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
COMMANDS = ("app", "check", "doctor", "plan", "profile", "run", "trace")
VLLM_ROOMS = {"integration", "worker.py"}
INTEGRATION = "vllm_moe_lightning.integration"
# Plans are made where no torch is installed, and before a process has decided on its device.
PLANNING_ROOMS = {
    "checkpoint.py",
    "checkpoint_layers.py",
    "checkpoint_view.py",
    "config.py",
    "cost_model.py",
    "doctor",
    "engine_plan.py",
    "engine_planning.py",
    "engine_request.py",
    "errors.py",
    "hardware.py",
    "hardware_presets.py",
    "host_limits.py",
    "kernel_costs.py",
    "kv_cache_type.py",
    "machine_readings.py",
    "memory_model.py",
    "model_config.py",
    "model_spec.py",
    "paper_model.py",
    "parity.py",
    "plan_table.py",
    "planned_sweep.py",
    "policy",
    "profile_cache.py",
    "resources.py",
    "roofline.py",
    "roofline_plot.py",
    "rowwise.py",
    "stock_vllm.py",
    "tensor_parallel.py",
    "weight_quantisation.py",
    "workload.py",
}
PLANNING_FILES = {
    "pipeline/__init__.py",
    "pipeline/bubbles.py",
    "pipeline/gantt.py",
    "pipeline/schedule.py",
    "pipeline/simulator.py",
    "pipeline/tasks.py",
    "pipeline/trace.py",
    "pipeline/trace_summary.py",
    "pipeline/trace_window.py",
}
PLANNING_SOURCES = [path for path in SOURCES if path.parts[0] in PLANNING_ROOMS or path.as_posix() in PLANNING_FILES]


def module_name(source: Path) -> str:
    parts = ("vllm_moe_lightning", *source.with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(tree: ast.AST, source: Path) -> Iterator[str]:
    """Every module named in an import, wherever it stands: lazy imports and type checking included."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                base = list(("vllm_moe_lightning", *source.parts)[: -node.level]) if node.level else []
                base += [node.module] if node.module else []
                yield from (".".join([*base, alias.name]) for alias in node.names)
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


def imports_of(source: Path) -> set[str]:
    return set(imported_modules(ast.parse((PACKAGE / source).read_text()), source))


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def run_python(code: str) -> str:
    """Runs code in a fresh interpreter; its standard output."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def loaded_packages(module: str) -> set[str]:
    """Top-level names in sys.modules that importing the module adds."""
    code = f"import json, sys; before = set(sys.modules); import {module}; "
    code += "print(json.dumps(sorted({n.split('.')[0] for n in set(sys.modules) - before})))"
    return set(json.loads(run_python(code)))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import torch.nn as nn", {"torch.nn"}),
        ("def f():\n    from vllm import LLM", {"vllm.LLM"}),
        ("if TYPE_CHECKING:\n    import vllm.config", {"vllm.config"}),
        ("importlib.import_module('vllm.v1')", {"vllm.v1"}),
        ("from ..integration import register", {"vllm_moe_lightning.integration.register"}),
        ("from .tasks import Task", {"vllm_moe_lightning.pipeline.tasks.Task"}),
    ],
)
def test_the_scan_sees_every_kind_of_import(code: str, expected: set[str]) -> None:
    assert set(imported_modules(ast.parse(code), Path("pipeline/executor.py"))) == expected


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_only_the_integration_room_and_the_worker_import_vllm(source: Path) -> None:
    if source.parts[0] not in VLLM_ROOMS:
        assert not [name for name in imports_of(source) if is_in(name, "vllm")]


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_only_the_entry_points_and_the_worker_import_the_integration_room(source: Path) -> None:
    if source.parts[0] not in {*VLLM_ROOMS, "__init__.py", "cli"}:
        assert not [name for name in imports_of(source) if is_in(name, INTEGRATION)]


@pytest.mark.parametrize("source", ["__init__.py", *(f"cli/{name}.py" for name in COMMANDS)])
def test_the_entry_points_import_the_integration_room_only_when_called(source: str) -> None:
    statements = ast.parse((PACKAGE / source).read_text()).body
    at_import = [node for node in statements if not isinstance(node, ast.FunctionDef)]
    names = imported_modules(ast.Module(at_import, []), Path(source))
    assert not [name for name in names if is_in(name, INTEGRATION)]


def test_the_planning_code_is_where_this_test_looks_for_it() -> None:
    found = {path.as_posix() for path in PLANNING_SOURCES}
    assert found >= PLANNING_FILES | {"config.py", "errors.py"}
    assert any(path.parts[0] == "policy" for path in PLANNING_SOURCES)


@pytest.mark.parametrize("source", PLANNING_SOURCES, ids=str)
def test_planning_code_imports_no_torch(source: Path) -> None:
    assert not [name for name in imports_of(source) if is_in(name, "torch")]


@pytest.mark.parametrize("source", PLANNING_SOURCES, ids=str)
def test_planning_code_loads_neither_torch_nor_vllm_through_others(source: Path) -> None:
    assert not loaded_packages(module_name(source)) & {"torch", "vllm", "transformers"}


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = {"torch", "vllm", "cvxpy", "numpy", "typer", "rich", "greenlet"}
    assert not loaded_packages("vllm_moe_lightning") & heavy


def test_importing_the_package_takes_less_than_300_milliseconds() -> None:
    code = "import time; t = time.perf_counter(); import vllm_moe_lightning; print(time.perf_counter() - t)"
    assert min(float(run_python(code)) for _ in range(3)) < 0.3
