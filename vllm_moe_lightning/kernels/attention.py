"""Attention on the CPU over the paged host KV cache, as one C call: append new keys and values, then attend.

Checks everything that the C side takes on trust (dtype, device, strides, lengths of arrays) and keeps the
tensors alive while the call may run. Which stream runs it, and when, is left to device/; the arithmetic to
csrc/attention_kernel.h. Letters in shapes: T tokens, S sequences, Hq query heads, Hk key/value heads,
D head_dim, B block_size, N blocks.
"""

import ctypes
import functools
import math
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch

from vllm_moe_lightning.errors import DeviceTaskError, MoeLightningError, UnsupportedError
from vllm_moe_lightning.kernels import native
from vllm_moe_lightning.kernels.quantised_cache import QuantisedCache
from vllm_moe_lightning.kv_cache_type import ElementKind
from vllm_moe_lightning.numa import nodes_of

ISA_BY_NAME = {
    "auto": native.ISA_AUTO,
    "scalar": native.ISA_SCALAR,
    "avx2": native.ISA_AVX2,
    "avx512": native.ISA_AVX512,
    "avx512bf16": native.ISA_AVX512BF16,
    "avx512vnni": native.ISA_AVX512VNNI,
}
DTYPE_CODES = {
    torch.float32: native.FLOAT32,
    torch.bfloat16: native.BFLOAT16,
    torch.float16: native.FLOAT16,
}
CACHE_CODES: dict[torch.dtype | ElementKind, int] = {
    torch.float32: native.FLOAT32,
    torch.bfloat16: native.BFLOAT16,
    torch.float16: native.FLOAT16,
    "int8": native.INT8,
    "fp8": native.FP8_E4M3,
}
HEAD_DIM_STEP = 8
MAX_HEAD_DIM = 256


def supported_head_dims() -> tuple[int, ...]:
    return tuple(range(HEAD_DIM_STEP, MAX_HEAD_DIM + 1, HEAD_DIM_STEP))


@functools.cache  # asked for each task
def available_isas() -> tuple[str, ...]:
    """The instruction sets that are compiled in and that this CPU and OS can run, by name, oldest first."""
    library = native.library()
    return tuple(n for n, isa in ISA_BY_NAME.items() if n != "auto" and library.mol_isa_available(isa))


def resolve_isa(name: str, cache_type: torch.dtype | ElementKind = torch.bfloat16) -> str:
    """The instruction set that runs for `name` on a cache of this type (of its elements, if it is quantised).

    "auto" is the best vector one for that type and never the scalar kernel; "avx512bf16" and "avx512vnni" run as
    "avx512" where the cache's type is none that they were made for.
    """
    if name not in ISA_BY_NAME:
        raise ValueError(f"isa must be one of {sorted(ISA_BY_NAME)}, got {name!r}")
    available = available_isas()
    if name == "auto":
        if available == ("scalar",):
            raise UnsupportedError(
                "CPU attention needs AVX2 or AVX-512, and this CPU (or its OS) has neither; run it on another machine "
                '(the kernels\' tests can ask for the plain one by isa="scalar"; it is many times slower)'
            )
        best = native.library().mol_best_isa(CACHE_CODES[cache_type])
        return next(known for known, isa in ISA_BY_NAME.items() if isa == best)
    if name not in available:
        raise UnsupportedError(f"CPU attention cannot run {name} here; available: {', '.join(available)}")
    return name


class AttentionPool:
    """Threads for attention. The calling thread works too and counts: num_threads=1 starts none.

    Workers may run on any CPU of `cpus`, if these lie at several memory nodes then in turns on those of one node; none
    given: on those that the creating thread may use.
    """

    def __init__(self, num_threads: int, cpus: Sequence[int] = ()) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        self.num_threads = num_threads
        self._pointer: int | None = native.library().mol_pool_create(
            num_threads,
            (ctypes.c_int32 * len(cpus))(*cpus),
            len(cpus),
            (ctypes.c_int32 * len(cpus))(*nodes_of(cpus).values()),
        )
        if self._pointer is None:
            raise MoeLightningError(
                f"cannot start {num_threads - 1} attention threads on CPUs {list(cpus) or 'of this thread'}; "
                "ask for fewer threads, or for CPUs in this process's affinity mask"
            )

    @property
    def pointer(self) -> int:
        if self._pointer is None:
            raise ValueError("this attention pool is closed")
        return self._pointer

    def close(self) -> None:
        """Ends the threads. No task that uses the pool may be running or still queued."""
        if self._pointer is not None:
            native.library().mol_pool_destroy(self._pointer)
            self._pointer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AttentionTask:
    """One call of mol_attention: `HostTaskStream.call(task.function, task.argument, ..., keep_alive=task)`.

    Query token i of a sequence sees keys up to seq_len - query_len + i. With key, value and slot_mapping,
    these are written to the cache first, all of them before any query reads; without, the cache must hold
    them already. Without query and output the task only appends. Tokens outside query_start[0] and
    query_start[S] are left alone; those of a sequence with seq_len 0 (padding) become zeros.
    Contents are read when the task runs; but query_start, seq_lens, block_table and slot_mapping are checked
    here and must not change until then.
    """

    def __init__(
        self,
        kv_cache: torch.Tensor | QuantisedCache,  # [N, Hk, 2 (K, V), B, D], contiguous
        *,
        query: torch.Tensor | None = None,  # [T, Hq, D]; any stride between tokens, as in a fused QKV tensor
        output: torch.Tensor | None = None,  # [T, Hq, D]
        block_table: torch.Tensor | None = None,  # [S, >= blocks of the longest sequence] int32
        query_start: torch.Tensor | None = None,  # [S + 1] int32
        seq_lens: torch.Tensor | None = None,  # [S] int32, the query tokens included
        key: torch.Tensor | None = None,  # [T, Hk, D]
        value: torch.Tensor | None = None,  # [T, Hk, D]
        slot_mapping: torch.Tensor | None = None,  # [T] int64: block * B + offset; negative: not written
        scale: float | None = None,  # default: D ** -0.5
        sliding_window: int = 0,  # a query sees itself and the window - 1 tokens before it; 0: no window
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,  # [Hq] float32: a logit per head that has no value
        log_sum_exp: torch.Tensor | None = None,  # [T, Hq] float32, written: log of the sum of exp(logit), sinks too
        isa: str = "auto",
        pool: AttentionPool | None = None,
        check_contents: bool = True,  # False: these lengths and blocks were checked for an earlier task; the C side
        # still refuses a bad one, without saying which
    ) -> None:
        self._kept = (kv_cache, query, output, block_table, query_start, seq_lens, key, value, slot_mapping)
        self._kept_options = (sinks, pool, log_sum_exp)
        num_blocks, num_kv_heads, block_size, head_dim = check_cache(kv_cache)
        dtype = _dtype_of(kv_cache, query, key)
        memory, cache_type = (
            (kv_cache.blocks, kv_cache.kind) if isinstance(kv_cache, QuantisedCache) else (kv_cache, kv_cache.dtype)
        )
        argument = native.AttentionTask(
            kv_cache=memory.data_ptr(),
            num_blocks=num_blocks,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            head_dim=head_dim,
            dtype=DTYPE_CODES[dtype],
            cache_dtype=CACHE_CODES[cache_type],
            isa=ISA_BY_NAME[resolve_isa(isa, cache_type)],
            num_heads=num_kv_heads,
            scale=head_dim**-0.5 if scale is None else scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            pool=None if pool is None else pool.pointer,
        )
        if not (math.isfinite(argument.scale) and math.isfinite(soft_cap) and soft_cap >= 0):
            raise ValueError(f"scale and soft_cap must be finite, soft_cap >= 0; got {scale} and {soft_cap}")
        if sliding_window < 0:
            raise ValueError(f"sliding_window must be >= 0 (0: none), got {sliding_window}")

        if key is not None or value is not None or slot_mapping is not None:
            if key is None or value is None or slot_mapping is None:
                raise ValueError("to append, give key, value and slot_mapping; to only attend, none of them")
            _fill_append(argument, dtype, key, value, slot_mapping)
        if query is not None or output is not None:
            if query is None or output is None or block_table is None or query_start is None or seq_lens is None:
                raise ValueError("to attend, give query, output, block_table, query_start and seq_lens")
            if argument.append and key is not None and key.shape[0] != query.shape[0]:
                raise ValueError(f"query has {query.shape[0]} tokens, key and value have {key.shape[0]}")
            _fill_attend(argument, dtype, query, output, sinks, log_sum_exp)
            if check_contents:
                _check_sequences(argument, block_table, query_start, seq_lens)
            _fill_sequences(argument, block_table, query_start, seq_lens)
        if not argument.append and not argument.attend:
            raise ValueError("nothing to do: give query and output, or key, value and slot_mapping, or all")
        self.argument = argument
        # The C function itself: a stream's thread calls it without the GIL.
        self.function: Any = native.library().mol_attention

    def run(self) -> None:
        """Runs the task on the calling thread (and its pool), without the GIL."""
        code = self.function(ctypes.byref(self.argument))
        if code != native.OK:
            raise DeviceTaskError(f"CPU attention failed: {native.ERROR_NAMES.get(code, f'code {code}')}")


def _dtype_of(
    kv_cache: torch.Tensor | QuantisedCache, query: torch.Tensor | None, key: torch.Tensor | None
) -> torch.dtype:
    """Of query, key, value and output: the cache's own, or where that is quantised whatever they come in."""
    if not isinstance(kv_cache, QuantisedCache):
        return kv_cache.dtype
    given = query if query is not None else key
    if given is None:
        return torch.float32
    if given.dtype not in DTYPE_CODES:
        names = ", ".join(str(dtype) for dtype in DTYPE_CODES)
        raise ValueError(f"query and key must be one of {names}, got {given.dtype}")
    return given.dtype


def check_cache(kv_cache: torch.Tensor | QuantisedCache) -> tuple[int, int, int, int]:
    """num_blocks, num_kv_heads, block_size and head_dim of a KV cache that the kernels can use."""
    if isinstance(kv_cache, QuantisedCache):
        blocks = kv_cache.blocks
        if blocks.device.type != "cpu" or not blocks.is_contiguous():
            raise ValueError(f"kv_cache must be contiguous host memory, got {_show(blocks)}")
        return _check_sizes(blocks.shape[0], blocks.shape[1], kv_cache.block_size, kv_cache.head_dim)
    if kv_cache.dim() != 5 or kv_cache.shape[2] != 2:
        raise ValueError(f"kv_cache must be [num_blocks, num_kv_heads, 2, block_size, head_dim], got {_show(kv_cache)}")
    if kv_cache.dtype not in DTYPE_CODES:
        names = ", ".join(str(dtype) for dtype in DTYPE_CODES)
        raise ValueError(f"kv_cache must be one of {names}, got {kv_cache.dtype}")
    if kv_cache.device.type != "cpu" or not kv_cache.is_contiguous():
        raise ValueError(f"kv_cache must be contiguous host memory, got {_show(kv_cache)}")
    num_blocks, num_kv_heads, _, block_size, head_dim = kv_cache.shape
    return _check_sizes(num_blocks, num_kv_heads, block_size, head_dim)


def _check_sizes(num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> tuple[int, int, int, int]:
    if min(num_blocks, num_kv_heads, block_size) < 1:
        raise ValueError(
            f"kv_cache has an empty dimension: {num_blocks} blocks of {num_kv_heads} heads x {block_size} tokens"
        )
    if head_dim % HEAD_DIM_STEP != 0 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}, got {head_dim}")
    return num_blocks, num_kv_heads, block_size, head_dim


def _fill_append(
    argument: native.AttentionTask,
    dtype: torch.dtype,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    num_tokens = key.shape[0]
    row = (num_tokens, argument.num_kv_heads, argument.head_dim)
    for name, tensor in (("key", key), ("value", value)):
        _check_rows(name, tensor, row, dtype)
    _check_indices("slot_mapping", slot_mapping, (num_tokens,), torch.int64)
    num_slots = argument.num_blocks * argument.block_size
    if num_tokens and int(slot_mapping.max()) >= num_slots:
        raise ValueError(f"slot_mapping names slot {int(slot_mapping.max())}, kv_cache has {num_slots}")
    argument.append = 1
    argument.num_tokens = num_tokens
    argument.key, argument.key_token_stride = key.data_ptr(), _token_stride(key)
    argument.value, argument.value_token_stride = value.data_ptr(), _token_stride(value)
    argument.slot_mapping = slot_mapping.data_ptr()


def _fill_attend(
    argument: native.AttentionTask,
    dtype: torch.dtype,
    query: torch.Tensor,
    output: torch.Tensor,
    sinks: torch.Tensor | None,
    log_sum_exp: torch.Tensor | None,
) -> None:
    if query.dim() != 3 or query.shape[1] == 0 or query.shape[1] % argument.num_kv_heads != 0:
        raise ValueError(
            "query must be [tokens, heads, head_dim] with heads a multiple of the cache's "
            f"{argument.num_kv_heads} key/value heads, got {_show(query)}"
        )
    num_tokens, num_heads, _ = query.shape
    for name, tensor in (("query", query), ("output", output)):
        _check_rows(name, tensor, (num_tokens, num_heads, argument.head_dim), dtype)
    argument.attend = 1
    argument.num_tokens, argument.num_heads = num_tokens, num_heads
    argument.query, argument.query_token_stride = query.data_ptr(), _token_stride(query)
    argument.output, argument.output_token_stride = output.data_ptr(), _token_stride(output)
    if sinks is not None:
        _check_indices("sinks", sinks, (num_heads,), torch.float32)
        argument.sinks = sinks.data_ptr()
    if log_sum_exp is not None:
        _check_indices("log_sum_exp", log_sum_exp, (num_tokens, num_heads), torch.float32)
        argument.log_sum_exp = log_sum_exp.data_ptr()


def _check_sequences(
    argument: native.AttentionTask,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    num_seqs = seq_lens.numel()
    _check_indices("seq_lens", seq_lens, (num_seqs,), torch.int32)
    _check_indices("query_start", query_start, (num_seqs + 1,), torch.int32)
    if block_table.dim() != 2 or (block_table.shape[1] > 1 and block_table.stride(1) != 1):
        raise ValueError(f"block_table must be [sequences, blocks] with adjacent blocks, got {_show(block_table)}")
    if block_table.shape[0] != num_seqs or block_table.dtype != torch.int32 or block_table.device.type != "cpu":
        raise ValueError(f"block_table must be int32 on the host with {num_seqs} rows, got {_show(block_table)}")
    query_lens = query_start.diff()
    if int(query_start[0]) < 0 or int(query_start[-1]) > argument.num_tokens or (query_lens < 0).any():
        raise ValueError(f"query_start must rise within 0..{argument.num_tokens}, got {query_start.tolist()}")
    is_read = (query_lens > 0) & (seq_lens > 0)
    if ((seq_lens < 0) | (is_read & (seq_lens < query_lens))).any():
        raise ValueError(
            f"seq_lens count the query tokens too: got {seq_lens.tolist()} for queries of {query_lens.tolist()} tokens"
        )
    # Blocks that no query reads (behind the end, before the window) may have been freed: any number will do.
    begin = (seq_lens - query_lens + 1 - argument.sliding_window).clamp(min=0) // argument.block_size
    if argument.sliding_window == 0:
        begin.zero_()
    end = torch.where(is_read, (seq_lens + argument.block_size - 1) // argument.block_size, 0)
    width = block_table.shape[1]
    if num_seqs and int(end.max()) > width:
        raise ValueError(f"block_table has {width} columns, the longest sequence needs {int(end.max())}")
    columns = torch.arange(width, dtype=torch.int32)
    read_ids = block_table[(columns >= begin[:, None]) & (columns < end[:, None])]
    if ((read_ids < 0) | (read_ids >= argument.num_blocks)).any():
        raise ValueError(f"block_table names blocks outside 0..{argument.num_blocks - 1}: {block_table.tolist()}")


def _fill_sequences(
    argument: native.AttentionTask,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    argument.num_seqs = seq_lens.numel()
    argument.block_table = block_table.data_ptr()
    argument.block_table_stride = block_table.stride(0) if seq_lens.numel() > 1 else block_table.shape[1]
    argument.query_start, argument.seq_lens = query_start.data_ptr(), seq_lens.data_ptr()


def _check_rows(name: str, tensor: torch.Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """[tokens, heads, head_dim] with a token's rows packed; tokens may lie apart, as in a fused QKV."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device.type != "cpu":
        raise ValueError(f"{name} must be {list(shape)} of {dtype} on the host, got {_show(tensor)}")
    _, num_heads, head_dim = shape
    is_packed = tensor.stride(2) == 1 and (num_heads == 1 or tensor.stride(1) == head_dim)
    if tensor.numel() and not (is_packed and _token_stride(tensor) >= num_heads * head_dim):
        raise ValueError(
            f"{name}: the heads of a token must be packed and tokens must not overlap, got {_show(tensor)}"
        )


def _token_stride(tensor: torch.Tensor) -> int:
    """Elements from token to token; of a single token torch may report any stride."""
    return tensor.stride(0) if tensor.shape[0] > 1 else tensor.shape[1] * tensor.shape[2]


def _check_indices(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    is_right = tuple(tensor.shape) == shape and tensor.dtype == dtype
    if not (is_right and tensor.device.type == "cpu" and tensor.is_contiguous()):
        raise ValueError(f"{name} must be contiguous {dtype} of shape {list(shape)} on the host, got {_show(tensor)}")


def _show(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}, strides {list(tensor.stride())}"
