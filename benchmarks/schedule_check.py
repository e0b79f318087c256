"""A schedule's results on a device against plain torch: a small decoder over prefill, mixed and decode steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.decoder_engine import DecoderEngine, Sequences, Step, make_caches, plain_step, reference_attention
from benchmarks.fp64_checks import token_error
from benchmarks.torch_decoder import DecoderConfig, MatrixDrawer, MoeDecoder
from vllm_moe_lightning.config import ScheduleName, parse_options
from vllm_moe_lightning.device.base import Device

MAX_LEN, BLOCK_SIZE, NUM_MICRO_BATCHES = 64, 16, 3
# Query lengths of each sequence: prefill, decode beside a chunk, decode.
STEPS = ((5, 3, 17, 20, 1, 2, 9), (1, 1, 1, 6, 7, 1, 1), (1,) * 7, (1,) * 7)


def steps_of(config: DecoderConfig) -> Iterator[Step]:
    sequences = Sequences(len(STEPS[0]), MAX_LEN, BLOCK_SIZE)
    rng = torch.Generator().manual_seed(1)
    for lens in STEPS:
        yield sequences.step(lens, torch.randint(0, config.vocab_size, (sum(lens),), generator=rng))


def schedule_error(device: Device, schedule: ScheduleName, dtype: torch.dtype) -> float:
    """Of the hidden states of all steps (`token_error`). Closes the device."""
    config = DecoderConfig(
        num_layers=4, hidden=128, intermediate=192, num_heads=4, num_kv_heads=2, head_dim=32, dtype=dtype
    )
    num_blocks = len(STEPS[0]) * MAX_LEN // BLOCK_SIZE
    rng = torch.Generator().manual_seed(config.seed)
    draw = MatrixDrawer(config, rng, device.torch_device), MatrixDrawer(config, rng)
    caches = make_caches(config, num_blocks, BLOCK_SIZE, device=device)
    options = parse_options(
        {"schedule": schedule, "num_micro_batches": NUM_MICRO_BATCHES, "page_mib": 0.25, "attention_threads": 2}
    )
    with DecoderEngine(MoeDecoder(config, *draw), device, options, max_tokens=128, caches=caches) as engine:
        got = [engine.step(step).cpu() for step in steps_of(config)]
    plain, plain_caches = MoeDecoder(config), make_caches(config, num_blocks, BLOCK_SIZE)
    expected = [plain_step(plain, plain_caches, step, attention=reference_attention) for step in steps_of(config)]
    return token_error(torch.cat(got), torch.cat(expected))
