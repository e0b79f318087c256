"""What is asked for and how it is cut: the workload, the policy, and what one sweep over the layers carries."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from vllm_moe_lightning.prompt_cuts import READ_WHOLE, PromptCuts
from vllm_moe_lightning.rowwise import larger, smaller


@dataclass(frozen=True)
class KvBlocks:
    """How an engine lays out its KV cache. The default is the paper's: a token is a token."""

    tokens_per_block: int = 1
    unused_blocks: int = 0
    """Held back by the engine for itself: vLLM's null block."""
    least_usable_blocks: int = 0
    """Whatever the batch: what one sequence of the longest allowed length takes."""
    fixed_blocks: int | None = None
    """All of the cache, where the user has fixed it."""

    def blocks_of(self, num_tokens: float) -> float:
        """Of one sequence. Of a mean length too, which without blocks is not rounded."""
        return num_tokens if self.tokens_per_block == 1 else math.ceil(num_tokens / self.tokens_per_block)

    def num_blocks(self, num_seqs: float, context: float) -> float:
        """Of a cache that holds `num_seqs` sequences of `context` tokens each."""
        if self.fixed_blocks is not None:
            return self.fixed_blocks
        return larger(num_seqs * self.blocks_of(context), self.least_usable_blocks) + self.unused_blocks


@dataclass(frozen=True)
class SweepBuffers:
    """What an engine sizes its buffers for, if that is more than the steady state's sweep."""

    least_prefill_tokens: float = 0.0
    total_tokens: float | None = None
    """Decode and prefill tokens together, where they are fixed."""
    most_prefill_tokens: float | None = None
    """Of a sweep, where the user allows no more: longer prompts take several sweeps."""
    longest_sequence: float = 0.0
    """Tokens that one sequence may have, expected or not. 0: no more than is expected."""


@dataclass(frozen=True)
class Workload:
    """Many requests of one kind. Lengths in tokens."""

    prompt_len: float
    """Mean. For prompts padded to the longest, the longest."""
    gen_len: int
    prompt_len_max: int | None = None
    """Of the longest prompt; None: all are about as long as the mean."""
    kv: KvBlocks = KvBlocks()
    buffers: SweepBuffers | None = None
    """None: the steady state's own."""
    expert_slots: int = 0
    """Experts that have room on the device one by one, beside the slots of whole layers."""

    def __post_init__(self) -> None:
        if not self.prompt_len >= 1 or self.gen_len < 1:
            raise ValueError(f"prompt and generation need at least one token each, got {self}")
        if self.prompt_len_max is not None and self.prompt_len_max < self.prompt_len:
            raise ValueError(f"the longest prompt is shorter than the mean: {self}")

    @property
    def mean_decode_context(self) -> float:
        """Cached tokens that a decode step reads, averaged over the generation."""
        return self.prompt_len + self.gen_len / 2

    @property
    def final_context(self) -> float:
        return self.prompt_len + self.gen_len


@dataclass(frozen=True)
class HrmPolicy:
    """The paper's 6-tuple (N, mu, A_g, F_g, r_w, r_c) in the engine's terms."""

    micro_batch_size: int
    """Sequences of a micro-batch: mu."""
    num_micro_batches: int
    attention_on_gpu: bool = False
    """A_g: decode attention on the GPU, the context brought to it over the link."""
    ffn_on_gpu: bool = True
    """F_g: experts computed on the GPU. If not, those of layers that are not resident run on the CPU."""
    num_resident_layers: float = 0
    """MoE layers whose experts stay on the GPU. Whole in the engine; a fraction in relaxations and for the paper's
    r_w, which keeps some experts of every layer."""
    kv_gpu_ratio: float = 0.0
    """r_c: share of the KV cache on the GPU; only with attention there."""
    num_disk_layers: float = 0
    """MoE layers whose experts are read from disk every sweep, for want of host memory."""
    prefill_tokens_per_sweep: int | None = None
    """Most prompt tokens of a prefill sweep. None: the paper's prefill, all prompts of the batch in one sweep, a
    micro-batch's hidden states on the host while the others run."""
    lookahead: int = 2
    prompts_on_gpu: bool = True
    """Attention of prompts without cached context on the GPU, from the keys and values at hand. As attention_on_gpu
    where that is set."""
    context_query_tokens: int = 1
    """New tokens of a prompt's later chunk from which on the GPU attends to it, its cached context brought up over the
    link. 0: the CPU attends to all of them. Of no effect with attention_on_gpu."""

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1 or self.num_micro_batches < 1 or self.lookahead < 1:
            raise ValueError(f"micro-batch size, count and look-ahead must be at least 1: {self}")
        if not 0.0 <= self.kv_gpu_ratio <= 1.0:
            raise ValueError(f"kv_gpu_ratio must be in [0, 1], got {self.kv_gpu_ratio}")
        if self.kv_gpu_ratio and not self.attention_on_gpu:
            raise ValueError("KV on the GPU needs attention_on_gpu")
        if self.attention_on_gpu and not self.prompts_on_gpu:
            raise ValueError("prompts_on_gpu can't be off with attention_on_gpu, which is everybody's")
        if self.context_query_tokens < 0:
            raise ValueError(f"context_query_tokens can't be negative, got {self.context_query_tokens}")
        if self.num_resident_layers < 0 or self.num_disk_layers < 0:
            raise ValueError(f"layer counts can't be negative: {self}")
        if self.prefill_tokens_per_sweep is not None and self.prefill_tokens_per_sweep < 1:
            raise ValueError(f"prefill_tokens_per_sweep must be positive, got {self.prefill_tokens_per_sweep}")

    @property
    def batch_size(self) -> int:
        """N, sequences of all micro-batches."""
        return self.micro_batch_size * self.num_micro_batches


@dataclass(frozen=True)
class SweepLoad:
    """What one sweep, or one micro-batch of it, carries. Averages, so not whole numbers."""

    decode_seqs: float = 0.0
    """Sequences that each get one new token."""
    decode_context: float = 0.0
    """Cached tokens that each of them reads, on average."""
    prefill_seqs: float = 0.0
    prefill_len: float = 0.0
    prefill_cuts: PromptCuts = READ_WHOLE

    @property
    def prefill_tokens(self) -> float:
        return self.prefill_seqs * self.prefill_len

    @property
    def decodes(self) -> bool:
        """Whether there are decode tokens at all: such a sequence has a context."""
        return self.decode_context > 0

    @property
    def tokens(self) -> float:
        return self.decode_seqs + self.prefill_tokens

    @property
    def seqs(self) -> float:
        """Rows of logits: each sequence samples one token."""
        return self.decode_seqs + self.prefill_seqs

    def divided(self, parts: float) -> SweepLoad:
        """One of `parts` equal shares."""
        return replace(self, decode_seqs=self.decode_seqs / parts, prefill_seqs=self.prefill_seqs / parts)


def decode_load(workload: Workload, policy: HrmPolicy) -> SweepLoad:
    """A decode sweep half-way through the generation."""
    return SweepLoad(decode_seqs=policy.batch_size, decode_context=workload.mean_decode_context)


def num_prefill_sweeps(workload: Workload, policy: HrmPolicy) -> float:
    """Sweeps that the prompts of a static batch take; not rounded, since batches follow each other."""
    if policy.prefill_tokens_per_sweep is None:
        return 1.0
    return larger(policy.batch_size * workload.prompt_len / policy.prefill_tokens_per_sweep, 1.0)


def prefill_load(workload: Workload, policy: HrmPolicy) -> SweepLoad:
    seqs = policy.batch_size / num_prefill_sweeps(workload, policy)
    chunks = larger(workload.prompt_len / (policy.prefill_tokens_per_sweep or workload.prompt_len), 1.0)
    cuts = PromptCuts.equal(workload.prompt_len, chunks)
    return SweepLoad(prefill_seqs=seqs, prefill_len=workload.prompt_len, prefill_cuts=cuts)


def steady_load(workload: Workload, policy: HrmPolicy) -> SweepLoad:
    """A sweep of continuous batching with all N slots taken: in gen_len sweeps every slot turns over once, so each
    sweep prefills N / gen_len prompts (which gives their first token) and decodes the rest."""
    starting = policy.batch_size / workload.gen_len
    chunks = larger(workload.prompt_len / _prefill_room(workload, policy), 1.0)
    return SweepLoad(
        decode_seqs=policy.batch_size - starting,
        decode_context=workload.mean_decode_context if workload.gen_len > 1 else 0.0,
        prefill_seqs=starting,
        prefill_len=workload.prompt_len,
        prefill_cuts=PromptCuts.equal(workload.prompt_len, chunks),
    )


def _prefill_room(workload: Workload, policy: HrmPolicy) -> float:
    """Prompt tokens that fit a sweep of continuous batching; without buffers of a given size, any prompt."""
    if workload.buffers is None:
        return workload.prompt_len
    room = larger(_buffered_prefill(workload, workload.buffers, policy), 1.0)
    most = workload.buffers.most_prefill_tokens
    return room if most is None else smaller(room, most)


def _buffered_prefill(workload: Workload, buffers: SweepBuffers, policy: HrmPolicy) -> float:
    """Prompt tokens that buffers are there for, beside a decode token of every slot."""
    if buffers.total_tokens is not None:
        return larger(buffers.total_tokens - policy.batch_size, 0.0)
    return larger(policy.batch_size * workload.prompt_len / workload.gen_len, buffers.least_prefill_tokens)


def buffered_load(workload: Workload, policy: HrmPolicy) -> SweepLoad:
    """The largest sweep that buffers are there for, in continuous batching: a decode token of every slot, and prefill
    tokens beside them."""
    steady, buffers = steady_load(workload, policy), workload.buffers
    if buffers is None:
        return steady
    prefill = _buffered_prefill(workload, buffers, policy)
    return SweepLoad(policy.batch_size, steady.decode_context, prefill / workload.prompt_len, workload.prompt_len)
