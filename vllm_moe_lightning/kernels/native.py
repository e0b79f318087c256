"""Loads libmoe_lightning_cpu and declares its C ABI (csrc/moe_lightning.h) for ctypes.

The only place that touches ctypes.CDLL. It decides which file is loaded and refuses one of another ABI or one
built from other sources than those beside the package; what the calls mean is left to device/ and kernels/.
Every call through the library drops the GIL.
"""

import ctypes
import functools
import hashlib
import os
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path

import vllm_moe_lightning
from vllm_moe_lightning.errors import MoeLightningError

LIBRARY_NAME = "libmoe_lightning_cpu.so"
# A library at another path, e.g. one built with a sanitizer. Its ABI is checked, its source hash is not.
LIBRARY_VARIABLE = "MOE_LIGHTNING_CPU_LIBRARY"
ABI_VERSION = 5
REBUILD = "build it again: pip install --no-deps --force-reinstall . (editable: pip install --no-deps -e .)"

TIMING_EAGER, TIMING_LAZY, TIMING_JITTER = 0, 1, 2
FLOAT32, BFLOAT16, FLOAT16, INT8, FP8_E4M3 = 0, 1, 2, 3, 4
ISA_AUTO, ISA_SCALAR, ISA_AVX2, ISA_AVX512, ISA_AVX512BF16, ISA_AVX512VNNI = 0, 1, 2, 3, 4, 5
READ_SEQUENTIAL, READ_TWO_STREAMS, READ_TWO_STREAMS_PREFETCH, READ_FOUR_STREAMS_PREFETCH = 0, 1, 2, 3
OK, ERROR_BAD_ARGUMENT, ERROR_UNSUPPORTED_ISA, ERROR_OUT_OF_MEMORY, ERROR_INJECTED = 0, 1, 2, 3, 99
ERROR_STALLED, ERROR_ENDED = -1, -2  # of mol_stream_synchronize alone
STREAM_IDLE, STREAM_RUNNING, STREAM_WAITING, STREAM_ENDED = 0, 1, 2, 3
ERROR_NAMES = {
    ERROR_BAD_ARGUMENT: "bad argument",
    ERROR_UNSUPPORTED_ISA: "instruction set not available",
    ERROR_OUT_OF_MEMORY: "out of memory",
    ERROR_INJECTED: "error injected by a test",
}

# int32_t (*)(const void*), what mol_stream_call runs; for an AttentionTask that is library().mol_attention.
CallFunction = ctypes.CFUNCTYPE(c_int32, c_void_p)


class Record(Structure):
    """mol_record: one finished operation; times are time.monotonic_ns()."""

    _fields_ = [("tag", c_int64), ("start_ns", c_int64), ("end_ns", c_int64), ("num_bytes", c_int64)]


class StreamTotals(Structure):
    """mol_stream_totals: what a stream has done since its creation."""

    _fields_ = [
        ("busy_ns", c_int64),
        ("num_bytes", c_int64),
        ("num_copies", c_int64),
        ("num_calls", c_int64),
    ]


class StreamStatus(Structure):
    """mol_stream_status: what a stream is at."""

    _fields_ = [
        ("submitted", c_int64),
        ("completed", c_int64),
        ("tag", c_int64),
        ("since_ns", c_int64),
        ("awaited", c_void_p),
        ("awaited_seq", c_int64),
        ("state", c_int32),
    ]


class AttentionTask(Structure):
    """mol_attention_task: shapes, strides and owners are in csrc/moe_lightning.h."""

    _fields_ = [
        ("query", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("output", c_void_p),
        ("query_token_stride", c_int64),
        ("key_token_stride", c_int64),
        ("value_token_stride", c_int64),
        ("output_token_stride", c_int64),
        ("kv_cache", c_void_p),
        ("num_blocks", c_int64),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("slot_mapping", c_void_p),
        ("sinks", c_void_p),
        ("log_sum_exp", c_void_p),
        ("num_seqs", c_int32),
        ("num_tokens", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("dtype", c_int32),
        ("cache_dtype", c_int32),
        ("isa", c_int32),
        ("sliding_window", c_int32),
        ("append", c_int32),
        ("attend", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("pool", c_void_p),
    ]


class ExpertFfnTask(Structure):
    """mol_expert_ffn_task: shapes, strides and owners are in csrc/moe_lightning.h."""

    _fields_ = [
        ("hidden", c_void_p),
        ("output", c_void_p),
        ("hidden_token_stride", c_int64),
        ("output_token_stride", c_int64),
        ("w13", c_void_p),
        ("w2", c_void_p),
        ("w13_bias", c_void_p),
        ("w2_bias", c_void_p),
        ("topk_ids", c_void_p),
        ("topk_weights", c_void_p),
        ("addend", c_void_p),
        ("num_tokens", c_int32),
        ("top_k", c_int32),
        ("num_experts", c_int32),
        ("hidden_size", c_int32),
        ("intermediate_size", c_int32),
        ("dtype", c_int32),
        ("isa", c_int32),
        ("max_tokens_per_expert", c_int32),
        ("interleaved", c_int32),
        ("gate_alpha", c_float),
        ("clamp_limit", c_float),
        ("up_offset", c_float),
        ("pool", c_void_p),
    ]


# name: (result, arguments), in the order of the header.
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "mol_abi_version": (c_int32, []),
    "mol_source_hash": (c_char_p, []),
    "mol_stream_create": (c_void_p, [c_char_p, c_double, c_double, c_int32, c_uint64, c_double]),
    "mol_stream_destroy": (None, [c_void_p]),
    "mol_stream_copy": (
        c_int64,
        [c_void_p, c_int64, POINTER(c_void_p), POINTER(c_void_p), POINTER(c_int64), c_int64],
    ),
    "mol_stream_fill": (c_int64, [c_void_p, c_void_p, c_int32, c_int64]),
    "mol_stream_call": (c_int64, [c_void_p, c_void_p, c_void_p, c_int64]),
    "mol_stream_wait_call": (c_int64, [c_void_p, c_void_p, c_void_p, c_int64]),
    "mol_stream_wait": (c_int64, [c_void_p, c_void_p, c_int64]),
    "mol_stream_synchronize": (c_int32, [c_void_p, c_int64, c_double]),
    "mol_stream_get_status": (None, [c_void_p, POINTER(StreamStatus)]),
    "mol_stream_submitted": (c_int64, [c_void_p]),
    "mol_stream_completed": (c_int64, [c_void_p]),
    "mol_stream_get_totals": (None, [c_void_p, POINTER(StreamTotals)]),
    "mol_stream_set_recording": (None, [c_void_p, c_int64]),
    "mol_stream_drain_records": (c_int64, [c_void_p, POINTER(Record), c_int64]),
    "mol_stream_set_affinity": (c_int32, [c_void_p, POINTER(c_int32), c_int32]),
    "mol_pool_create": (c_void_p, [c_int32, POINTER(c_int32), c_int32, POINTER(c_int32)]),
    "mol_pool_destroy": (None, [c_void_p]),
    "mol_attention": (c_int32, [c_void_p]),
    "mol_best_isa": (c_int32, [c_int32]),
    "mol_isa_available": (c_int32, [c_int32]),
    "mol_expert_ffn": (c_int32, [c_void_p]),
    "mol_read_probe": (c_int32, [c_void_p, c_int64, c_int32, c_int32, c_void_p, POINTER(c_uint64)]),
    "mol_fault_error": (c_int32, [c_void_p]),
    "mol_fault_hang": (c_int32, [c_void_p]),
    "mol_fault_end_thread": (c_int32, [c_void_p]),
}


def source_hash(source_dir: Path) -> str:
    """The hash that CMakeLists.txt bakes into a library built from `source_dir` (csrc)."""
    names = sorted([path.name for suffix in ("*.h", "*.cpp") for path in source_dir.glob(suffix)] + ["CMakeLists.txt"])
    digest = hashlib.sha256()
    for name in names:
        digest.update((source_dir / name).read_bytes())
    return digest.hexdigest()[:16]


def find_library() -> Path:
    """The library's file. An editable install spreads the package over directories, so all are searched."""
    override = os.environ.get(LIBRARY_VARIABLE)
    if override:
        if not Path(override).is_file():
            raise MoeLightningError(
                f"{LIBRARY_VARIABLE}={override} is not a file; unset it or point it at {LIBRARY_NAME}"
            )
        return Path(override)
    directories = [Path(entry) for entry in vllm_moe_lightning.__path__]
    for directory in directories:
        if (directory / LIBRARY_NAME).is_file():
            return directory / LIBRARY_NAME
    searched = ", ".join(map(str, directories))
    raise MoeLightningError(f"the native library {LIBRARY_NAME} is not in {searched}; {REBUILD}")


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library with its signatures declared.

    Raises MoeLightningError when the file is missing, speaks another ABI, or was built from other sources
    than the csrc/ beside the package (a stale build).
    """
    path = find_library()
    loaded = ctypes.CDLL(str(path))
    loaded.mol_abi_version.restype = c_int32
    abi_version = loaded.mol_abi_version()
    if abi_version != ABI_VERSION:
        raise MoeLightningError(f"{path} has ABI {abi_version}, this package needs {ABI_VERSION}; {REBUILD}")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype = result
        function.argtypes = arguments
    if not os.environ.get(LIBRARY_VARIABLE):
        _refuse_stale_build(loaded, path)
    return loaded


def _refuse_stale_build(loaded: ctypes.CDLL, path: Path) -> None:
    built_from = loaded.mol_source_hash().decode()
    for entry in vllm_moe_lightning.__path__:
        source_dir = Path(entry).parent / "csrc"
        if (source_dir / "CMakeLists.txt").is_file() and source_hash(source_dir) != built_from:
            raise MoeLightningError(f"{path} is stale: {source_dir} has changed since it was built; {REBUILD}")
