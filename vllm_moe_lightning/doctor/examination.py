"""All checks, in the sections in which they are shown. Each looks by itself: none hides another."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_moe_lightning.doctor import checkpoint_files, cpu, disk, gpu, memory, software
from vllm_moe_lightning.doctor.finding import Check, Finding, State, findings_of, will_fail
from vllm_moe_lightning.doctor.memory import Need, need_of
from vllm_moe_lightning.doctor.question import Question, StartFacts
from vllm_moe_lightning.doctor.rehearsal import Rehearsal
from vllm_moe_lightning.errors import CheckpointError
from vllm_moe_lightning.host_limits import ROOT, usable_cpus
from vllm_moe_lightning.profile_cache import cache_folder, fingerprint, load_cached

GIB = 1 << 30
Sections = Mapping[str, list[Finding]]


def examine(question: Question, root: Path = ROOT) -> Sections:
    """`root` stands before /proc, /sys and /dev, so that tests can bring their own."""
    folder = Path(question.model)
    with Rehearsal(question) as rehearsal:  # works while we look
        config, model = _model(folder)
        software_findings = _all(_software())
        disk_findings = _all(_disk(folder, root))
        cpu_findings = _all(_cpu(question.tensor_parallel_size, root))
        rehearsed, facts = rehearsal.answer()
    need = _need(question, folder, config, facts)
    return {
        "model": model,
        "memory": _all(_memory(question, need, facts, root)),
        "disk": disk_findings,
        "CPU": cpu_findings,
        "GPU": _all(_gpu(need, facts, root)),
        "software": software_findings,
        "start": rehearsed,
    }


def _all(checks: Mapping[str, Check]) -> list[Finding]:
    return [finding for name, check in checks.items() for finding in findings_of(name, check)]


def _model(folder: Path) -> tuple[dict[str, Any] | None, list[Finding]]:
    """config.json as well, which the others need; None if it cannot be read."""
    config: dict[str, Any] | None = None
    checks: dict[str, Check] = {"tokenizer": lambda: checkpoint_files.tokenizer(folder)}
    try:
        config = read = checkpoint_files.read_config(folder)
    except (ValueError, OSError) as error:
        what, _, cure = str(error).rpartition("; ")
        first = [will_fail("config.json", what or str(error), cure)]
    else:
        first = findings_of("architecture", lambda: checkpoint_files.architecture(read, folder.name))
        checks["quantisation"] = lambda: checkpoint_files.quantisation(read)
    if not folder.is_dir():
        return config, first
    shards = findings_of("shards", lambda: checkpoint_files.shards(folder))
    if config is not None and all(finding.state is State.OK for finding in shards):
        checks["tensors"] = lambda: checkpoint_files.tensors(folder, read)
    return config, [*first, *shards, *_all(checks)]


def _software() -> Mapping[str, Check]:
    return {
        "plugin": software.plugin,
        software.PLUGINS_VARIABLE: software.allowed_plugins,
        "requirements": software.requirements,
        "vLLM's distribution": software.distribution,
        "torchvision & co.": software.companions,
        "native library": software.native_library,
        "solver": software.solver,
        "profile cache": software.profile_cache,
        "machine profile": software.machine_profile,
        "metrics folder": software.metrics_folder,
    }


def _disk(folder: Path, root: Path) -> Mapping[str, Check]:
    return {
        "checkpoint's disk": lambda: disk.read_speed(checkpoint_files.shard_files(folder), root),
        "space for caches": lambda: disk.free_space("space for caches", cache_folder()),
        "space for metrics": lambda: disk.free_space("space for metrics", Path(tempfile.gettempdir())),
    }


def _cpu(num_ranks: int, root: Path) -> Mapping[str, Check]:
    return {
        "CPUs": lambda: cpu.threads(root),
        "OpenMP threads": lambda: cpu.openmp(root=root),
        "thread binding": lambda: cpu.binding(num_ranks, root=root),
        "memory nodes": lambda: cpu.memory_nodes(root),
    }


def _need(question: Question, folder: Path, config: Mapping[str, Any] | None, facts: StartFacts) -> Need | None:
    """None: there are neither figures nor files."""
    try:
        sizes = [file.stat().st_size for file in checkpoint_files.shard_files(folder) if file.is_file()]
    except CheckpointError:
        sizes = []
    spec = None if config is None else checkpoint_files.spec_of(config, folder.name, facts.dtype or question.dtype)
    if spec is None and not sizes:
        return None
    given = None if question.kv_cache_gib is None else question.kv_cache_gib * GIB
    kv_bytes_per_rank = facts.kv_bytes_per_rank if facts.kv_bytes_per_rank is not None else given
    return need_of(
        spec,
        sizes,
        kv_bytes=None if kv_bytes_per_rank is None else kv_bytes_per_rank * question.tensor_parallel_size,
        max_model_len=facts.max_model_len or question.max_model_len,
        on_gpu=bool(facts.is_cuda_build),
    )


def _memory(question: Question, need: Need | None, facts: StartFacts, root: Path) -> Mapping[str, Check]:
    num_ranks, on_gpu = question.tensor_parallel_size, bool(facts.is_cuda_build)
    checks: dict[str, Check] = {}
    if need is not None:
        checks["host memory"] = lambda: memory.host_memory(need, num_ranks, root)
        checks["locked memory"] = lambda: memory.locked_memory(need, on_gpu=on_gpu)
        checks["address space"] = lambda: memory.address_space(need)
        checks["overcommit"] = lambda: memory.overcommit(need, root)
    return {
        **checks,
        "swap": lambda: memory.swap(root),
        "shared memory": lambda: memory.shared_memory(num_ranks, usable_cpus(root), root / "dev/shm"),
        "huge pages": lambda: memory.huge_pages(root),
    }


def _gpu(need: Need | None, facts: StartFacts, root: Path) -> Mapping[str, Check]:
    return {
        "GPU": lambda: gpu.devices(facts.is_cuda_build),
        "host to device": _measured_link,
        "WSL": lambda: gpu.wsl(need, facts.is_cuda_build, root),
    }


def _measured_link() -> Finding:
    measured, _ = load_cached(cache_folder(), fingerprint(), quick=True)
    text = gpu.ask_driver()
    return gpu.measured_link(measured, [] if text is None else gpu.gpus_of(text))
