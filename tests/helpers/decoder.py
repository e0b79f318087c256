# SPDX-License-Identifier: Apache-2.0
"""The plain decoder of benchmarks/ under the engine and without it, over the same steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch

from benchmarks.decoder_engine import DecoderEngine, Sequences, Step, make_caches, no_attention, plain_step
from benchmarks.decoder_experts import Elsewhere, plain_experts
from benchmarks.torch_decoder import DecoderConfig, MoeDecoder, at_hand, reference_attention
from vllm_moe_lightning.config import parse_options
from vllm_moe_lightning.device import Device, EmulatedDevice
from vllm_moe_lightning.kv_cache_type import ElementKind

DEFAULT = DecoderConfig()
BLOCK_SIZE = 16
MAX_LEN = 64
NUM_SEQS = 8
# Query lengths per sequence: a prefill in which one sits out, decode beside prefill and a chunk, decode, decode.
STEPS: tuple[tuple[int, ...], ...] = ((5, 3, 17, 20, 1, 0, 2, 9), (1, 1, 1, 6, 1, 7, 1, 1), (1,) * 8, (1,) * 8)
DUMMY_TOKENS = torch.arange(6)
# Small pages, so that a layer of DecoderConfig's default sizes has several and the last is shorter.
PAGE_MIB = 8192 / 2**20


def steps_of(lens: Sequence[Sequence[int]] = STEPS, config: DecoderConfig = DEFAULT) -> Iterator[Step]:
    """The steps of one run, with tokens drawn at random."""
    sequences = Sequences(len(lens[0]), MAX_LEN, BLOCK_SIZE)
    rng = torch.Generator().manual_seed(1)
    for query_lens in lens:
        yield sequences.step(query_lens, torch.randint(0, config.vocab_size, (sum(query_lens),), generator=rng))


def make_engine(
    config: DecoderConfig = DEFAULT,
    *,
    device: dict[str, Any] | Device | None = None,
    kind: ElementKind | None = None,
    **options: Any,
) -> DecoderEngine:
    """`device`: one, or arguments of EmulatedDevice; `options`: moe_lightning's, of which experts="cpu" or "fetched"
    (expert_slots, fetched_up_to_tokens), prefill_attention="device" and prefill_context="link" move work. Close it, or
    use it as a context."""
    made = device if isinstance(device, Device) else EmulatedDevice(**(device or {}))
    num_blocks = NUM_SEQS * MAX_LEN // BLOCK_SIZE
    caches = make_caches(config, num_blocks, BLOCK_SIZE, device=made, kind=kind)
    return DecoderEngine(
        MoeDecoder(config), made, parse_options({"page_mib": PAGE_MIB, **options}), max_tokens=128, caches=caches
    )


def run(engine: DecoderEngine, lens: Sequence[Sequence[int]] = STEPS) -> list[torch.Tensor]:
    """Hidden states [T, H] of each step."""
    return [engine.step(step) for step in steps_of(lens, engine.model.config)]


def run_dummy(engine: DecoderEngine) -> torch.Tensor:
    return engine.dummy_step(DUMMY_TOKENS)


@cache
def plain_dummy(config: DecoderConfig = DEFAULT, experts: Elsewhere | None = None) -> torch.Tensor:
    model = MoeDecoder(config)
    elsewhere = at_hand if experts is None else plain_experts(model, experts)
    return model.forward(DUMMY_TOKENS, torch.arange(len(DUMMY_TOKENS)), no_attention, elsewhere=elsewhere)


@cache
def plain_run(
    config: DecoderConfig = DEFAULT,
    num_micro_batches: int = 1,
    lens: tuple[tuple[int, ...], ...] = STEPS,
    *,
    reference: bool = False,
    kind: ElementKind | None = None,
    experts: Elsewhere | None = None,
) -> list[torch.Tensor]:
    """The same without the engine: bit by bit what it must give, or (reference) in plain torch, up to rounding.

    experts: by the kernel of that place; fetched ones bit by bit if a micro-batch's experts have room all at once, else
    up to rounding (`all_close`)."""
    model = MoeDecoder(config)
    caches = make_caches(config, NUM_SEQS * MAX_LEN // BLOCK_SIZE, BLOCK_SIZE, kind=kind)
    attention = {"attention": reference_attention} if reference else {}
    return [
        plain_step(model, caches, step, num_micro_batches, experts=experts, **attention)
        for step in steps_of(lens, config)
    ]


def all_equal(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def all_close(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Up to rounding of float32: sums in another order."""
    return len(got) == len(expected) and all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(got, expected, strict=True)
    )
