"""What a policy takes of both memories, by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_moe_lightning.attention_memory import CONTEXT_FRAME_BYTES, PROMPT_ATTENTION_BYTES
from vllm_moe_lightning.hardware_presets import preset_profile
from vllm_moe_lightning.memory_model import gpu_memory, host_memory
from vllm_moe_lightning.model_config import read_model_spec
from vllm_moe_lightning.workload import (
    HrmPolicy,
    SweepBuffers,
    Workload,
    buffered_load,
    decode_load,
    prefill_load,
)

MIXTRAL = read_model_spec(Path(__file__).parent / "model_configs" / "mixtral-8x7b.json")
L4 = preset_profile("l4")
MTBENCH = Workload(77, 128)


def test_memory_of_mixtral_on_an_l4_by_hand() -> None:
    policy = HrmPolicy(64, 10, num_resident_layers=3, prefill_tokens_per_sweep=20_000)
    peak = prefill_load(MTBENCH, policy)
    need = gpu_memory(MIXTRAL, L4, MTBENCH, policy, peak)
    layer = MIXTRAL.expert_layer_bytes
    assert need.items["resident experts"] == 3 * layer
    assert need.items["slots of streamed experts"] == 2 * layer
    tokens = peak.prefill_tokens
    assert tokens <= 20_000
    assert need.items["hidden states"] == pytest.approx(tokens * 4096 * 2 * 2)
    assert need.fits == (need.total_bytes <= 0.9 * L4.gpu.memory_bytes)
    host = host_memory(MIXTRAL, L4, MTBENCH, policy, peak)
    assert host.items["streamed experts"] == 29 * layer
    assert host.items["KV cache"] == 640 * (77 + 128) * 131072


@pytest.mark.parametrize(
    ("changes", "has_frames"),
    [
        ({}, True),
        ({"prompts_on_gpu": False}, True),
        ({"context_query_tokens": 0}, False),
        ({"prompts_on_gpu": False, "context_query_tokens": 0}, False),
        ({"attention_on_gpu": True}, False),
    ],
)
def test_attention_of_prompts_takes_gpu_memory_where_it_runs_there(changes: dict[str, Any], has_frames: bool) -> None:
    """A short prompt with a long context, for which the experts' activations leave no room."""
    policy = HrmPolicy(4, 8, prefill_tokens_per_sweep=1, **changes)

    def items(context_tokens: int) -> Mapping[str, float]:
        work = Workload(256, 128, buffers=SweepBuffers(256, longest_sequence=context_tokens))
        return gpu_memory(MIXTRAL, L4, work, policy, buffered_load(work, policy)).items

    experts = 256 * 2 * (2 * 4096 + 3 * 14336) * 2
    qkv_and_output = 256 * (2 * 4096 + 2 * 1024) * 2
    longest = items(32768)
    assert longest["activations of a micro-batch"] == (
        qkv_and_output + PROMPT_ATTENTION_BYTES + 256 * 4096 * 2 if has_frames else experts
    )
    assert longest["frames for prompts' contexts"] == (2 * 32768 * 4096 if has_frames else 0)
    assert items(1_000_000)["frames for prompts' contexts"] == (2 * CONTEXT_FRAME_BYTES if has_frames else 0)


def test_attention_of_whole_prompts_takes_gpu_memory_where_it_runs_there() -> None:
    spec = replace(MIXTRAL, top_k=1, expert_intermediate=1)  # so that attention is the widest point
    work = Workload(8000, 128, buffers=SweepBuffers(8000))

    def activations(*, prompts_on_gpu: bool) -> float:
        policy = HrmPolicy(4, 8, prompts_on_gpu=prompts_on_gpu, context_query_tokens=0, prefill_tokens_per_sweep=1)
        need = gpu_memory(spec, L4, work, policy, buffered_load(work, policy))
        return need.items["activations of a micro-batch"]

    output = 8000 * 4096 * 2
    assert activations(prompts_on_gpu=True) == activations(prompts_on_gpu=False) + PROMPT_ATTENTION_BYTES + output


@pytest.mark.parametrize(("longest", "tokens"), [(0, 500), (4000, 4000), (9000, 8000)])
def test_a_micro_batch_has_room_for_the_longest_prompt_that_a_sweep_takes(longest: int, tokens: int) -> None:
    """However many micro-batches share the sweep's tokens: a prompt may be longer than expected, and is not cut."""
    work = Workload(500, 128, buffers=SweepBuffers(8000, longest_sequence=longest))

    def activations(num_micro_batches: int) -> float:
        policy = HrmPolicy(1, num_micro_batches, context_query_tokens=0, prefill_tokens_per_sweep=1)
        need = gpu_memory(MIXTRAL, L4, work, policy, buffered_load(work, policy))
        return need.items["activations of a micro-batch"]

    per_token = 2 * (2 * 4096 + 3 * 14336) * 2
    assert activations(100) == tokens * per_token
    assert activations(1) == 8001 * per_token


def test_no_slots_are_needed_where_all_layers_are_resident() -> None:
    policy = HrmPolicy(8, 2, num_resident_layers=32)
    need = gpu_memory(MIXTRAL, preset_profile("h200"), MTBENCH, policy, decode_load(MTBENCH, policy))
    assert need.items["slots of streamed experts"] == 0
    assert need.fits
