"""Measurements of the host's memory, arithmetic and disk, each as its best and median over some repeats.

Best patterns only: what our kernels reach of them is an efficiency of the profile. Not measured: NUMA, and energy.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_moe_lightning.hardware import MIB
from vllm_moe_lightning.host_limits import IN_MEMORY, file_system_of
from vllm_moe_lightning.kernels.attention import AttentionPool, AttentionTask
from vllm_moe_lightning.kernels.expert_ffn import ExpertFfn, ExpertFfnTask
from vllm_moe_lightning.kernels.read_probe import READ_PATTERNS, read_once
from vllm_moe_lightning.kv_cache import PREFERRED_BLOCK_SIZE
from vllm_moe_lightning.machine_readings import BYTES_PER_S, FLOPS_PER_S, SECONDS, Reading


@dataclass(frozen=True)
class Effort:
    """How much is moved and computed for a reading."""

    repeats: int
    buffer_bytes: int
    kv_bytes: int
    """At least 128 MiB, to be larger than the last cache of most machines. Of the experts' weights too."""
    gemm_size: int
    disk_bytes: int


FULL = Effort(repeats=20, buffer_bytes=512 * MIB, kv_bytes=256 * MIB, gemm_size=2048, disk_bytes=512 * MIB)
QUICK = Effort(repeats=6, buffer_bytes=128 * MIB, kv_bytes=128 * MIB, gemm_size=1024, disk_bytes=64 * MIB)

# Decode attention of a GQA model in the style of Mixtral, at a context that is some MiB for each sequence.
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, CONTEXT_LEN = 32, 8, 128, 16, 512
HALF_HEAD_DIM = HEAD_DIM // 2
MOST_PROMPT_TOKENS = 512  # more reach no other rate
# A sequence's keys and values that stay in a core's own cache, for the arithmetic alone.
CACHED_CONTEXT_LEN = 64
CALLS_PER_SHORT_REPEAT = 20
# Experts of a size between Qwen3-30B-A3B's and Mixtral's, with few tokens each, as in a decode step, and with many.
EXPERT_HIDDEN, EXPERT_INTERMEDIATE = 2048, 1024
EXPERT_BYTES = 3 * EXPERT_HIDDEN * EXPERT_INTERMEDIATE * 2
FEW_EXPERT_TOKENS, MANY_EXPERT_TOKENS = 8, 64
# An expert's matrices in small, and the rows that a micro-batch brings to each.
EXPERT_FEATURES, FEW_ROWS, MANY_ROWS = 1024, 16, 128
LEAST_SHARE = 0.05
DISK_CHUNK_BYTES = 8 * MIB


def timed_s(run: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each repeat, after one that warms up caches and pages."""
    run()
    seconds = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started_s)
    return seconds


def rate_of(name: str, unit: str, amount: float, seconds: list[float], note: str = "") -> Reading:
    """`amount` per second. A clock that stood still gives infinity, which is refused by name later."""
    rates = [amount / each if each > 0 else math.inf for each in seconds]
    return Reading(name=name, unit=unit, best=max(rates), median=statistics.median(rates), note=note)


def not_run(name: str, unit: str, why: str) -> Reading:
    return Reading(name=name, unit=unit, best=None, note=f"not run: {why}")


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def thread_counts(num_threads: int) -> list[int]:
    """1, 2, 4 ... and all of them."""
    doubled = [1 << power for power in range(num_threads.bit_length()) if 1 << power < num_threads]
    return [*doubled, num_threads]


def host_read(num_threads: int, effort: Effort) -> Reading:
    """The fastest of the read probe's patterns, taken in turn so that a disturbance does not choose."""
    memory = torch.ones(effort.buffer_bytes, dtype=torch.uint8)
    seconds: dict[str, list[float]] = {pattern: [] for pattern in READ_PATTERNS}
    with AttentionPool(num_threads) as pool:
        for repeat in range(-1, effort.repeats):  # the first time warms up
            for pattern, taken_s in seconds.items():
                started_s = time.perf_counter()
                read_once(memory, pattern, pool=pool)
                if repeat >= 0:
                    taken_s.append(time.perf_counter() - started_s)
    best = min(seconds, key=lambda pattern: statistics.median(seconds[pattern]))
    return rate_of(f"host_read.{num_threads}", BYTES_PER_S, memory.nbytes, seconds[best], best)


def memcpy(num_threads: int, effort: Effort) -> Reading:
    """Bytes copied per second; the memory bus carries each of them at least twice."""
    source = torch.ones(effort.buffer_bytes // 2, dtype=torch.uint8)
    target = torch.empty_like(source)
    with torch_threads(num_threads):
        seconds = timed_s(lambda: target.copy_(source), effort.repeats)
    return rate_of(f"memcpy.{num_threads}", BYTES_PER_S, source.nbytes, seconds, "bytes copied, not read + written")


def gemm(num_threads: int, dtype: torch.dtype, effort: Effort) -> Reading:
    size = effort.gemm_size
    left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    product = torch.empty_like(left)
    with torch_threads(num_threads):
        seconds = timed_s(lambda: torch.mm(left, right, out=product), effort.repeats)
    name = f"gemm_{str(dtype).removeprefix('torch.')}.{num_threads}"
    return rate_of(name, FLOPS_PER_S, 2.0 * size**3, seconds, f"{size} x {size} matrices")


def few_row_gemms(effort: Effort) -> list[Reading]:
    """Experts on one core: FLOP/s of each further row, and bytes/s of the weights, which come first and from memory.

    The seconds of R rows are rows_s * R + weights_s; two sizes give both. A large square GEMM shows neither.
    """
    num_experts = max(2, effort.kv_bytes // (EXPERT_FEATURES**2 * 2))
    weights = torch.ones(num_experts, EXPERT_FEATURES, EXPERT_FEATURES, dtype=torch.bfloat16)

    def seconds_of_rows(num_rows: int) -> list[float]:
        rows = torch.ones(num_rows, EXPERT_FEATURES, dtype=torch.bfloat16)
        product = torch.empty_like(rows)

        def run() -> None:
            for expert in weights:
                torch.mm(rows, expert.T, out=product)

        return timed_s(run, effort.repeats)

    with torch_threads(1):
        few_s, many_s = (seconds_of_rows(rows) for rows in (FEW_ROWS, MANY_ROWS))
    note = f"{FEW_ROWS} and {MANY_ROWS} rows by {weights.nbytes // MIB} MiB of bfloat16 weights"
    return rows_and_weights("gemm.1", few_s, many_s, 2.0 * weights.numel(), weights.nbytes, note)


def rows_and_weights(
    name: str, few_s: Sequence[float], many_s: Sequence[float], flops_per_row: float, num_bytes: int, note: str
) -> list[Reading]:
    """Seconds of FEW_ROWS and of MANY_ROWS rows by the same weights -> FLOP/s of a row, bytes/s of the weights."""
    # Others' load can turn the line over: of the smaller size, neither part is taken to be less than a twentieth.
    share = FEW_ROWS * (min(many_s) - min(few_s)) / (MANY_ROWS - FEW_ROWS) / min(few_s)
    rows_share = min(max(share, LEAST_SHARE), 1.0 - LEAST_SHARE)
    row_s, weights_s = min(few_s) * rows_share / FEW_ROWS, min(few_s) * (1.0 - rows_share)
    return [
        Reading(name=f"rows_{name}", unit=FLOPS_PER_S, best=flops_per_row / row_s, note=note),
        Reading(name=f"weights_{name}", unit=BYTES_PER_S, best=num_bytes / weights_s, note=note),
    ]


def causal_attention(num_threads: int, effort: Effort) -> Reading:
    """Prefill attention as the emulated device computes it; FLOPs of the causal half."""
    tokens = effort.gemm_size // 2
    query, key, value = torch.ones(3, 1, 8, tokens, HEAD_DIM, dtype=torch.bfloat16).unbind()

    def run() -> None:
        torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    with torch_threads(num_threads):
        seconds = timed_s(run, effort.repeats)
    flops = 4.0 * 8 * HEAD_DIM * tokens * (tokens + 1) / 2
    return rate_of(f"causal_attention.{num_threads}", FLOPS_PER_S, flops, seconds, f"{tokens} tokens, bfloat16")


def _attention_task(
    num_seqs: int, query_len: int, context_len: int, pool: AttentionPool, head_dim: int, block_size: int
) -> AttentionTask:
    """The last `query_len` tokens of each sequence, its blocks dealt out at random as a block manager would."""
    blocks_per_seq = -(-context_len // block_size)
    num_blocks = num_seqs * blocks_per_seq
    cache = torch.full((num_blocks, NUM_KV_HEADS, 2, block_size, head_dim), 0.5, dtype=torch.bfloat16)
    query = torch.ones(num_seqs * query_len, NUM_HEADS, head_dim, dtype=torch.bfloat16)
    dealt = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    return AttentionTask(
        cache,
        query=query,
        output=torch.empty_like(query),
        block_table=dealt.view(num_seqs, blocks_per_seq),
        query_start=torch.arange(num_seqs + 1, dtype=torch.int32) * query_len,
        seq_lens=torch.full((num_seqs,), context_len, dtype=torch.int32),
        pool=pool,
    )


def _decode_task(num_seqs: int, context_len: int, pool: AttentionPool) -> AttentionTask:
    return _attention_task(num_seqs, 1, context_len, pool, HEAD_DIM, BLOCK_SIZE)


def prompt_attention(num_threads: int, effort: Effort) -> list[Reading]:
    """Our kernel with a whole prompt's query tokens, at two head sizes: FLOP/s of the causal half. A head's logits cost
    their softmax whatever its size, which two sizes show and one does not."""
    tokens = min(MOST_PROMPT_TOKENS, effort.gemm_size // 2)
    pairs = NUM_HEADS * tokens * (tokens + 1) / 2
    readings = []
    with AttentionPool(num_threads) as pool:
        for head_dim in (HEAD_DIM, HALF_HEAD_DIM):
            task = _attention_task(1, tokens, tokens, pool, head_dim, PREFERRED_BLOCK_SIZE)
            note = f"{tokens} tokens, {NUM_HEADS} heads over {NUM_KV_HEADS}, head_dim {head_dim}, bfloat16"
            seconds = timed_s(task.run, effort.repeats)
            name = f"prompt_attention_{head_dim}.{num_threads}"
            readings.append(rate_of(name, FLOPS_PER_S, 4.0 * head_dim * pairs, seconds, note))
    return readings


def _often(run: Callable[[], object]) -> Callable[[], None]:
    def run_often() -> None:
        for _ in range(CALLS_PER_SHORT_REPEAT):
            run()

    return run_often


def decode_attention(num_threads: int, effort: Effort) -> list[Reading]:
    """Our kernel: from memory in bytes per second, from a core's cache in FLOP/s, and an empty task's seconds."""
    seq_bytes = CONTEXT_LEN * 2 * NUM_KV_HEADS * HEAD_DIM * 2
    num_seqs = effort.kv_bytes // seq_bytes
    with AttentionPool(num_threads) as pool:
        from_memory_s = timed_s(_decode_task(num_seqs, CONTEXT_LEN, pool).run, effort.repeats)
        cached = _decode_task(num_threads, CACHED_CONTEXT_LEN, pool)
        cached_s = timed_s(_often(cached.run), effort.repeats)
        tiny = _decode_task(1, BLOCK_SIZE, pool)
        tiny_s = timed_s(_often(tiny.run), effort.repeats)
    cached_flops = 4.0 * NUM_HEADS * HEAD_DIM * CACHED_CONTEXT_LEN * num_threads * CALLS_PER_SHORT_REPEAT
    tiny_call_s = [each / CALLS_PER_SHORT_REPEAT for each in tiny_s]
    shape = f"{NUM_HEADS} heads over {NUM_KV_HEADS}, head_dim {HEAD_DIM}, bfloat16"
    return [
        rate_of(
            f"attention_read.{num_threads}",
            BYTES_PER_S,
            num_seqs * seq_bytes,
            from_memory_s,
            f"{num_seqs * seq_bytes // MIB} MiB of KV, {shape}",
        ),
        rate_of(f"attention_cached.{num_threads}", FLOPS_PER_S, cached_flops, cached_s, f"KV in cache, {shape}"),
        Reading(
            name=f"attention_task.{num_threads}",
            unit=SECONDS,
            best=min(tiny_call_s),
            median=statistics.median(tiny_call_s),
            note="one sequence, one block: waking and joining the threads",
        ),
    ]


def expert_ffn(num_threads: int, effort: Effort) -> list[Reading]:
    """Our kernel, as one call of a stream: weights read per second with few tokens of each expert, FLOP/s with many."""
    num_experts = max(1, effort.kv_bytes // EXPERT_BYTES)
    w13 = torch.full((num_experts, 2 * EXPERT_INTERMEDIATE, EXPERT_HIDDEN), 0.01, dtype=torch.bfloat16)
    w2 = torch.full((num_experts, EXPERT_HIDDEN, EXPERT_INTERMEDIATE), 0.01, dtype=torch.bfloat16)
    experts = ExpertFfn(w13, w2)

    def task_of(tokens_per_expert: int, pool: AttentionPool) -> ExpertFfnTask:
        num_tokens = num_experts * tokens_per_expert
        hidden = torch.ones(num_tokens, EXPERT_HIDDEN, dtype=torch.bfloat16)
        ids = (torch.arange(num_tokens, dtype=torch.int32) % num_experts)[:, None].contiguous()
        return ExpertFfnTask(experts, hidden, ids, torch.ones(num_tokens, 1), torch.empty_like(hidden), pool=pool)

    with AttentionPool(num_threads) as pool:
        few_s = timed_s(task_of(FEW_EXPERT_TOKENS, pool).run, effort.repeats)
        many_s = timed_s(task_of(MANY_EXPERT_TOKENS, pool).run, effort.repeats)
    num_bytes = w13.nbytes + w2.nbytes
    shape = f"{num_experts} experts of {EXPERT_HIDDEN} x {EXPERT_INTERMEDIATE}, bfloat16"
    return [
        rate_of(
            f"expert_ffn_read.{num_threads}",
            BYTES_PER_S,
            num_bytes,
            few_s,
            f"{FEW_EXPERT_TOKENS} tokens each, {shape}",
        ),
        rate_of(
            f"expert_ffn_gemm.{num_threads}",
            FLOPS_PER_S,
            float(num_bytes) * MANY_EXPERT_TOKENS,  # 2 FLOP for the 2 bytes of each weight and token
            many_s,
            f"{MANY_EXPERT_TOKENS} tokens each, {shape}",
        ),
    ]


def disk_read(folder: Path, effort: Effort) -> Reading:
    """A fresh file read past the page cache, where the file system can. The file has no name, so nothing stays behind
    even if we are killed."""
    name = "disk_read"
    try:
        kind = file_system_of(folder)
        if kind in IN_MEMORY:
            return not_run(name, BYTES_PER_S, f"{folder} is {kind}, which is memory and no disk")
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return _disk_read(file.fileno(), folder, effort)
    except OSError as error:
        return not_run(name, BYTES_PER_S, f"{folder}: {error}")


def _disk_read(descriptor: int, folder: Path, effort: Effort) -> Reading:
    chunk = os.urandom(DISK_CHUNK_BYTES)  # which no file system compresses
    num_chunks = effort.disk_bytes // DISK_CHUNK_BYTES
    for index in range(num_chunks):
        written = os.pwrite(descriptor, chunk, index * DISK_CHUNK_BYTES)
        if written != DISK_CHUNK_BYTES:
            raise OSError(f"only {written} of {DISK_CHUNK_BYTES} bytes could be written; is the disk full?")
    os.fsync(descriptor)
    note = f"{effort.disk_bytes // MIB} MiB in {folder}, O_DIRECT"
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        note = f"{effort.disk_bytes // MIB} MiB in {folder}, page cache dropped but not bypassed"
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    seconds = []
    with mmap.mmap(-1, DISK_CHUNK_BYTES) as landing:  # page-aligned, as O_DIRECT wants it
        for index in range(num_chunks):
            started_s = time.perf_counter()
            num_bytes = os.preadv(descriptor, [landing], index * DISK_CHUNK_BYTES)
            seconds.append(time.perf_counter() - started_s)
            if num_bytes != DISK_CHUNK_BYTES:
                raise OSError(f"only {num_bytes} of {DISK_CHUNK_BYTES} bytes could be read back")
    # Of the whole file: a single chunk's best is the luck of a read-ahead.
    return rate_of("disk_read", BYTES_PER_S, num_chunks * DISK_CHUNK_BYTES, [sum(seconds)], note)
