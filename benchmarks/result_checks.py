"""The engine's results on a device against plain torch on the CPU: a small decoder over prefill, mixed and decode
steps, under every schedule, and with attention and experts in every place that there is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch

from benchmarks.check_run import CheckRun
from benchmarks.decoder_engine import DecoderEngine, Sequences, Step, make_caches, plain_step, reference_attention
from benchmarks.fp64_checks import token_error
from benchmarks.gpu_device import DeviceKind, half_types, make_device
from benchmarks.torch_decoder import DecoderConfig, MatrixDrawer, MoeDecoder
from vllm_moe_lightning.config import parse_options
from vllm_moe_lightning.device.base import Device
from vllm_moe_lightning.hardware import MIB
from vllm_moe_lightning.pipeline.schedule import SCHEDULE_NAMES

MAX_LEN, BLOCK_SIZE, NUM_MICRO_BATCHES = 64, 16, 3
# Query lengths of each sequence: prefill, decode beside a chunk, decode.
STEPS = ((5, 3, 17, 20, 1, 2, 9), (1, 1, 1, 6, 7, 1, 1), (1,) * 7, (1,) * 7)
MAX_TOKENS, DEVICE_BYTES = 128, 64 * MIB
# Plain torch sums in another order than the engine's kernels: error of hidden states after all layers.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

PLACES: dict[str, dict[str, Any]] = {
    "cgopipe, prompts on the device": {"prefill_attention": "device"},
    "cgopipe, context on the device": {"prefill_context": "link"},
    "cgopipe, prompts and context on the device": {"prefill_attention": "device", "prefill_context": "link"},
    "cgopipe, experts on the CPU": {"experts": "cpu"},
    # Of 16: half of them are there, and each has had to go.
    "cgopipe, experts fetched": {"experts": "fetched", "expert_slots": 8},
    # With fewer slots than a micro-batch asks for experts: they come in waves.
    "cgopipe, experts fetched in waves": {"experts": "fetched", "expert_slots": 2},
}
PAGEABLE = "cgopipe, weights in pageable memory"
PAGEABLE_FROM_BYTES = MIB // 4  # a layer's experts have more, the staging of a step less


def result_checks(kind: DeviceKind, run: CheckRun) -> None:
    """Each case by itself."""
    for dtype in [torch.float32, *(half_types(kind) if kind is DeviceKind.CUDA else [])]:
        cases: dict[str, dict[str, Any]] = {name: {"schedule": name} for name in SCHEDULE_NAMES} | PLACES
        if dtype == torch.float32 and kind is DeviceKind.CUDA:  # of which the Triton kernel has none
            cases = {name: options for name, options in cases.items() if options.get("experts") != "fetched"}
        of_cuda: dict[str, dict[str, Any]] = {}
        if kind is DeviceKind.CUDA:
            cases[PAGEABLE] = {}
            of_cuda[PAGEABLE] = {"host_memory": "pageable", "pageable_from_bytes": PAGEABLE_FROM_BYTES}
        for name, options in cases.items():

            def error_of(
                dtype: torch.dtype = dtype,
                options: Mapping[str, Any] = options,
                more: Mapping[str, Any] = of_cuda.get(name, {}),
            ) -> float:
                return decoder_error(make_device(kind, DEVICE_BYTES, **more), dtype, options)

            run.check("results", f"{name} {dtype}", error_of, TOLERANCE[dtype])


def small_config(dtype: torch.dtype) -> DecoderConfig:
    return DecoderConfig(
        num_layers=4, hidden=128, intermediate=192, num_heads=4, num_kv_heads=2, head_dim=32, dtype=dtype
    )


def steps_of(config: DecoderConfig) -> Iterator[Step]:
    sequences = Sequences(len(STEPS[0]), MAX_LEN, BLOCK_SIZE)
    rng = torch.Generator().manual_seed(1)
    for lens in STEPS:
        yield sequences.step(lens, torch.randint(0, config.vocab_size, (sum(lens),), generator=rng))


def small_engine(device: Device, dtype: torch.dtype, options: Mapping[str, Any]) -> DecoderEngine:
    """options: moe_lightning's."""
    config = small_config(dtype)
    rng = torch.Generator().manual_seed(config.seed)
    draw = MatrixDrawer(config, rng, device.torch_device), MatrixDrawer(config, rng)
    caches = make_caches(config, len(STEPS[0]) * MAX_LEN // BLOCK_SIZE, BLOCK_SIZE, device=device)
    parsed = parse_options(
        {"num_micro_batches": NUM_MICRO_BATCHES, "page_mib": 0.25, "attention_threads": 2, **options}
    )
    return DecoderEngine(MoeDecoder(config, *draw), device, parsed, max_tokens=MAX_TOKENS, caches=caches)


def decoder_error(device: Device, dtype: torch.dtype, options: Mapping[str, Any]) -> float:
    """Of the hidden states of all steps (`token_error`). Closes the device."""
    try:
        with small_engine(device, dtype, options) as engine:
            got = [engine.step(step).cpu() for step in steps_of(engine.model.config)]
        return token_error(torch.cat(got), _expected(dtype))
    finally:  # also where the engine was not even made
        device.close()


@cache
def _expected(dtype: torch.dtype) -> torch.Tensor:
    """[T, H]: hidden states of all steps."""
    config = small_config(dtype)
    plain, caches = MoeDecoder(config), make_caches(config, len(STEPS[0]) * MAX_LEN // BLOCK_SIZE, BLOCK_SIZE)
    steps = [plain_step(plain, caches, step, attention=reference_attention) for step in steps_of(config)]
    return torch.cat(steps)
