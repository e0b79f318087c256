"""Looks at the GPUs without touching them: what nvidia-smi says, what was measured before, and what WSL allows."""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_moe_lightning.doctor.finding import Finding, ok, size_text, warning, will_fail
from vllm_moe_lightning.doctor.memory import Need
from vllm_moe_lightning.hardware import EMULATED_GPU_NAME
from vllm_moe_lightning.host_limits import ROOT, total_memory_bytes
from vllm_moe_lightning.machine_readings import MeasuredMachine

GB = 1e9
FIELDS = (
    "name", "driver_version", "memory.total", "memory.used",
    "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max",
)  # fmt: skip
QUERY = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
QUERY_TIMEOUT_S = 10.0
# Of each lane and direction, by PCIe generation, after its line code.
LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
REACHED_SHARE = 0.6
"""Of the link's rate, by a pinned copy; about 0.8 is usual."""
USED_SHARE = 0.1
WSL_PIN_SHARE = 0.5


@dataclass(frozen=True)
class Gpu:
    """None: the driver does not say."""

    name: str
    driver: str
    memory_mib: int | None
    used_mib: int | None
    generation: int | None
    """Now: a link that has nothing to do steps down."""
    largest_generation: int | None
    width: int | None
    largest_width: int | None

    @property
    def link_bytes_per_s(self) -> float | None:
        lane = LANE_GB_PER_S.get(self.largest_generation or 0)
        return None if lane is None or not self.width else lane * self.width * GB


def ask_driver() -> str | None:
    """What nvidia-smi prints. None: there is no driver. Raises OSError, ValueError where it fails."""
    if shutil.which(QUERY[0]) is None:
        return None
    try:
        answer = subprocess.run(QUERY, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"nvidia-smi does not answer within {QUERY_TIMEOUT_S:.0f} s") from error
    if answer.returncode != 0:
        raise OSError(f"nvidia-smi: {(answer.stdout + answer.stderr).strip()}")
    return answer.stdout


def gpus_of(text: str) -> list[Gpu]:
    """nvidia-smi's lines; fields that do not apply read [N/A]."""

    def count(word: str) -> int | None:
        return int(word) if word.isdigit() else None

    rows = [[word.strip() for word in row] for row in csv.reader(text.splitlines()) if row]
    return [Gpu(row[0], row[1], *map(count, row[2:])) for row in rows if len(row) == len(FIELDS)]


def devices(is_cuda_build: bool | None, ask: Callable[[], str | None] = ask_driver) -> list[Finding]:
    """is_cuda_build: of torch, None if that is not known."""
    text = ask()
    gpus = gpus_of(text) if text is not None else []
    if not gpus:
        if is_cuda_build:
            found = "none seen" if text is not None else "no NVIDIA driver here, and torch is built for CUDA"
            return [will_fail("GPU", found, "install the driver (docker run --gpus all), or vLLM's CPU build")]
        return [ok("GPU", "none: the device is emulated, and computes on the CPU")]
    findings: list[Finding] = []
    for index, gpu in enumerate(gpus):
        name = f"GPU {index}"
        found = f"{gpu.name}, {_gib(gpu.memory_mib)}, driver {gpu.driver}"
        if is_cuda_build is False:
            cure = "for the GPU, install the cuda extra; for the emulated device there is nothing to do"
            findings.append(warning(name, f"{found}; this torch is a CPU build and does not use it", cure))
        elif gpu.memory_mib and gpu.used_mib and gpu.used_mib > USED_SHARE * gpu.memory_mib:
            cure = "end the processes that nvidia-smi lists"
            findings.append(warning(name, f"{found}; {_gib(gpu.used_mib)} are in use by others", cure))
        else:
            findings.append(ok(name, found))
        findings.append(_link(f"GPU {index} link", gpu))
    return findings


def _gib(mib: int | None) -> str:
    return "memory not known" if mib is None else f"{mib / 1024:.1f} GiB"


def _link(name: str, gpu: Gpu) -> Finding:
    if gpu.link_bytes_per_s is None:
        return ok(name, "the driver does not say (not PCIe?)")
    found = f"PCIe {gpu.generation or '?'} x{gpu.width} now"
    limit = f"PCIe {gpu.largest_generation} x{gpu.largest_width} possible"
    if gpu.largest_width and gpu.width and gpu.width < gpu.largest_width:
        cure = "put the card into a slot with all lanes, and look for lanes shared with a disk or another card"
        return warning(name, f"{found}: every page takes {gpu.largest_width // gpu.width} times as long", cure, limit)
    return ok(name, f"{found} (an idle link steps down), at most {gpu.link_bytes_per_s / GB:.3g} GB/s", limit)


def measured_link(measured: MeasuredMachine | None, gpus: list[Gpu]) -> Finding:
    """Host to device, as measured for the planner."""
    name = "host to device"
    if measured is None:
        return ok(name, "not measured yet; the first start does, or `vllm-moe-lightning profile`")
    profile = measured.profile
    found = f"{profile.link.h2d_bytes_per_s / GB:.3g} GB/s measured to {profile.gpu.name}"
    if profile.gpu.name == EMULATED_GPU_NAME:
        return ok(name, f"{found}, by memcpy")
    possible = next((gpu.link_bytes_per_s for gpu in gpus if gpu.link_bytes_per_s), None)
    if possible is None:
        return ok(name, found)
    limit = f"{possible / GB:.3g} GB/s of the link"
    if profile.link.h2d_bytes_per_s < REACHED_SHARE * possible:
        cure = "measure again on an idle machine (profile --refresh); if it stays, look at the slot, and at the node"
        return warning(name, found, cure, limit)
    return ok(name, found, limit)


def wsl(need: Need | None, is_cuda_build: bool | None, root: Path = ROOT) -> Finding:
    """The Windows driver model lets no more than half of the memory be pinned."""
    if "microsoft" not in (root / "proc/version").read_text().lower():
        return ok("WSL", "no")
    most = WSL_PIN_SHARE * total_memory_bytes(root)
    found = f"yes: about {size_text(most)} can be pinned"
    if need is None or need.pinned_bytes <= most:
        return ok("WSL", found)
    limit = f"{size_text(need.pinned_bytes)} to pin"
    cure = "raise memory= in .wslconfig, take a quantised checkpoint, or run on Linux itself"
    if is_cuda_build:
        return will_fail("WSL", found, cure, limit)
    return warning("WSL", f"{found}; the emulated device pins nothing, a GPU will", cure, limit)
