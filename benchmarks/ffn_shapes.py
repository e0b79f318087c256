"""The expert layers that benchmarks/cpu_ffn.py measures, and with how many tokens of each expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_moe_lightning.host_limits import usable_cpus

# Up to here an expert's weights take longer to read than to multiply with, on a CPU with matrix or dot product units.
STREAMED_TOKENS = (1, 2, 4, 8, 16)
GEMM_TOKENS = (32, 128, 256)
MEMORY, HUGE_PAGES = "memory", "huge pages"


@dataclass(frozen=True)
class Shape:
    """The experts of one layer; all of them get the same number of tokens."""

    name: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def params(self) -> int:
        return 3 * self.num_experts * self.hidden_size * self.intermediate_size

    @property
    def weight_bytes(self) -> int:
        return self.params * self.dtype.itemsize

    def num_tokens(self, tokens_per_expert: int) -> int:
        tokens, rest = divmod(self.num_experts * tokens_per_expert, self.top_k)
        if rest:
            raise ValueError(f"{self}: {tokens_per_expert} tokens of each expert are no whole number of tokens")
        return tokens

    def flops(self, tokens_per_expert: int) -> float:
        return 2.0 * self.params * tokens_per_expert


@dataclass(frozen=True)
class Setting:
    group: str
    shape: Shape
    tokens_per_expert: tuple[int, ...]
    thread_counts: tuple[int, ...]


# A few of Mixtral-8x7B's experts, and half of Qwen3-30B-A3B's.
MIXTRAL = Shape("mixtral", num_experts=4, hidden_size=4096, intermediate_size=14336, top_k=2)
QWEN3 = Shape("qwen3", num_experts=64, hidden_size=2048, intermediate_size=768, top_k=8)


def thread_counts() -> tuple[int, ...]:
    return tuple(sorted({1, usable_cpus()}))


def full_settings() -> list[Setting]:
    all_tokens = (*STREAMED_TOKENS, *GEMM_TOKENS)
    return [
        *(Setting(MEMORY, shape, all_tokens, thread_counts()) for shape in (MIXTRAL, QWEN3)),
        Setting(HUGE_PAGES, MIXTRAL, STREAMED_TOKENS, thread_counts()),
    ]


def quick_settings() -> list[Setting]:
    return [Setting(group, QWEN3, (1, 8, 16, 128), thread_counts()) for group in (MEMORY, HUGE_PAGES)]
