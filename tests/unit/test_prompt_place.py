# SPDX-License-Identifier: Apache-2.0
"""Where an engine will attend to prompts, from its options, its device and its model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllm_moe_lightning.config import parse_options
from vllm_moe_lightning.context_place import context_query_tokens
from vllm_moe_lightning.hardware import EMULATED_GPU_NAME
from vllm_moe_lightning.hardware_presets import preset_profile
from vllm_moe_lightning.model_config import read_model_spec
from vllm_moe_lightning.prompt_place import DEFAULT_CONTEXT_QUERY_TOKENS, prompt_places, why_prompts_are_there

CONFIGS = Path(__file__).parent / "model_configs"
MIXTRAL = read_model_spec(CONFIGS / "mixtral-8x7b.json")
GPT_OSS = read_model_spec(CONFIGS / "gpt-oss-20b.json")
T4 = preset_profile("t4")
EMULATED = msgspec.structs.replace(T4, gpu=msgspec.structs.replace(T4.gpu, name=EMULATED_GPU_NAME))
BY_THE_PLAN = context_query_tokens(MIXTRAL, T4)


@pytest.mark.parametrize(
    ("options", "on_cuda", "emulated"),
    [
        ({}, (True, BY_THE_PLAN), (False, 0)),
        ({"prefill_attention": "cpu"}, (False, BY_THE_PLAN), (False, 0)),
        ({"prefill_attention": "device"}, (True, BY_THE_PLAN), (True, 0)),
        ({"prefill_context": "cpu"}, (True, 0), (False, 0)),
        ({"prefill_context": "link"}, (True, BY_THE_PLAN), (False, DEFAULT_CONTEXT_QUERY_TOKENS)),
    ],
)
def test_options_and_device_decide(
    options: dict[str, Any], on_cuda: tuple[bool, int], emulated: tuple[bool, int]
) -> None:
    assert BY_THE_PLAN > 0
    parsed = parse_options(options)
    for machine, expected in ((T4, on_cuda), (EMULATED, emulated)):
        places = prompt_places(parsed, MIXTRAL, machine)
        assert (places["prompts_on_gpu"], places["context_query_tokens"]) == expected


def test_a_model_with_sinks_has_its_prompts_on_the_cpu_whatever_is_asked_for() -> None:
    options = parse_options({"prefill_attention": "device", "prefill_context": "link"})
    assert prompt_places(options, GPT_OSS, T4) == {"prompts_on_gpu": False, "context_query_tokens": 0}
    assert "sinks" in why_prompts_are_there(options, GPT_OSS)


def test_a_quantised_cache_or_layers_of_two_kinds_keep_contexts_on_the_cpu() -> None:
    for spec in (
        MIXTRAL.with_kv_cache_dtype("int8_per_token_head"),
        replace(MIXTRAL, num_windowed_layers=8, window=64),
    ):
        places = prompt_places(parse_options({}), spec, T4)
        assert places == {"prompts_on_gpu": True, "context_query_tokens": 0}
