"""vLLM's Ray executor on its CPU build, which by itself refuses Ray: its platform names no resource that Ray counts.

Upstream: vllm.v1.executor.ray_executor_v2 and ray_utils, 0.32 and 0.33. Here a rank takes one of Ray's CPUs for its
place, and has no device numbers. What is replaced is put back once the ranks run. Remove when CpuPlatform names a
resource. With GPUs nothing of this is used. Only imported where Ray is asked for, and so installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import vllm.v1.executor.ray_executor_v2 as ray_executor
from vllm.platforms import current_platform
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc


class CpuRayWorkerProc(RayWorkerProc):
    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        return ray.get_runtime_context().get_node_id(), []


class CpuRayExecutor(RayExecutorV2):
    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        return {}  # its bundle holds the CPU; vLLM itself asks for no further ones

    def _init_executor(self) -> None:
        with _ranks_on_cpus():
            super()._init_executor()


@contextmanager
def _ranks_on_cpus() -> Iterator[None]:
    platform = type(current_platform)
    before = platform.ray_device_key, ray_executor.RayWorkerProc
    platform.ray_device_key, ray_executor.RayWorkerProc = "CPU", CpuRayWorkerProc
    try:
        yield
    finally:
        platform.ray_device_key, ray_executor.RayWorkerProc = before
