"""What an engine is asked to be, before any weight is read: model, machine, options and vLLM's limits, as plain data.

Decides what lengths are planned for where nobody says, and what the options of the emulated device make of a profile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from msgspec.structs import replace as replace_struct

from vllm_moe_lightning.config import MoeLightningConfig
from vllm_moe_lightning.hardware import EMULATED_GPU_NAME, MIB, HardwareProfile
from vllm_moe_lightning.model_spec import MoeModelSpec
from vllm_moe_lightning.workload import Workload

DEFAULT_PROMPT_TOKENS = 512
DEFAULT_GENERATION_TOKENS = 128
GENERATION_SHARE = 5  # a fifth of a short max_model_len
NULL_BLOCKS = 1  # of vLLM's block pool, never handed out


@dataclass(frozen=True)
class GivenLimits:
    """Limits of vLLM that the user has set; None: they are the planner's to choose."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_bytes: int | None = None
    """Of each rank."""
    kv_flag: str = ""
    """What gave kv_bytes, as the user knows it."""
    max_model_len: int | None = None
    host_memory_share: float | None = None
    """Of host memory, that may be planned with."""
    gpu_memory_share: float | None = None
    """Of device memory, that may be planned with."""


@dataclass(frozen=True)
class EngineRequest:
    """Sizes are the whole model's and the whole machine's."""

    spec: MoeModelSpec
    profile: HardwareProfile
    options: MoeLightningConfig
    max_model_len: int
    block_size: int
    given: GivenLimits = GivenLimits()
    num_ranks: int = 1
    enable_chunked_prefill: bool = True


def workload_of(request: EngineRequest) -> tuple[Workload, dict[str, str]]:
    """(what is planned for, the reasons for its lengths). Raises ValueError for lengths over max_model_len."""
    options, longest = request.options, request.max_model_len
    prompt, generation = options.expected_prompt_tokens, options.expected_generation_tokens
    if (prompt or 1) + (generation or 1) > longest:
        raise ValueError(
            f"moe_lightning: expected_prompt_tokens {prompt or 1:g} and expected_generation_tokens {generation or 1} "
            f"are {(prompt or 1) + (generation or 1):g} tokens, max_model_len is {longest}; expect less, or raise "
            f"--max-model-len"
        )
    reasons = {
        "expected_prompt_tokens": "given" if prompt else "default; give your mean prompt length",
        "expected_generation_tokens": "given" if generation else "default; give your mean answer length",
    }
    if generation is None:
        left = longest - (prompt or 0)
        share = int(left) if prompt else longest // GENERATION_SHARE
        generation = max(1, min(DEFAULT_GENERATION_TOKENS, share))
    if prompt is None:
        prompt = max(1, min(DEFAULT_PROMPT_TOKENS, longest - generation))
    return Workload(prompt_len=float(prompt), gen_len=generation), reasons


def longest_sequence(request: EngineRequest, spec: MoeModelSpec, expected_tokens: float) -> int:
    """max_model_len, lowered to what a given KV cache holds if the user did not give it.

    Raises ValueError with need, have and cure where it may not be lowered, or by more than the expected lengths bear.
    """
    longest, given, block_size = request.max_model_len, request.given, request.block_size
    # Windowed layers have pools of their own in vLLM, which takes less; vLLM checks those itself.
    if given.kv_bytes is None or spec.num_windowed_layers:
        return longest
    block_bytes = block_size * spec.kv_bytes_per_token
    usable = int(given.kv_bytes // block_bytes) - NULL_BLOCKS
    needed = longest if given.max_model_len else min(longest, math.ceil(expected_tokens))
    blocks = -(-needed // block_size)
    if usable < blocks:
        what, cure = f"of the expected {needed} tokens", "expect shorter ones"
        if given.max_model_len:
            what, cure = f"of max_model_len {needed}", f"lower --max-model-len to {max(usable, 0) * block_size}"
        raise ValueError(
            f"moe_lightning: a sequence {what} needs {blocks + NULL_BLOCKS} KV blocks of {block_size} tokens "
            f"({(blocks + NULL_BLOCKS) * block_bytes / MIB:.1f} MiB, the block that vLLM holds back included), but "
            f"{given.kv_flag} gives {usable + NULL_BLOCKS} ({given.kv_bytes / MIB:.1f} MiB); raise {given.kv_flag}, "
            f"or {cure}"
        )
    return min(longest, usable * block_size)


def machine_under_options(profile: HardwareProfile, options: MoeLightningConfig) -> HardwareProfile:
    """A rank's machine with the emulated device's memory and link as they are set."""
    gpu, cpu, link, reached = profile.gpu, profile.cpu, profile.link, profile.efficiencies
    is_emulated = gpu.name == EMULATED_GPU_NAME
    if options.device_memory_mib is not None:
        device_bytes = int(options.device_memory_mib * MIB)
        if is_emulated:
            cpu = replace_struct(cpu, memory_bytes=cpu.memory_bytes + gpu.memory_bytes - device_bytes)
        gpu = replace_struct(gpu, memory_bytes=device_bytes)
        reached = replace_struct(reached, gpu_memory=1.0)  # a budget, of which nothing goes to a driver
    speeds = {"h2d_bytes_per_s": options.h2d_gb_per_s, "d2h_bytes_per_s": options.d2h_gb_per_s}
    for name, gb_per_s in speeds.items():
        if gb_per_s is not None:
            # Pacing waits: it makes no copy faster than memcpy.
            limit = getattr(link, name) if is_emulated else gb_per_s * 1e9
            paced = min(gb_per_s * 1e9, limit)
            if is_emulated:  # what a slower direction leaves of the memory bus is the other's
                share = min(1.0, link.bidirectional_share * limit / paced)
                link = replace_struct(link, bidirectional_share=share)
            link = replace_struct(link, **{name: paced})
    return replace_struct(profile, gpu=gpu, cpu=cpu, link=link, efficiencies=reached)


def machine_within(profile: HardwareProfile, available_bytes: int) -> HardwareProfile:
    """A machine that was described, with no more host memory than the one that the engine starts on has free."""
    usable = int(available_bytes / profile.efficiencies.host_memory)
    if profile.host_memory_bytes <= usable:
        return profile
    return replace_struct(profile, cpu=replace_struct(profile.cpu, memory_bytes=usable))


def machine_as_it_is_used(profile: HardwareProfile, available_bytes: int) -> HardwareProfile:
    """Host memory less what other processes hold of it now, as far as that is more than is left to them anyway."""
    cpu = profile.cpu
    on_device = profile.gpu.memory_bytes if profile.gpu.name == EMULATED_GPU_NAME else 0
    total = profile.host_memory_bytes + on_device
    left_to_others = total * (1.0 - profile.efficiencies.host_memory)
    missing = total - available_bytes - left_to_others
    if missing <= 0:
        return profile
    usable = profile.host_memory_bytes - missing / profile.efficiencies.host_memory
    return replace_struct(profile, cpu=replace_struct(cpu, memory_bytes=max(MIB, int(usable))))
