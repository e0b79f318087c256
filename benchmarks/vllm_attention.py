"""vLLM's CPU attention kernels as competitors: their own packed caches, filled by their own operator.

Each cache is one that vLLM's CPU backend would have: same block size, same blocks, another order inside a block. What
the backend prepares once per step for all layers (the scheduler's metadata) is made beforehand, as our task is.
"""

from __future__ import annotations

import importlib.util

import torch

from benchmarks.attention_arms import QUANTISED_ROW_TOLERANCE, ROW_TOLERANCE, Arm, Batch

NOT_INSTALLED = "vLLM is not installed"


def isas_for(block_size: int) -> tuple[str, ...]:
    """What vLLM's _get_attn_isa can choose on x86 for this block size; the first that the CPU has."""
    return ("amx", "vec") if block_size % 32 == 0 else ("vec16",)


def null_reason(isa: str, dtype: torch.dtype) -> str:
    """Why this kernel cannot run here; empty if it can."""
    if importlib.util.find_spec("vllm") is None:
        return NOT_INSTALLED
    if isa == "amx":
        if not torch.cpu._is_amx_tile_supported():
            return "this CPU has no AMX tiles"
        if dtype != torch.bfloat16:
            return "vLLM's AMX kernel takes bfloat16 alone"
        if not torch.cpu._init_amx():
            return "the operating system grants no AMX tiles"
    return ""


class VllmCache:
    """One Batch's context in the layout of a kernel of vLLM's; kv_cache_dtype "auto" is the batch's own."""

    def __init__(self, batch: Batch, isa: str, kv_cache_dtype: str = "auto") -> None:
        from vllm import _custom_ops as ops
        from vllm import envs

        self.ops, self.envs = ops, envs
        self.batch, self.isa, self.kv_cache_dtype = batch, isa, kv_cache_dtype
        shape = batch.shape
        cache_shape = (shape.num_blocks, shape.num_kv_heads, 2 * shape.block_size, shape.head_dim)
        is_own = kv_cache_dtype == "auto"
        self.row_tolerance = ROW_TOLERANCE if is_own else QUANTISED_ROW_TOLERANCE["fp8"]
        kv_cache = torch.zeros(cache_shape, dtype=shape.dtype if is_own else torch.uint8)
        self.bytes_share = kv_cache.itemsize / shape.dtype.itemsize
        self.key_cache, self.value_cache = kv_cache.chunk(2, dim=2)
        for layer in range(shape.num_layers):
            for seq in range(shape.num_seqs):
                self._fill(layer, seq)

    def _fill(self, layer: int, seq: int) -> None:
        key, value = self.batch.context(layer, seq)
        self.ops.cpu_attn_reshape_and_cache(
            key.transpose(0, 1).contiguous(),
            value.transpose(0, 1).contiguous(),
            self.key_cache,
            self.value_cache,
            self.batch.slots(layer, seq),
            self.isa,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    def arm(self) -> Arm:
        """For as many threads as torch has now."""
        batch, shape = self.batch, self.batch.shape
        output = torch.empty_like(batch.query)
        metadata = self.ops.cpu_attn_get_scheduler_metadata(
            num_reqs=shape.num_seqs,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            seq_lens=batch.seq_lens,
            dtype=shape.dtype,
            query_start_loc=batch.query_start,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=self.envs.VLLM_CPU_ATTN_SPLIT_KV,
            kv_cache_dtype=self.kv_cache_dtype,
        )

        def run_layer(layer: int) -> torch.Tensor:
            self.ops.cpu_attention_with_kv_cache(
                query=batch.query,
                key_cache=self.key_cache,
                value_cache=self.value_cache,
                output=output,
                query_start_loc=batch.query_start,
                seq_lens=batch.seq_lens,
                scale=shape.head_dim**-0.5,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=batch.block_tables[layer],
                softcap=0.0,
                scheduler_metadata=metadata,
                s_aux=None,
                kv_cache_dtype=self.kv_cache_dtype,
            )
            return output

        return Arm(run_layer, bytes_share=self.bytes_share, row_tolerance=self.row_tolerance)


class VllmCaches:
    """All that vLLM offers for one Batch, filled once and run with any number of threads."""

    def __init__(self, batch: Batch, has_quantised: bool) -> None:
        shape = batch.shape
        self._caches: dict[str, VllmCache | str] = {}
        for isa in isas_for(shape.block_size):
            reason = null_reason(isa, shape.dtype)
            self._caches[f"vllm {isa}"] = reason or VllmCache(batch, isa)
        if has_quantised:
            isa = next((isa for isa in isas_for(shape.block_size) if not null_reason(isa, shape.dtype)), None)
            has_avx512 = torch.cpu._is_avx512_supported()
            self._caches["vllm fp8"] = (
                NOT_INSTALLED
                if isa is None
                else VllmCache(batch, isa, "fp8")
                if has_avx512
                else "vLLM's fp8 KV cache needs AVX-512"
            )

    def arms(self) -> dict[str, Arm]:
        return {
            name: Arm(None, cache) if isinstance(cache, str) else cache.arm() for name, cache in self._caches.items()
        }
