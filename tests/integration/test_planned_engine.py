# SPDX-License-Identifier: Apache-2.0
"""The planner inside vLLM: its limits are everybody's, the user's values win or are refused, and it can step aside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.engine import EngineFailedError, EngineResult, Job, run_engine
from tests.helpers.oracle import assert_same_tokens
from tests.helpers.prompts import standard_prompts
from tests.helpers.start_probes import findings, probe
from vllm_moe_lightning.hardware import profile_to_json
from vllm_moe_lightning.hardware_presets import preset_profile
from vllm_moe_lightning.resources import LABELS

pytestmark = pytest.mark.integration

JOB = Job(standard_prompts(4), {"logprobs": None})
# The engine helper's own limits, taken back: vLLM and the planner decide.
NOTHING_GIVEN = dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "block_size"))
NUM_LAYERS = 4
KV_BYTES_PER_TOKEN = NUM_LAYERS * 2 * 2 * 32 * 4  # K and V, heads, head_dim, float32
SMALL_DEVICE_MIB = 5  # of four layers of 1.1 MiB and 1.2 MiB of other weights
DEVICE_MIB_FOR_A_LONG_PROMPT = 7  # whose attention and experts take 2 MiB


@pytest.fixture
def start(checkpoint):
    """`start(options, max_num_seqs=5)`: planned for the T4 preset, whatever machine the tests run on."""

    def start(options: dict[str, Any] | None = None, *, jobs=(JOB,), model: dict[str, Any] | None = None, **arguments):
        return run_engine(
            checkpoint("mixtral", num_layers=NUM_LAYERS, **(model or {})),
            list(jobs),
            plugin=True,
            moe_lightning={"planner": "auto", "hardware": "t4", **(options or {})},
            engine_args={**NOTHING_GIVEN, **arguments},
            preload=[probe("report_limits")],
        )

    return start


def found(result: EngineResult, topic: str) -> dict[str, Any]:
    (value,) = findings(result.log, topic)
    return value


def table(result: EngineResult) -> dict[str, str]:
    """Name -> the rest of its line."""
    lines = [line.partition("planning.py:")[2].partition("]")[2].split() for line in result.log.splitlines()]
    return {words[0]: " ".join(words[1:]) for words in lines if len(words) > 1}


def test_the_flag_alone_plans_and_all_processes_have_the_plan_s_limits(start, hf_result):
    result = start({"device_memory_mib": SMALL_DEVICE_MIB})
    front_end, worker, scheduler = (found(result, topic) for topic in ("FRONT_END", "WORKER", "SCHEDULER"))
    plan = front_end["plan"]
    assert plan == worker["plan"]
    assert (worker["class"], scheduler["class"]) == ("MoELightningWorker", "MoELightningScheduler")
    for limit in ("max_num_seqs", "max_num_batched_tokens"):
        assert front_end[limit] == worker[limit] == scheduler[limit] == plan[limit]
    assert front_end["kv_bytes"] == plan["kv_bytes"]
    assert scheduler["num_kv_blocks"] == plan["num_kv_blocks"]
    assert plan["kv_bytes"] == plan["num_kv_blocks"] * 128 * KV_BYTES_PER_TOKEN
    assert front_end["block_size"] == plan["block_size"] == 128
    assert plan["reasons"]["max_num_seqs"] == "planned"

    (stats,) = result.jobs[0].stats
    assert stats["policy"]["num_micro_batches"] == plan["num_micro_batches"]
    assert len(stats["policy"]["resident_layers"]) == plan["num_resident_layers"]
    assert stats["policy"]["page_bytes"] == plan["page_bytes"]
    assert_same_tokens(result.token_ids, hf_result("mixtral", num_prompts=4, num_layers=NUM_LAYERS), "planned")

    assert result.log.count("moe_lightning: plan for") == 1  # vLLM checks copies of the configuration: not planned anew
    printed = table(result)
    assert printed["max_num_seqs"] == f"{plan['max_num_seqs']} planned"
    assert printed["expected_prompt_tokens"].startswith("205 default")
    assert printed["predicted:"].startswith(f"{plan['predicted']['generated_tokens_per_s']:.1f} generated tokens/s")
    assert f"bottleneck {LABELS[plan['predicted']['bottleneck']]}" in printed["predicted:"]


def test_values_that_the_user_gave_stand(start, tmp_path):
    profile = tmp_path / "machine.json"
    profile.write_text(profile_to_json(preset_profile("l4")))
    result = start(
        {"hardware": str(profile), "num_micro_batches": 2, "num_resident_layers": 1, "expected_prompt_tokens": 77},
        max_num_seqs=5,
        max_num_batched_tokens=300,
        kv_cache_memory_bytes=4 << 20,
        block_size=32,
    )
    front_end, scheduler = found(result, "FRONT_END"), found(result, "SCHEDULER")
    assert (scheduler["max_num_seqs"], scheduler["max_num_batched_tokens"]) == (5, 300)
    assert (front_end["kv_bytes"], front_end["block_size"]) == (4 << 20, 32)
    assert scheduler["num_kv_blocks"] == front_end["plan"]["num_kv_blocks"] == (4 << 20) // (32 * KV_BYTES_PER_TOKEN)
    (stats,) = result.jobs[0].stats
    assert stats["policy"]["num_micro_batches"] == 2
    assert len(stats["policy"]["resident_layers"]) == 1
    reasons = front_end["plan"]["reasons"]
    given = ("max_num_seqs", "max_num_batched_tokens", "num_micro_batches", "num_resident_layers")
    assert {reasons[name] for name in (*given, "expected_prompt_tokens")} == {"given"}
    assert reasons["kv_bytes"] == "--kv-cache-memory-bytes"
    assert front_end["plan"]["hardware"] == "l4 in gcp-l4-24"


def test_where_all_fits_the_device_stock_vllm_runs_and_one_line_says_so(start, stock_result):
    result = start(jobs=[replace(JOB, stats=None)], kv_cache_memory_bytes=64 << 20)
    worker, scheduler = found(result, "WORKER"), found(result, "SCHEDULER")
    assert (worker["class"], scheduler["class"]) == ("CPUWorker", "Scheduler")
    assert worker["plan"] is None
    assert scheduler["max_num_seqs"] == 256  # vLLM's own default
    (line,) = [line for line in result.log.splitlines() if "runs stock vLLM" in line]
    assert "fit the" in line
    assert result.token_ids == stock_result("mixtral", num_prompts=4, num_layers=NUM_LAYERS).token_ids[:4]


def test_what_the_user_fixed_of_the_policy_is_not_stepped_aside_from(start):
    result = start({"num_resident_layers": 2}, jobs=[], max_num_seqs=4)
    assert found(result, "WORKER")["class"] == "MoELightningWorker"


def test_an_eight_bit_kv_cache_is_planned_with_its_own_bytes_and_not_stepped_aside_from(start):
    """Stock vLLM's CPU build has none, so the flag asks for us even where all fits the device."""
    result = start(jobs=[], kv_cache_dtype="int8_per_token_head", max_num_seqs=4)
    front_end, worker, scheduler = (found(result, topic) for topic in ("FRONT_END", "WORKER", "SCHEDULER"))
    plan = front_end["plan"]
    bytes_per_token = NUM_LAYERS * 2 * 2 * (32 + 4)  # K and V, heads, elements and a scale
    assert worker["class"] == "MoELightningWorker"
    assert plan["kv_bytes"] == plan["num_kv_blocks"] * 128 * bytes_per_token
    assert scheduler["num_kv_blocks"] == plan["num_kv_blocks"]
    assert f"keys and values take {bytes_per_token} bytes per token" in result.log


def refusal(start: Any, *args: Any, **arguments: Any) -> str:
    with pytest.raises(EngineFailedError) as failure:
        start(*args, jobs=[], **arguments)
    return failure.value.log


def test_what_does_not_fit_is_refused_with_need_have_and_what_fixed_it(start):
    log = refusal(start, {"device_memory_mib": SMALL_DEVICE_MIB, "num_resident_layers": 2})
    assert "no policy for mixtral" in log
    assert "GPU: resident experts" in log
    assert "num_resident_layers 2, device_memory_mib 5; drop one" in log
    assert "Starting to load model" not in log


@pytest.mark.parametrize("planner", ["auto", "off"])
def test_a_longest_request_that_the_cache_can_never_hold_is_refused_at_start(start, planner):
    """B18: eight blocks of 32 tokens for 256 tokens, and the one that vLLM holds back."""
    hardware = "t4" if planner == "auto" else None
    options = {"planner": planner, "hardware": hardware, "device_memory_mib": DEVICE_MIB_FOR_A_LONG_PROMPT}
    limits = {"max_model_len": 256, "block_size": 32, "max_num_seqs": 4, "max_num_batched_tokens": 256}
    if planner == "off":  # else vLLM sizes the cache by the host's memory first
        limits["kv_cache_memory_bytes"] = 1 << 20
    log = refusal(start, options, num_gpu_blocks_override=8, **limits)
    if planner == "auto":
        assert "a sequence of max_model_len 256 needs 9 KV blocks of 32 tokens" in log
        assert "raise --num-gpu-blocks-override, or lower --max-model-len to 224" in log
    else:
        assert "To serve at least one request with the model's max seq len (256)" in log
    longest = Job([[1] * 200], {"max_tokens": 56, "logprobs": None})
    result = start(options, jobs=[longest], num_gpu_blocks_override=9, **limits)
    assert [len(tokens) for tokens in result.token_ids] == [56]


def test_ranks_that_cannot_share_the_experts_are_refused_before_anything_loads(start):
    """B11."""
    options = {"planner": "off", "hardware": None}
    log = refusal(start, options, model={"intermediate_size": 47}, tensor_parallel_size=2)
    assert "intermediate size of an expert, 47" in log
    assert "2 tensor-parallel ranks; give --tensor-parallel-size one of 1" in log
    assert "Starting to load model" not in log


def test_a_seeded_request_answers_alike_whether_its_prompt_is_cut_or_not(start):
    """The V1 runner on the CPU dies of a seeded request whose prompt takes several sweeps."""
    seeded = Job([[5, 6, 7] * 60], {"temperature": 1.0, "seed": 11, "max_tokens": 12, "logprobs": None})
    options = {"device_memory_mib": DEVICE_MIB_FOR_A_LONG_PROMPT}
    whole = start(options, jobs=[seeded], max_num_seqs=4, max_num_batched_tokens=256)
    cut = start(options, jobs=[seeded], max_num_seqs=4, max_num_batched_tokens=50)
    assert cut.token_ids == whole.token_ids
