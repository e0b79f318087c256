"""The seam for micro-batches: stands in for the top-level model's `forward`, for both of vLLM's model runners.

Cuts a step into micro-batches, lets the executor run the unmodified forward once for each, and puts the hidden states
back in the step's order. Everything after (logits, sampling, bookkeeping) sees one batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import vllm.forward_context
from vllm.forward_context import create_forward_context, get_forward_context

from vllm_moe_lightning.engine_plan import plan_of
from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.integration.attention import HostAttentionMetadata
from vllm_moe_lightning.pipeline.batching import (
    MicroBatchSplitter,
    RowCosts,
    StepRows,
    micro_batch_count,
    token_ranges,
)
from vllm_moe_lightning.pipeline.executor import MicroBatch, PipelineExecutor
from vllm_moe_lightning.pipeline.expert_places import ALL_STREAMED, ExpertPlaces


@dataclass(frozen=True)
class _Share:
    """A micro-batch: which tokens of the step it computes (None: all, in order), and under which context."""

    tokens: torch.Tensor | None
    context: Any
    metadata: HostAttentionMetadata | None


@dataclass(frozen=True)
class ContextLimits:
    """Which rows with context the device attends to."""

    least_query_tokens: int
    """New tokens of a row from which on bringing its context up takes less time than attending on the CPU."""
    num_tokens: int
    """Of a frame, in whole blocks."""


class PipelinedForward:
    """Callable in place of `model.forward`."""

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config: Any,
        executor: PipelineExecutor,
        *,
        prefill_on_device: bool = False,
        context_limits: ContextLimits | None = None,
        expert_places: Callable[[int], ExpertPlaces] = lambda num_tokens: ALL_STREAMED,
    ) -> None:
        self._expert_places = expert_places
        self._forward = model.forward
        self._prefill_on_device = prefill_on_device
        self._context_limits = context_limits
        self._vllm_config = vllm_config
        self._executor = executor
        self._plan = plan_of(vllm_config)
        self._splitter = MicroBatchSplitter(RowCosts(self._plan.query_token_cost) if self._plan else RowCosts())
        # An instance attribute: the class stays as it is. A bound method, since vLLM caches what it finds out about
        # `forward` and unwraps only those; anything else it would keep, and with it the host pages, after our end.
        model.forward = self.__call__

    def __call__(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """input_ids, positions: [T]; T may exceed the step's tokens (padding). Returns hidden states [T, hidden]."""
        if intermediate_tensors is not None:
            raise UnsupportedError("moe_lightning does not support pipeline parallelism; drop --pipeline-parallel-size")
        outer = get_forward_context()
        metadata = outer.attn_metadata
        is_dummy = not (isinstance(metadata, dict) and metadata)
        if self._executor.policy.attention_on_device:  # the metadata is not ours, and cannot be cut
            shares = [_Share(None, outer, None)]
        else:
            shares = self._split_dummy(outer, positions) if is_dummy else self._split(outer, metadata)

        def body_of(share: _Share) -> Callable[[], torch.Tensor]:
            def body() -> torch.Tensor:
                def part(tensor: torch.Tensor | None) -> torch.Tensor | None:
                    return tensor if tensor is None or share.tokens is None else tensor[share.tokens]

                hidden = self._forward(part(input_ids), part(positions), None, part(inputs_embeds), **kwargs)
                if not isinstance(hidden, torch.Tensor):
                    raise UnsupportedError(f"the model's forward returned {type(hidden).__name__}, not hidden states")
                return hidden

            return body

        def enter(share: _Share) -> Callable[[], None]:
            def set_context() -> None:
                vllm.forward_context._forward_context = share.context

            return set_context

        micro_batches = [
            MicroBatch(
                body=body_of(share),
                enter=enter(share),
                rows=share.metadata.rows if share.metadata else None,
                num_tokens=positions.shape[-1] if share.tokens is None else len(share.tokens),
            )
            for share in shares
        ]
        experts = self._expert_places(positions.shape[-1])
        try:
            results = self._executor.run_sweep(micro_batches, is_dummy=is_dummy, experts=experts)
        finally:
            vllm.forward_context._forward_context = outer
        if shares[0].tokens is None:
            return results[0]
        num_tokens = positions.shape[-1]
        hidden = results[0].new_zeros((num_tokens, results[0].shape[-1]))
        for share, result in zip(shares, results, strict=True):
            hidden[share.tokens] = result
        return hidden

    def _split(self, outer: Any, metadata: dict[str, HostAttentionMetadata]) -> list[_Share]:
        first = next(iter(metadata.values()))
        counters = self._executor.counters
        occupied = [row for row, tokens in enumerate(first.query_lens) if tokens > 0]
        query_lens = [first.query_lens[row] for row in occupied]
        seq_lens = [first.seq_lens[row] for row in occupied]
        distinct = {id(entry): entry for entry in metadata.values()}  # one per KV cache group
        tables = [(entry.rows.block_table.numpy()[occupied], entry.block_size) for entry in distinct.values()]
        count = self._num_micro_batches(sum(query_lens))
        places, linked = self._splitter.split(StepRows(query_lens, seq_lens, tables), count)
        groups = [[occupied[i] for i in rows] for rows in places]
        counters.same_step_prefix_hits += bool(linked)
        counters.steps[f"{_kind(query_lens, seq_lens)} x{len(groups)}"] += 1
        at_once = {occupied[row] for row in linked}  # rows whose context is written in this very step
        prompts = self._prompts_for_the_device(first, occupied)
        with_context = [self._rows_with_context(first, rows, at_once) for rows in groups]
        if len(groups) == 1 and not prompts and not with_context[0]:
            return [_Share(None, outer, first)]
        shares = []
        for rows, context_rows in zip(groups, with_context, strict=True):
            on_device = [row for row in rows if row in prompts]
            attended = [row for row in rows if row not in prompts and row not in context_rows]
            tokens = _tokens_of(first, attended + context_rows + on_device)
            at_hand = self._executor.device.to_device(tokens)
            selected = {k: entry.select(attended, context_rows, on_device, tokens) for k, entry in distinct.items()}
            by_layer = {name: selected[id(entry)] for name, entry in metadata.items()}
            slots = {name: entry.rows.slot_mapping for name, entry in by_layer.items()}
            context = self._context_like(outer, by_layer, slots)
            shares.append(_Share(at_hand, context, next(iter(by_layer.values()))))
        return shares

    def _split_dummy(self, outer: Any, positions: torch.Tensor) -> list[_Share]:
        """vLLM tries at its start whether a step of the most tokens fits. No sweep computes that many at once: a
        micro-batch is an equal share of them, or a prompt that has all of the sweep's prefill tokens, for which memory
        is planned (memory_model.py)."""
        num_tokens = positions.shape[-1]
        longest_row = 1
        if self._plan is not None:
            prefill_tokens = self._plan.max_num_batched_tokens - self._plan.max_num_seqs
            longest_row = max(1, min(prefill_tokens, self._vllm_config.model_config.max_model_len))
        ranges = token_ranges(num_tokens, self._num_micro_batches(num_tokens), longest_row)
        if len(ranges) == 1:
            return [_Share(None, outer, None)]
        return [
            _Share(
                self._executor.device.to_device(torch.arange(begin, end)),
                self._context_like(outer, outer.attn_metadata, outer.slot_mapping),
                None,
            )
            for begin, end in ranges
        ]

    def _context_like(self, outer: Any, attn_metadata: Any, slot_mapping: dict[str, torch.Tensor]) -> Any:
        """One for each micro-batch: vLLM counts MoE layers in it as they run."""
        return create_forward_context(
            attn_metadata,
            self._vllm_config,
            dp_metadata=outer.dp_metadata,
            slot_mapping=slot_mapping,
            additional_kwargs=outer.additional_kwargs,
        )

    def _prompts_for_the_device(self, metadata: HostAttentionMetadata, rows: list[int]) -> set[int]:
        """Rows without context: all that they attend to is computed in this very step."""
        if not self._prefill_on_device or self._executor.policy.schedule == "s4":  # whose frames hold every row
            return set()
        return {row for row in rows if metadata.query_lens[row] == metadata.seq_lens[row]}

    def _rows_with_context(self, metadata: HostAttentionMetadata, rows: list[int], at_once: set[int]) -> list[int]:
        """Rows whose context comes up for the device, as many as a frame holds, those with most new tokens first."""
        limits = self._context_limits
        if limits is None or self._executor.policy.schedule == "s4":
            return []
        chosen, num_blocks = list[int](), 0
        for row in sorted(rows, key=lambda row: -metadata.query_lens[row]):
            query, seq = metadata.query_lens[row], metadata.seq_lens[row]
            blocks = -(-seq // metadata.block_size)
            is_worth_it = limits.least_query_tokens <= query < seq and row not in at_once
            if is_worth_it and (num_blocks + blocks) * metadata.block_size <= limits.num_tokens:
                chosen.append(row)
                num_blocks += blocks
        return sorted(chosen)

    def _num_micro_batches(self, num_tokens: int) -> int:
        """As planned, unless the count was changed since."""
        plan, most = self._plan, self._executor.policy.num_micro_batches
        is_planned = plan is not None and plan.num_micro_batches == most
        return micro_batch_count(num_tokens, most, plan.micro_batch_size if plan and is_planned else None)


def _tokens_of(metadata: HostAttentionMetadata, rows: list[int]) -> torch.Tensor:
    starts = metadata.rows.query_start.tolist()
    return torch.cat([torch.arange(starts[row], starts[row + 1]) for row in rows])


def _kind(query_lens: list[int], seq_lens: list[int]) -> str:
    """`decode`, `prefill` or `mixed`. A prompt of one token counts as prefill."""
    decoding = [query == 1 and seq > 1 for query, seq in zip(query_lens, seq_lens, strict=True)]
    return "decode" if all(decoding) else "mixed" if any(decoding) else "prefill"
