# SPDX-License-Identifier: Apache-2.0
"""Functions for `run_engine(preload=[...])`: what happens, is hidden or is measured in the engine's process.

`probe("shorten_files_after_start")` gives the preload name; `findings(result.log, "MEMORY")` what a probe printed.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

MODULE_NEEDED_BY_US_ONLY = "vllm.model_executor.models.dbrx"
MEMORY_LOCK_LIMIT_BYTES = 65536


def probe(function: str) -> str:
    return f"{__name__}:{function}"


def findings(log: str, topic: str) -> list[Any]:
    """The JSON values printed under `topic`, in order."""
    lines = [line for line in log.splitlines() if line.startswith(f"PROBE {topic} ")]
    return [json.loads(line.removeprefix(f"PROBE {topic} ")) for line in lines]


def _report(topic: str, value: Any) -> None:
    print(f"PROBE {topic} {json.dumps(value)}", flush=True)


def _memory() -> dict[str, int]:
    """Bytes resident now, and at most."""
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return {key: int(fields[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM")}


def measure_memory_of_two_engines() -> None:
    """Reports memory before, with a first engine, and with a second one after the first was deleted."""
    from vllm import LLM, SamplingParams

    construct = LLM.__init__

    def construct_and_run(engine: Any, *args: Any, **options: Any) -> None:
        construct(engine, *args, **options)
        engine.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=2), use_tqdm=False)
        _report("MEMORY", _memory())

    def construct_twice(self: Any, *args: Any, **options: Any) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        _report("MEMORY", _memory())
        first = LLM.__new__(LLM)
        construct_and_run(first, *args, **options)
        del first
        gc.collect()
        construct_and_run(self, *args, **options)

    LLM.__init__ = construct_twice


def limit_locked_memory() -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (MEMORY_LOCK_LIMIT_BYTES, MEMORY_LOCK_LIMIT_BYTES))


def report_host_allocations() -> None:
    import mmap

    from vllm_moe_lightning.device.emulated import EmulatedDevice

    original, original_mmap = EmulatedDevice.allocate_host, mmap.mmap

    def allocate_host(self: Any, num_bytes: int, name: str) -> Any:
        _report("ALLOCATION", {"name": name, "num_bytes": num_bytes})
        return original(self, num_bytes, name)

    class Mapping(original_mmap):
        def __new__(cls, fileno: int, length: int, *args: Any, **options: Any) -> Any:
            if fileno == -1:  # memory; the metrics map files
                _report("MAPPING", length)
            return original_mmap.__new__(cls, fileno, length, *args, **options)

    EmulatedDevice.allocate_host = allocate_host
    mmap.mmap = Mapping


def shorten_files_after_start() -> None:
    from vllm import LLM

    construct = LLM.__init__

    def construct_and_shorten(self: Any, *args: Any, **options: Any) -> None:
        construct(self, *args, **options)
        folder = Path(self.llm_engine.vllm_config.model_config.model)
        for file in folder.glob("*.safetensors"):
            os.truncate(file, 100)
            _report("SHORTENED", file.name)

    LLM.__init__ = construct_and_shorten


def leave_runner_unset() -> None:
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)


def ask_for_the_older_ray_executor() -> None:
    os.environ["VLLM_USE_RAY_V2_EXECUTOR_BACKEND"] = "0"


def leave_out_plugins() -> None:
    os.environ["VLLM_PLUGINS"] = ""


def load_installed_plugins() -> None:
    """As with `plugin=True`, but the engine's arguments do not ask for us. Reports what of ours was imported."""
    os.environ.pop("VLLM_PLUGINS", None)
    _after_each_answer(lambda: _report("MODULES", sorted(m for m in sys.modules if m.split(".")[0] == OURS)))


OURS = "vllm_moe_lightning"


def _after_each_answer(action: Any) -> None:
    from vllm import LLM

    generate = LLM.generate

    def generate_and_act(self: Any, *args: Any, **options: Any) -> Any:
        outputs = generate(self, *args, **options)
        action()
        return outputs

    LLM.generate = generate_and_act


def register_three_times() -> None:
    """Reports the depth of wrapping after each call."""
    from vllm.platforms import current_platform

    import vllm_moe_lightning

    for _ in range(3):
        vllm_moe_lightning.register()
        function, depth = current_platform.apply_config_platform_defaults, 0
        while hasattr(function, "__wrapped__"):
            function, depth = function.__wrapped__, depth + 1
        _report("DEPTH", depth)


def pretend_vllm_is_older() -> None:
    _pretend_version("0.31.2")


def pretend_vllm_is_newer() -> None:
    _pretend_version("0.34.0")


def _pretend_version(version: str) -> None:
    import vllm

    vllm.__version__ = version


def hide_a_module() -> None:
    sys.modules[MODULE_NEEDED_BY_US_ONLY] = None  # type: ignore[assignment]  # importing it raises ImportError


def report_ledger() -> None:
    from vllm_moe_lightning.integration.compat import LEDGER, missing_names

    _report("LEDGER", {"entries": [entry.symbol for entry in LEDGER], "missing": missing_names()})


def report_limits() -> None:
    """The limits in the front end, in the engine core and in the worker: all in this process."""
    from vllm import LLM

    construct = LLM.__init__

    def construct_and_report(self: Any, *args: Any, **options: Any) -> None:
        construct(self, *args, **options)
        core = self.llm_engine.engine_core.engine_core
        worker = core.model_executor.driver_worker.worker
        scheduler = core.scheduler
        _report("FRONT_END", _limits_of(self.llm_engine.vllm_config))
        _report("WORKER", {**_limits_of(worker.vllm_config), "class": type(worker).__name__})
        _report(
            "SCHEDULER",
            {
                "class": type(scheduler).__name__,
                "max_num_seqs": scheduler.max_num_running_reqs,
                "max_num_batched_tokens": scheduler.max_num_scheduled_tokens,
                "num_kv_blocks": scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
                "max_model_len": scheduler.max_model_len,
            },
        )

    LLM.__init__ = construct_and_report


def _limits_of(vllm_config: Any) -> dict[str, Any]:
    return {
        "max_num_seqs": vllm_config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": vllm_config.scheduler_config.max_num_batched_tokens,
        "kv_bytes": vllm_config.cache_config.kv_cache_memory_bytes,
        "block_size": vllm_config.cache_config.block_size,
        "max_model_len": vllm_config.model_config.max_model_len,
        "enforce_eager": vllm_config.model_config.enforce_eager,
        "plan": vllm_config.additional_config.get("moe_lightning_plan"),
    }
