"""Our attention backend: turns a layer's attention into a request and yields it to the executor.

Owns the metadata (plain rows in host memory, so that a step can be cut into micro-batches) and the KV layout
(kv_cache.py). Where and when the attention runs is the executor's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import register_backend
from vllm.v1.kv_cache_interface import KVCacheLayout

from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.integration.platform import attention_backend
from vllm_moe_lightning.integration.step_rows import copies_on_host
from vllm_moe_lightning.kernels.attention import supported_head_dims
from vllm_moe_lightning.kv_cache import PREFERRED_BLOCK_SIZE, HostKvCache
from vllm_moe_lightning.kv_cache_type import QUANTISED_TYPES, row_bytes
from vllm_moe_lightning.pipeline.attention import AttentionOptions, AttentionRequest, AttentionRows
from vllm_moe_lightning.pipeline.coroutine import yield_to_executor

# vLLM's KVQuantMode, by its members' names.
KIND_BY_MODE = {name.upper(): kind for name, kind in QUANTISED_TYPES.items()}


@dataclass(frozen=True)
class HostAttentionMetadata:
    """The rows of a step, or of one micro-batch, for the layers of one KV cache group."""

    find_rows: Callable[[], AttentionRows]
    """Asked once, when they are needed: a step's may still be on their way from a GPU."""
    query_lens: tuple[int, ...]
    block_size: int

    @cached_property
    def rows(self) -> AttentionRows:
        return self.find_rows()

    @cached_property
    def seq_lens(self) -> tuple[int, ...]:
        """Of a step's rows. New tokens included."""
        return tuple(self.rows.seq_lens.tolist())

    @property
    def num_actual_tokens(self) -> int:
        return sum(self.query_lens)

    def select(
        self, rows: Sequence[int], with_context: Sequence[int], on_device: Sequence[int], tokens: torch.Tensor
    ) -> HostAttentionMetadata:
        """The metadata of some rows, and of others behind them that the device attends to, whose tokens stand at the
        indices `tokens` of the step."""
        order = (*rows, *with_context, *on_device)
        parts = [sum(self.query_lens[row] for row in group) for group in (rows, with_context, on_device)]
        of_rows, of_context, of_prompts = tokens.split(parts)
        selected = replace(
            self._rows(rows, of_rows),
            with_context=self._rows(with_context, of_context) if with_context else None,
            on_device=self._rows(on_device, of_prompts) if on_device else None,
        )
        return HostAttentionMetadata(lambda: selected, tuple(self.query_lens[row] for row in order), self.block_size)

    def _rows(self, rows: Sequence[int], tokens: torch.Tensor) -> AttentionRows:
        index = torch.tensor(rows, dtype=torch.int64)
        return AttentionRows(
            block_table=self.rows.block_table[index],
            query_start=_starts([self.query_lens[row] for row in rows]),
            seq_lens=self.rows.seq_lens[index],
            slot_mapping=self.rows.slot_mapping[tokens],
        )


def _starts(query_lens: Sequence[int]) -> torch.Tensor:
    starts = torch.zeros(len(query_lens) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(query_lens, dtype=torch.int32).cumsum(0)
    return starts


class HostAttentionMetadataBuilder(AttentionMetadataBuilder[HostAttentionMetadata]):
    """Brings a step's rows to host memory (step_rows.py)."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._block_size: int = kv_cache_spec.block_size
        _refuse_other_pages(kv_cache_spec, layer_names[0])

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> HostAttentionMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise UnsupportedError("moe_lightning supports causal attention only; run this model without --worker-cls")
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].to(torch.int32, copy=True)
        query_lens = tuple((starts[1:] - starts[:-1]).tolist())
        num_columns = -(-common.max_seq_len // self._block_size)
        copies = copies_on_host(
            (
                common.slot_mapping[: int(starts[-1])],
                common.seq_lens[: common.num_reqs],
                common.block_table_tensor[: common.num_reqs, :num_columns],
            )
        )

        def rows() -> AttentionRows:
            slot_mapping, seq_lens, block_table = copies()
            return AttentionRows(
                block_table=block_table.to(torch.int32),
                query_start=starts,
                seq_lens=seq_lens.to(torch.int32),
                slot_mapping=slot_mapping.to(torch.int64),
            )

        return HostAttentionMetadata(rows, query_lens, self._block_size)


def _refuse_other_pages(spec: Any, layer_name: str) -> None:
    """What vLLM accounts and allocates per block must be what we write there, to the byte."""
    rows = 2 * spec.block_size * spec.num_kv_heads
    expected = rows * row_bytes(spec.head_size, spec.dtype.itemsize, KIND_BY_MODE.get(spec.kv_quant_mode.name))
    if spec.page_size_bytes != expected:
        raise UnsupportedError(
            f"vLLM keeps {spec.page_size_bytes} bytes for a KV block of {layer_name}, and moe_lightning's layout takes "
            f"{expected}; drop --kv-cache-dtype, or run this model without --worker-cls"
        )


class HostAttentionImpl(AttentionImpl[HostAttentionMetadata]):
    """One attention layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        for value, what in (
            (alibi_slopes, "ALiBi slopes"),
            (kv_sharing_target_layer_name, "layers that share a KV cache"),
            (None if attn_type == AttentionType.DECODER else attn_type, f"attention of type {attn_type}"),
        ):
            if value is not None:
                raise UnsupportedError(f"moe_lightning does not support {what}; run this model without --worker-cls")
        if kv_cache_dtype not in HostAttentionBackend.supported_kv_cache_dtypes:
            raise UnsupportedError(
                f"moe_lightning does not support a KV cache of type {kv_cache_dtype}, which the checkpoint asks for; "
                f"set --kv-cache-dtype to the model's own type, or to {' or '.join(QUANTISED_TYPES)}"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.num_kv_heads = num_kv_heads or num_heads
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.cache_kind = QUANTISED_TYPES.get(kv_cache_dtype)
        self.sliding_window = sliding_window
        self.options = AttentionOptions(
            scale=self.scale,
            sliding_window=sliding_window or 0,
            soft_cap=logits_soft_cap or 0.0,
            sinks=None if sinks is None else sinks.detach(),
        )
        self._cache: HostKvCache | None = None

    def cache_over(self, layer: Any, kv_cache: torch.Tensor, block_size: int) -> HostKvCache:
        """The layer's cache in our layout, made at first use (vLLM binds its memory after the model is built)."""
        if self._cache is None or self._cache.blocks.data_ptr() != kv_cache.data_ptr():
            self._cache = HostKvCache.over(
                layer.layer_name, kv_cache, self.num_kv_heads, block_size, self.head_size, self.cache_kind
            )
        return self._cache

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: HostAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:  # a dummy run: no cache, nothing to attend to
            return output.zero_()
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("moe_lightning does not support quantised attention output")
        yield_to_executor(
            AttentionRequest(
                query=query,
                key=key,
                value=value,
                output=output,
                cache=self.cache_over(layer, kv_cache, attn_metadata.block_size),
                rows=attn_metadata.rows,
                options=self.options,
            )
        )
        output[attn_metadata.num_actual_tokens :].zero_()  # padding rows, which no attention wrote
        return output

    def bring_sinks_to_host(self) -> None:
        """Once they are loaded, and before the first sweep, which would wait for the GPU at each layer."""
        if self.options.sinks is not None:
            self.options = replace(self.options, sinks=self.options.sinks.to("cpu", torch.float32))


class HostAttentionBackend(AttentionBackend):
    """Takes the place of CPU_ATTN on the CPU build, and is CUSTOM elsewhere."""

    forward_includes_kv_cache_update = True  # appending K and V is part of the host task
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *QUANTISED_TYPES]

    @staticmethod
    def get_name() -> str:
        return attention_backend().name

    @staticmethod
    def get_impl_cls() -> type[HostAttentionImpl]:
        return HostAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[HostAttentionMetadataBuilder]:
        return HostAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return PREFERRED_BLOCK_SIZE

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(supported_head_dims())

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)  # one contiguous piece of memory per layer, block by block

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """With the scales of a quantised cache, which vLLM leaves to the backend. Full caches are as vLLM counts."""
        kind = KIND_BY_MODE.get(spec.kv_quant_mode.name)
        if kind is None:
            return spec
        return replace(spec, state_content_bytes=2 * row_bytes(spec.head_size, spec.dtype.itemsize, kind))

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


def register_host_attention(*, is_used: bool) -> None:
    """Before the model is built, in the process that builds it. Idempotent. Not `is_used`: vLLM's own is, again."""
    backend = attention_backend()
    backend.clear_override()  # of an engine that was here before
    if not is_used:
        return
    register_backend(
        backend,
        f"{HostAttentionBackend.__module__}.{HostAttentionBackend.__qualname__}",
    )
