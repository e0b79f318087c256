"""What the user fixes of a plan, and how the batch is run; None leaves a choice to the planner."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

LARGEST_NUM_MICRO_BATCHES = 64  # the engine's own limit, config.py


class Batching(StrEnum):
    STATIC = "static"
    """The paper's: a batch is prefilled, then decoded to its end. Tokens per second of the whole job."""
    CONTINUOUS = "continuous"
    """Steady state: finished sequences are replaced, so that each sweep carries prefill and decode."""


@dataclass(frozen=True)
class PlanLimits:
    """What the user fixes; None leaves the choice to the planner."""

    batching: Batching = Batching.CONTINUOUS
    max_num_seqs: int | None = None
    fill_max_num_seqs: bool = False
    """max_num_seqs is the batch itself, not a bound: only the cut into micro-batches is left (a count that does not
    divide it plans with the next lower multiple)."""
    micro_batch_size: int | None = None
    num_micro_batches: int | None = None
    num_resident_layers: int | None = None
    attention_on_gpu: bool | None = None
    ffn_on_gpu: bool | None = None
    kv_on_host: bool = False
    """All of the KV cache, wherever attention runs."""
    kv_on_device: bool = False
    """All of the KV cache, with attention on the GPU, as vLLM's own backends have it."""
    prefill_tokens_per_sweep: int | None = None
    lookahead: int = 2
    prompts_on_gpu: bool = True
    """Of prompts without cached context, where decode attention is on the CPU. No choice of the planner's."""
    context_query_tokens: int = 1
    """HrmPolicy's; likewise."""
    time_limit_s: float = 10.0

    def __post_init__(self) -> None:
        counts = ("max_num_seqs", "micro_batch_size", "num_micro_batches", "prefill_tokens_per_sweep", "lookahead")
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.fill_max_num_seqs and (self.max_num_seqs is None or self.micro_batch_size is not None):
            raise ValueError("fill_max_num_seqs needs max_num_seqs, and leaves no choice of micro_batch_size")
        if self.kv_on_device and (self.kv_on_host or self.attention_on_gpu is not True):
            raise ValueError("kv_on_device needs attention_on_gpu, and excludes kv_on_host")
        if not 0.0 < self.time_limit_s < float("inf"):
            raise ValueError(f"time_limit_s must be positive, got {self.time_limit_s}")
        if self.num_micro_batches is not None and self.num_micro_batches > LARGEST_NUM_MICRO_BATCHES:
            raise ValueError(
                f"num_micro_batches: {self.num_micro_batches} is more than the engine's {LARGEST_NUM_MICRO_BATCHES}"
            )
        smallest_batch = (self.micro_batch_size or 1) * (self.num_micro_batches or 1)
        if self.max_num_seqs is not None and smallest_batch > self.max_num_seqs:
            raise ValueError(
                f"micro_batch_size x num_micro_batches is at least {smallest_batch}, over max_num_seqs "
                f"{self.max_num_seqs}; raise the limit or lower the batch"
            )
