"""vLLM's FlashAttention 2 for prompts on the device: all of a micro-batch in one call, windows without masks, and
context through a table of blocks. Not the third: on Hopper it reads whole pages, and what nobody wrote in them spoils
the output if it is NaN; nor the fourth, which is compiled at its first call with each shape, in the middle of serving.

Whether it is used is decided at start, by trying it against torch's kernels on the GPU at hand (`found_wrong`): its
binaries differ between builds and chips, and a convention of its arguments that changed would give wrong tokens and
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_moe_lightning.kernels.torch_attention import PagedRows
from vllm_moe_lightning.pipeline.attention import AttentionOptions
from vllm_moe_lightning.pipeline.device_prefill import DevicePrefill

FLASH_VERSION = 2
REMEMBERED_STEPS = 64  # micro-batches whose lengths are on the device already
PROMPTS = (1, 37, 300)  # tokens, of the trial
# (new tokens, of so many in all); of one token each, kernels may take another way.
CHUNKS = (((5, 133), (40, 40), (1, 600), (130, 450)), ((1, 30), (1, 300), (1, 77)))
TRIAL_WINDOW = 24
LARGEST_DIFFERENCE = 0.06  # of outputs of about 1, in bfloat16; a wrong mask makes it ten times as much


class FlashPrefill:
    """varlen: vLLM's flash_attn_varlen_func; to_device: without a wait of the host."""

    def __init__(self, varlen: Callable[..., Any], to_device: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._varlen = varlen
        self._to_device = to_device
        self._starts: dict[int, tuple[Sequence[int], torch.Tensor]] = {}

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lengths: Sequence[int],
        options: AttentionOptions,
    ) -> None:
        starts, longest = self._starts_of(lengths), max(lengths)
        self._run(
            options,
            q=query,
            k=key,
            v=value,
            out=output,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
        )

    def with_context(
        self,
        query: torch.Tensor,
        blocks: torch.Tensor,
        rows: PagedRows,
        output: torch.Tensor,
        options: AttentionOptions,
    ) -> None:
        at_once = rows.at_once
        self._run(
            options,
            q=query,
            k=blocks[:, :, 0].transpose(1, 2),  # [num_blocks, block_size, num_kv_heads, head_dim]
            v=blocks[:, :, 1].transpose(1, 2),
            out=output,
            cu_seqlens_q=at_once.query_start,
            seqused_k=at_once.seq_lens,
            block_table=at_once.block_table,
            max_seqlen_q=at_once.longest_query,
            max_seqlen_k=at_once.longest_seq,
        )

    def _run(self, options: AttentionOptions, **tensors: Any) -> None:
        # Keys before and behind that a query sees; -1: all, as far as `causal` lets it.
        window = [options.sliding_window - 1, 0] if options.sliding_window else [-1, -1]
        # In one split: more take memory that nobody counts, and make the result depend on the batch.
        self._varlen(
            **tensors,
            softmax_scale=options.scale,
            causal=True,
            window_size=window,
            num_splits=1,
            fa_version=FLASH_VERSION,
        )

    def _starts_of(self, lengths: Sequence[int]) -> torch.Tensor:
        """int32 [prompts + 1]. Made once per step: every layer asks with the same list."""
        known = self._starts.get(id(lengths))
        if known is not None and known[0] is lengths:
            return known[1]
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        starts[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
        if len(self._starts) >= REMEMBERED_STEPS:
            self._starts.clear()
        self._starts[id(lengths)] = (lengths, self._to_device(starts))
        return self._starts[id(lengths)][1]


@dataclass(frozen=True)
class LayerShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    options: AttentionOptions


def found_wrong(
    kernel: DevicePrefill,
    known: DevicePrefill,
    shape: LayerShape,
    to_device: Callable[[torch.Tensor], torch.Tensor],
) -> str | None:
    """What `kernel` does wrong, by `known`, on small prompts and chunks; what nobody wrote in a block is NaN. A window
    is tried as one smaller than these, and as one that holds all: those may be two kernels."""
    window = shape.options.sliding_window
    for tried in (min(window, TRIAL_WINDOW), window) if window else (0,):
        of_window = replace(shape, options=replace(shape.options, sliding_window=tried))
        trials: list[_Prompts | _Chunks] = [_Prompts(of_window, to_device)]
        trials += [_Chunks(of_window, chunks, to_device) for chunks in CHUNKS]
        for trial in trials:
            expected = trial.run(known)
            try:
                difference = float((trial.run(kernel).float() - expected.float()).abs().max())
            except (RuntimeError, AssertionError, AttributeError) as error:  # of kernels, and of vLLM around them
                return f"it fails ({error})"
            if not difference <= LARGEST_DIFFERENCE:  # NaN neither
                return f"its outputs for {trial.what} are off by {difference:.2g} from torch's"
    return None


class _Prompts:
    what = "prompts"

    def __init__(self, shape: LayerShape, to_device: Callable[[torch.Tensor], torch.Tensor]) -> None:
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        packed = _random(sum(PROMPTS), heads + 2 * kv_heads, shape, to_device)
        # Views, as in a model.
        self._query, self._key, self._value = packed.split([heads, kv_heads, kv_heads], dim=1)
        self._options = shape.options

    def run(self, kernel: DevicePrefill) -> torch.Tensor:
        output = torch.full_like(self._query, float("nan"), memory_format=torch.contiguous_format)
        kernel(self._query, self._key, self._value, output, PROMPTS, self._options)
        return output


class _Chunks:
    what = "prompts with context"

    def __init__(
        self,
        shape: LayerShape,
        chunks: Sequence[tuple[int, int]],
        to_device: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        block_size = shape.block_size
        blocks_of = [-(-length // block_size) for _, length in chunks]
        blocks = _random(sum(blocks_of) * block_size * 2, shape.num_kv_heads, shape, to_device)
        blocks = blocks.view(sum(blocks_of), block_size, 2, shape.num_kv_heads, shape.head_dim).permute(0, 3, 2, 1, 4)
        self._blocks = blocks.contiguous()
        table = torch.zeros(len(chunks), max(blocks_of), dtype=torch.int32)
        first = 0
        for row, (number, (_, length)) in enumerate(zip(blocks_of, chunks, strict=True)):
            table[row, :number] = torch.arange(first, first + number).flip(0)
            if length % block_size:
                self._blocks[int(table[row, number - 1]), :, :, length % block_size :] = float("nan")
            first += number
        new = [queries for queries, _ in chunks]
        self._rows = PagedRows.of(
            table,
            torch.tensor([0, *new], dtype=torch.int32).cumsum(0).to(torch.int32),
            torch.tensor([length for _, length in chunks], dtype=torch.int32),
            torch.full((sum(new),), -1),
            block_size,
            2 * shape.head_dim * self._blocks.element_size(),
            to_device,
        )
        self._query = _random(sum(new), shape.num_heads, shape, to_device)
        self._options = shape.options

    def run(self, kernel: DevicePrefill) -> torch.Tensor:
        output = torch.full_like(self._query, float("nan"))
        kernel.with_context(self._query, self._blocks, self._rows, output, self._options)
        return output


def _random(
    num_rows: int, num_heads: int, shape: LayerShape, to_device: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return to_device(torch.randn(num_rows, num_heads, shape.head_dim, generator=generator).to(shape.dtype))
