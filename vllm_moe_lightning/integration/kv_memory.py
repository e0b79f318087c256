"""Where vLLM keeps the KV cache: in host memory, on a platform whose runners would put it on the GPU.

The CPU reads it, and nothing copies it, so it needs no pinning: new keys and values come through staging buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import vllm.v1.worker.gpu.attn_utils
import vllm.v1.worker.gpu_model_runner
from vllm.v1.worker.utils import allocate_kv_cache


@contextmanager
def kv_cache_in_host_memory() -> Iterator[None]:
    """While it is in force, both model runners allocate KV caches on the host."""

    def allocate(kv_cache_config: Any, device: torch.device, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        return allocate_kv_cache(kv_cache_config, torch.device("cpu"), *args, **kwargs)

    with (
        patch.object(vllm.v1.worker.gpu_model_runner, "allocate_kv_cache", allocate),  # V1
        patch.object(vllm.v1.worker.gpu.attn_utils, "allocate_kv_cache", allocate),  # V2
    ):
        yield
