"""What differs between vLLM's CPU and CUDA builds, as far as we touch it: the worker and the attention backend."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_moe_lightning.errors import UnsupportedError


def is_cuda() -> bool:
    """NVIDIA's. ROCm calls itself CUDA-alike, and has not been tried."""
    return bool(current_platform.is_cuda())


def gpu_memory_node() -> int | None:
    """The memory node that this process's current GPU hangs on; None without one, and where the machine has a single
    node or does not say."""
    if not is_cuda():
        return None
    from vllm_moe_lightning.device.cuda_runtime import TorchCuda

    return TorchCuda().numa_node()


def worker_base() -> Any:
    """vLLM's own worker class for the platform."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    if is_cuda():
        from vllm.v1.worker.gpu_worker import Worker

        return Worker
    raise UnsupportedError(
        f"moe_lightning runs on vLLM's CPU and CUDA builds, not on {current_platform.device_name!r}; drop --worker-cls"
    )


def attention_backend() -> AttentionBackendEnum:
    """The name that our attention goes by: the CPU platform takes CPU_ATTN whatever is asked for, the others what is
    selected."""
    return AttentionBackendEnum.CPU_ATTN if current_platform.is_cpu() else AttentionBackendEnum.CUSTOM
