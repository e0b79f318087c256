"""The engine around the plain decoder (torch_decoder.py): sequences, steps, and all the parts put together.

What integration/ does inside vLLM, in its shortest form: cut a step into micro-batches, run a sweep, put the hidden
states back in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import torch

from benchmarks.decoder_experts import Elsewhere, experts_elsewhere, fetched_experts, host_experts, plain_experts
from benchmarks.torch_decoder import (
    Attend,
    DecoderConfig,
    MoeDecoder,
    at_hand,
    kernel_attention,
    reference_attention,
)
from vllm_moe_lightning.config import ExpertsPlace, MoeLightningConfig
from vllm_moe_lightning.device.base import Device
from vllm_moe_lightning.kernels.attention import AttentionPool
from vllm_moe_lightning.kv_cache import HostKvCache
from vllm_moe_lightning.kv_cache_type import ElementKind, row_bytes
from vllm_moe_lightning.pipeline.attention import AttentionRequest, AttentionRows
from vllm_moe_lightning.pipeline.attention_path import AttentionPath, CpuAttentionPath
from vllm_moe_lightning.pipeline.batching import balanced_micro_batches
from vllm_moe_lightning.pipeline.context_frames import ContextFrames
from vllm_moe_lightning.pipeline.coroutine import yield_to_executor
from vllm_moe_lightning.pipeline.device_attention import DeviceAttentionPath
from vllm_moe_lightning.pipeline.device_prefill import TorchPrefill
from vllm_moe_lightning.pipeline.executor import MicroBatch, PipelineExecutor
from vllm_moe_lightning.pipeline.expert_places import ALL_STREAMED, ExpertPlaces
from vllm_moe_lightning.pipeline.faults import attention_fault
from vllm_moe_lightning.pipeline.host_attention import HostAttention
from vllm_moe_lightning.policy.policy import fixed_policy
from vllm_moe_lightning.weights.store import PagedWeightStore

LEAST_CONTEXT_QUERY = 2
"""Tokens from which on a row's context comes up for the device, where that is asked for: any chunk, no decode."""


@dataclass(frozen=True)
class Step:
    """Rows that take part in one step. S rows, T tokens."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]  # new tokens included
    rows: AttentionRows

    def groups(self, num_micro_batches: int) -> list[list[int]]:
        return balanced_micro_batches(self.query_lens, self.seq_lens, num_micro_batches)

    def select(
        self, rows: Sequence[int], with_context: Sequence[int] = (), on_device: Sequence[int] = ()
    ) -> tuple[torch.Tensor, AttentionRows]:
        """Some rows' tokens (indices into the step), and their part of the metadata: those that the CPU attends to,
        then those that the device does."""
        parts = [self._part(group) for group in (rows, with_context, on_device)]
        (_, attended), (_, brought_up), (_, prompts) = parts
        return torch.cat([tokens for tokens, _ in parts]), replace(
            attended,
            with_context=brought_up if with_context else None,
            on_device=prompts if on_device else None,
        )

    def _part(self, rows: Sequence[int]) -> tuple[torch.Tensor, AttentionRows]:
        starts = self.rows.query_start.tolist()
        index = torch.tensor(rows, dtype=torch.int64)
        tokens = torch.cat([torch.arange(0), *(torch.arange(starts[row], starts[row + 1]) for row in rows)])
        return tokens, AttentionRows(
            block_table=self.rows.block_table[index],
            query_start=_starts([self.query_lens[row] for row in rows]),
            seq_lens=self.rows.seq_lens[index],
            slot_mapping=self.rows.slot_mapping[tokens],
        )


def _starts(query_lens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0).to(torch.int32)


class Sequences:
    """Sequences that grow step by step, each over its own blocks, dealt out at random as a block manager would; seed
    None: in order."""

    def __init__(self, num_seqs: int, max_len: int, block_size: int = 16, seed: int | None = 0) -> None:
        self.block_size = block_size
        blocks_per_seq = -(-max_len // block_size)
        self.num_blocks = num_seqs * blocks_per_seq
        dealt = torch.arange(self.num_blocks)
        if seed is not None:
            dealt = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(seed))
        self._block_table = dealt.to(torch.int32).view(num_seqs, blocks_per_seq)
        self.lens = [0] * num_seqs

    def step(self, query_lens: Sequence[int], token_ids: torch.Tensor) -> Step:
        """Appends query_lens[i] tokens to sequence i; 0: it sits this step out. token_ids: [sum(query_lens)]"""
        taking_part = [row for row, length in enumerate(query_lens) if length]
        lens = tuple(query_lens[row] for row in taking_part)
        positions = torch.cat([torch.arange(self.lens[row], self.lens[row] + query_lens[row]) for row in taking_part])
        for row in taking_part:
            self.lens[row] += query_lens[row]
        seq_lens = tuple(self.lens[row] for row in taking_part)
        table = self._block_table[taking_part]
        row_of_token = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))
        blocks = table[row_of_token, positions // self.block_size].long()
        rows = AttentionRows(
            block_table=table,
            query_start=_starts(lens),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            slot_mapping=blocks * self.block_size + positions % self.block_size,
        )
        return Step(token_ids, positions, lens, seq_lens, rows)


def make_caches(
    config: DecoderConfig,
    num_blocks: int,
    block_size: int,
    *,
    device: Device | None = None,
    kind: ElementKind | None = None,
) -> list[HostKvCache]:
    """One host cache per layer, in the device's host memory if it is for one; NaN bytes under its poison, so that a
    read of a row nobody wrote shows."""
    num_rows = 2 * num_blocks * block_size * config.num_kv_heads
    num_bytes = num_rows * row_bytes(config.head_dim, config.dtype.itemsize, kind)
    caches = []
    for layer in range(config.num_layers):
        if device is None:
            memory = torch.zeros(num_bytes, dtype=torch.uint8)
        else:
            memory = device.allocate_host(num_bytes, f"keys and values of layer {layer}").tensor
            if device.poison:
                memory.fill_(0xFF)
        sizes = (config.num_kv_heads, block_size, config.head_dim)
        caches.append(HostKvCache.over(f"layer{layer}", memory.view(config.dtype), *sizes, kind))
    return caches


class DecoderEngine:
    """Device, store, attention, experts and executor for one model. Takes over the model's experts; closes the device.

    max_tokens: most tokens of a step; caches: one per layer (`make_caches`). Of the options count those of the
    schedule, and: experts (place_experts), prefill_attention "device", prefill_context "link"; what they leave to a
    plan is on the CPU.
    """

    def __init__(
        self,
        model: MoeDecoder,
        device: Device,
        options: MoeLightningConfig,
        *,
        max_tokens: int,
        caches: Sequence[HostKvCache],
        attention_cpus: Sequence[int] = (),
    ) -> None:
        self.model, self.device = model, device
        config, experts = model.config, model.expert_layers()
        self.policy = fixed_policy(options, [layer.num_bytes for layer in experts])
        self.store = PagedWeightStore(experts, self.policy, device)
        self.caches = caches
        self.pool = AttentionPool(options.attention_threads or 1, attention_cpus)
        self._max_tokens = max_tokens
        self._prefills_on_device = options.prefill_attention == "device"
        self._brings_up_context = options.prefill_context == "link"
        host = HostAttention(
            device,
            self.pool,
            max_tokens,
            config.qkv_bytes_per_token,
            attention_fault(options.debug),
            TorchPrefill() if self._prefills_on_device else None,
            # Of all blocks, so that they never grow while a copy into them is under way.
            ContextFrames(device, self._cache_of, len(caches[0].blocks) * caches[0].block_size)
            if self._brings_up_context
            else None,
        )
        self._cpu_path = CpuAttentionPath(host, self._cache_of)
        self._device_path = DeviceAttentionPath(host, device, self._cache_of)
        self.executor = PipelineExecutor(
            device, self.store, self._path_for, config.num_layers, self.policy, options.debug.remove_wait
        )
        self.expert_places = ALL_STREAMED
        """Of sweeps of up to `fetched_up_to_tokens` tokens; may be set between sweeps."""
        self._fetched_up_to_tokens = options.fetched_up_to_tokens
        self.place_experts(options.experts, options.expert_slots)

    def place_experts(self, place: ExpertsPlace, expert_slots: int | None = None) -> None:
        """Of all streamed layers, from the next sweep on. What a place needs is made when it is first asked for.

        expert_slots: with "fetched", how many experts have room on the device; None: as many as a layer has.
        Raises ValueError for "auto", which takes a plan.
        """
        executor, config, layers = self.executor, self.model.config, frozenset(self.store.layers)
        match place:
            case "device":
                self.expert_places = ALL_STREAMED
            case "cpu":
                if executor.host_experts is None:
                    executor.host_experts = host_experts(executor, config, self.pool, self._max_tokens)
                self.expert_places = ExpertPlaces(on_cpu=layers)
            case "fetched":
                if executor.fetched_experts is None:
                    executor.fetched_experts = fetched_experts(executor, config, self._max_tokens, expert_slots)
                have = executor.fetched_experts.residency.num_slots
                if expert_slots not in (None, have):
                    raise ValueError(f"expert_slots: {expert_slots}, but there are {have} since the first call")
                self.expert_places = ExpertPlaces(fetched=layers)
            case _:
                raise ValueError(f"experts: {place!r} takes a plan, which the plain decoder has none of; name a place")

    def _cache_of(self, layer: int) -> HostKvCache:
        return self.caches[layer]

    def _places(self, num_tokens: int) -> ExpertPlaces:
        most = self._fetched_up_to_tokens
        return self.expert_places if most is None or num_tokens <= most else ALL_STREAMED

    def _path_for(self, schedule: str) -> AttentionPath:
        return self._device_path if schedule == "s4" else self._cpu_path

    def _attend(self, rows: AttentionRows) -> Attend:
        options = self.model.config.options

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            output = torch.empty_like(query)
            yield_to_executor(AttentionRequest(query, key, value, output, self.caches[layer], rows, options))
            return output

        return attend

    def step(self, step: Step) -> torch.Tensor:
        """Hidden states [T, H] of the step's tokens."""
        groups = step.groups(self.executor.policy.num_micro_batches)
        shares = [step.select(*self._by_place(step, rows)) for rows in groups]
        elsewhere = experts_elsewhere(self.executor)

        def body_of(tokens: torch.Tensor, rows: AttentionRows) -> Callable[[], torch.Tensor]:
            ids, positions = (self.device.to_device(each[tokens]) for each in (step.token_ids, step.positions))
            return lambda: self.model.forward(ids, positions, self._attend(rows), self.executor.layer_entry, elsewhere)

        results = self.executor.run_sweep(
            [MicroBatch(body_of(tokens, rows), rows, num_tokens=len(tokens)) for tokens, rows in shares],
            experts=self._places(len(step.token_ids)),
        )
        hidden = results[0].new_empty((len(step.token_ids), results[0].shape[-1]))
        for (tokens, _), result in zip(shares, results, strict=True):
            hidden[self.device.to_device(tokens)] = result
        return hidden

    def _by_place(self, step: Step, rows: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """Rows that the CPU attends to, the device over context that comes up, the device over what is at hand."""
        on_cpu, with_context, prompts = list[int](), list[int](), list[int]()
        attends_by_row = self.executor.policy.schedule != "s4"  # whose frames hold every row
        for row in rows:
            query, seq = step.query_lens[row], step.seq_lens[row]
            if attends_by_row and self._prefills_on_device and query == seq:
                prompts.append(row)
            elif attends_by_row and self._brings_up_context and LEAST_CONTEXT_QUERY <= query < seq:
                with_context.append(row)
            else:
                on_cpu.append(row)
        return on_cpu, with_context, prompts

    def dummy_step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """A sweep without attention, as vLLM's warm-up does it."""
        positions, elsewhere = torch.arange(len(token_ids)), experts_elsewhere(self.executor)

        def forward() -> torch.Tensor:
            return self.model.forward(token_ids, positions, no_attention, self.executor.layer_entry, elsewhere)

        [hidden] = self.executor.run_sweep(
            [MicroBatch(forward, None, num_tokens=len(token_ids))], is_dummy=True, experts=self._places(len(token_ids))
        )
        return hidden

    def release_device_context(self) -> None:
        """Gives back what S4 keeps on the device between sweeps. The caller has synchronised the device."""
        self._device_path.release_frames()

    def close(self) -> None:
        self.device.close()
        if not self.device.stalled:
            self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def no_attention(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(query)


def plain_step(
    model: MoeDecoder,
    caches: Sequence[HostKvCache],
    step: Step,
    num_micro_batches: int = 1,
    *,
    attention: Callable[[DecoderConfig, Sequence[HostKvCache], AttentionRows], Attend] = kernel_attention,
    experts: Elsewhere | None = None,
) -> torch.Tensor:
    """The same step without the engine. Matrix products round differently for other numbers of rows, so a bit-exact
    comparison needs the engine's micro-batches and its kernels (`experts`: those of that place); `reference_attention`
    and one micro-batch need neither.
    """
    elsewhere = at_hand if experts is None else plain_experts(model, experts)
    hidden = torch.empty(len(step.token_ids), model.config.hidden, dtype=model.config.dtype)
    for rows in step.groups(num_micro_batches):
        tokens, selected = step.select(rows)
        attend = attention(model.config, caches, selected)
        hidden[tokens] = model.forward(step.token_ids[tokens], step.positions[tokens], attend, elsewhere=elsewhere)
    return hidden


__all__ = [
    "DecoderEngine",
    "Sequences",
    "Step",
    "make_caches",
    "plain_step",
    "reference_attention",
]
