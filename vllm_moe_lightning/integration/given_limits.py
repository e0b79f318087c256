"""Which of vLLM's limits the user has set: noted before vLLM fills in its own defaults, and read where we plan.

`EngineArgs` replaces None by a default before any hook of ours sees the configuration. The note travels in
`additional_config`, so that a second configuration made from the same arguments knows as well.
"""

from __future__ import annotations

import os
from typing import Any

from vllm_moe_lightning.engine_request import GivenLimits
from vllm_moe_lightning.errors import UnsupportedError

NOTE_KEY = "moe_lightning_given"
NOTED = ("max_num_seqs", "max_num_batched_tokens")
MEMORY_SHARE = "gpu_memory_utilization"
KV_SPACE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
GIB = 1 << 30


def note_given_limits(engine_args: Any) -> None:
    """Called while None still means "not given"."""
    additional = engine_args.additional_config
    if isinstance(additional, dict) and NOTE_KEY not in additional:
        given = [name for name in NOTED if getattr(engine_args, name) is not None]
        if engine_args.gpu_memory_utilization != type(engine_args).gpu_memory_utilization:
            given.append(MEMORY_SHARE)
        engine_args.additional_config = {**additional, NOTE_KEY: given}


def given_limits(vllm_config: Any, kv_cache_gib: float | None, block_bytes: float) -> GivenLimits:
    """Without a note (a configuration made by hand) all limits count as given. block_bytes: of a rank's KV block.

    Raises UnsupportedError where the size of the KV cache is given twice.
    """
    from vllm_moe_lightning.integration.platform import is_cuda  # imports more than noting may

    scheduler, cache, model = vllm_config.scheduler_config, vllm_config.cache_config, vllm_config.model_config
    noted = vllm_config.additional_config.get(NOTE_KEY, NOTED)
    limits = {name: getattr(scheduler, name) for name in NOTED if name in noted}
    environment = os.environ.get(KV_SPACE_VARIABLE)
    blocks = cache.num_gpu_blocks_override
    kv = {
        "moe_lightning.kv_cache_gib": None if kv_cache_gib is None else int(kv_cache_gib * GIB),
        KV_SPACE_VARIABLE: int(environment) * GIB if environment else None,
        "--kv-cache-memory-bytes": None if environment else cache.kv_cache_memory_bytes,
        "--num-gpu-blocks-override": None if blocks is None else int(blocks * block_bytes),
    }
    given = {flag: num_bytes for flag, num_bytes in kv.items() if num_bytes is not None}
    if len(given) > 1:
        raise UnsupportedError(f"the size of the KV cache is given more than once, by {', '.join(given)}; keep one")
    (flag, kv_bytes) = next(iter(given.items()), ("", None))
    return GivenLimits(
        **limits,
        kv_bytes=kv_bytes,
        kv_flag=flag,
        # On the CPU build, despite its name, of host memory.
        host_memory_share=cache.gpu_memory_utilization if MEMORY_SHARE in noted and not is_cuda() else None,
        gpu_memory_share=cache.gpu_memory_utilization if MEMORY_SHARE in noted and is_cuda() else None,
        max_model_len=None if model.original_max_model_len in (None, -1) else model.max_model_len,
    )
