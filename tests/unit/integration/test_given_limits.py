# SPDX-License-Identifier: Apache-2.0
"""What the user has set of vLLM's limits, and what vLLM filled in."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_moe_lightning.engine_request import GivenLimits
from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.integration.given_limits import (
    KV_SPACE_VARIABLE,
    NOTE_KEY,
    given_limits,
    note_given_limits,
)

BLOCK_BYTES = 1000.0


class Arguments:
    """Of vLLM's EngineArgs what the note reads."""

    gpu_memory_utilization = 0.92

    def __init__(self, additional_config: dict[str, Any], **given: Any) -> None:
        self.max_num_seqs = self.max_num_batched_tokens = None
        self.additional_config = additional_config
        vars(self).update(given)


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KV_SPACE_VARIABLE, raising=False)


def configured(noted: list[str] | None = None, original_max_model_len: int | None = None, **cache: Any) -> Any:
    cache = {
        "kv_cache_memory_bytes": None,
        "num_gpu_blocks_override": None,
        "gpu_memory_utilization": 0.92,
        **cache,
    }
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=256, max_num_batched_tokens=2048),
        cache_config=SimpleNamespace(**cache),
        model_config=SimpleNamespace(original_max_model_len=original_max_model_len, max_model_len=512),
        additional_config={} if noted is None else {NOTE_KEY: noted},
    )


def test_the_note_names_what_is_not_none_and_leaves_the_user_s_dict_alone() -> None:
    options: dict[str, Any] = {"moe_lightning": {}}
    arguments = Arguments(options, max_num_seqs=7)
    note_given_limits(arguments)
    assert arguments.additional_config == {"moe_lightning": {}, NOTE_KEY: ["max_num_seqs"]}
    assert options == {"moe_lightning": {}}


def test_the_first_note_stays_when_vllm_has_filled_in_its_defaults() -> None:
    arguments = Arguments({})
    note_given_limits(arguments)
    arguments.max_num_seqs = arguments.max_num_batched_tokens = 256
    note_given_limits(arguments)
    assert arguments.additional_config == {NOTE_KEY: []}


def test_a_share_of_memory_that_is_not_vllm_s_default_is_given() -> None:
    arguments = Arguments({}, gpu_memory_utilization=0.5)
    note_given_limits(arguments)
    noted = arguments.additional_config[NOTE_KEY]
    assert given_limits(configured(noted, gpu_memory_utilization=0.5), None, BLOCK_BYTES).host_memory_share == 0.5
    assert given_limits(configured([]), None, BLOCK_BYTES).host_memory_share is None


def test_what_is_not_noted_is_vllm_s_default_and_not_given() -> None:
    assert given_limits(configured([]), None, BLOCK_BYTES) == GivenLimits()
    assert given_limits(configured(["max_num_seqs"]), None, BLOCK_BYTES) == GivenLimits(max_num_seqs=256)


def test_without_a_note_all_limits_count_as_given() -> None:
    given = given_limits(configured(None), None, BLOCK_BYTES)
    assert (given.max_num_seqs, given.max_num_batched_tokens) == (256, 2048)


@pytest.mark.parametrize(("original", "given"), [(None, None), (-1, None), (512, 512)])
def test_a_max_model_len_that_vllm_derives_or_fits_is_not_given(original: int | None, given: int | None) -> None:
    limits = given_limits(configured([], original_max_model_len=original), None, BLOCK_BYTES)
    assert limits.max_model_len == given


@pytest.mark.parametrize(
    ("kv_cache_gib", "cache", "variable", "expected"),
    [
        (0.5, {}, None, (1 << 29, "moe_lightning.kv_cache_gib")),
        (None, {"kv_cache_memory_bytes": 12345}, None, (12345, "--kv-cache-memory-bytes")),
        (None, {"num_gpu_blocks_override": 4}, None, (4000, "--num-gpu-blocks-override")),
        (None, {"kv_cache_memory_bytes": 12345}, "2", (2 << 30, KV_SPACE_VARIABLE)),  # vLLM lets the variable win
    ],
)
def test_a_given_cache_comes_with_the_flag_that_gave_it(
    monkeypatch: pytest.MonkeyPatch,
    kv_cache_gib: float | None,
    cache: dict[str, int],
    variable: str | None,
    expected: tuple[int, str],
) -> None:
    if variable is not None:
        monkeypatch.setenv(KV_SPACE_VARIABLE, variable)
    given = given_limits(configured([], **cache), kv_cache_gib, BLOCK_BYTES)
    assert (given.kv_bytes, given.kv_flag) == expected


def test_two_sizes_of_one_cache_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"kv_cache_gib, --kv-cache-memory-bytes; keep one"):
        given_limits(configured([], kv_cache_memory_bytes=1), 1.0, BLOCK_BYTES)


def test_a_share_of_memory_is_the_device_s_on_cuda_and_the_host_s_on_the_cpu_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = configured(noted=["gpu_memory_utilization"], gpu_memory_utilization=0.5)
    on_cpu = given_limits(config, None, BLOCK_BYTES)
    assert (on_cpu.host_memory_share, on_cpu.gpu_memory_share) == (0.5, None)
    monkeypatch.setattr("vllm_moe_lightning.integration.platform.is_cuda", lambda: True)
    on_cuda = given_limits(config, None, BLOCK_BYTES)
    assert (on_cuda.host_memory_share, on_cuda.gpu_memory_share) == (None, 0.5)
