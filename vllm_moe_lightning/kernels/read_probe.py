"""How fast this host's memory can be read: the bound that attention over a host cache is measured against.

Four patterns, since no single one is best on all CPUs and sizes; their best is the bound. What is read, and how it is
timed, is left to the caller.
"""

import ctypes

import torch

from vllm_moe_lightning.errors import DeviceTaskError
from vllm_moe_lightning.kernels import native
from vllm_moe_lightning.kernels.attention import ISA_BY_NAME, AttentionPool, resolve_isa

READ_PATTERNS = {
    "sequential": native.READ_SEQUENTIAL,
    "two streams": native.READ_TWO_STREAMS,
    "two streams, prefetch": native.READ_TWO_STREAMS_PREFETCH,
    "four streams, prefetch": native.READ_FOUR_STREAMS_PREFETCH,
}


def read_once(
    memory: torch.Tensor,  # contiguous, on the host; any shape and dtype
    pattern: str,
    *,
    pool: AttentionPool | None = None,
    isa: str = "auto",
) -> int:
    """Reads every byte of `memory` once on the pool's threads (None: the calling one), without the GIL.

    Returns the sum of its 64-bit words modulo 2**64, a last partial word filled up with zeros. "auto" is the best
    instruction set here, be it the scalar one. Raises ValueError for an unknown pattern, instruction set or a tensor
    that is no plain piece of memory, UnsupportedError for an instruction set that this CPU lacks.
    """
    if pattern not in READ_PATTERNS:
        raise ValueError(f"pattern must be one of {list(READ_PATTERNS)}, got {pattern!r}")
    if memory.device.type != "cpu" or not memory.is_contiguous() or memory.numel() == 0:
        raise ValueError(
            f"memory must be contiguous on the host and not empty, got {list(memory.shape)} on {memory.device}, "
            f"strides {list(memory.stride())}"
        )
    isa_code = native.ISA_AUTO if isa == "auto" else ISA_BY_NAME[resolve_isa(isa)]
    total = ctypes.c_uint64()
    code = native.library().mol_read_probe(
        memory.data_ptr(),
        memory.nbytes,
        READ_PATTERNS[pattern],
        isa_code,
        None if pool is None else pool.pointer,
        ctypes.byref(total),
    )
    if code != native.OK:
        raise DeviceTaskError(f"the read probe failed: {native.ERROR_NAMES.get(code, code)}")
    return total.value
