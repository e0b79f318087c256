# SPDX-License-Identifier: Apache-2.0
"""Host memory at start: experts are held once, nothing is pinned, and nothing says so."""

from __future__ import annotations

import re

import pytest

from tests.helpers.engine import Job, run_engine
from tests.helpers.oracle import assert_same_tokens
from tests.helpers.paging import MIB, PAGE_MIB, assert_pages_are_exact, expert_bytes_per_layer
from tests.helpers.prompts import standard_prompts
from tests.helpers.start_probes import findings, probe

pytestmark = pytest.mark.integration

# Ten layers, so that two slots are a small part. Gate and up of a layer are just over a power of two (16 MiB).
NUM_LAYERS, INTERMEDIATE = 10, 352
SHAPE = {"num_layers": NUM_LAYERS, "hidden_size": 1024, "head_dim": 128, "max_shard_size": "40MB"}
SHARD_BYTES = 40_000_000
ENGINE_ARGS = {"kv_cache_memory_bytes": 8 * MIB, "max_num_batched_tokens": 256}


def measured(checkpoint, intermediate_size):
    """Bytes of experts, of experts on the device, and memory before, with one engine, and with a second."""
    model = checkpoint("mixtral", intermediate_size=intermediate_size, **SHAPE)
    result = run_engine(
        model,
        [Job(standard_prompts(1), {"max_tokens": 1})],
        plugin=True,
        engine_args=ENGINE_ARGS,
        preload=[probe("measure_memory_of_two_engines")],
    )
    (stats,) = result.jobs[0].stats
    return (
        sum(expert_bytes_per_layer(model)),
        stats["expert_bytes_on_device"],
        findings(result.log, "MEMORY"),
        result.log,
    )


@pytest.fixture(scope="module")
def large(checkpoint):
    return measured(checkpoint, INTERMEDIATE)


@pytest.fixture(scope="module")
def small(checkpoint):
    """The same engine with hardly any experts: what everything else takes."""
    return measured(checkpoint, 16)


def test_host_memory_holds_the_experts_once_also_while_loading(large, small):
    """B01. Beside the pages there are the slots, memory of the emulated device that a GPU would have itself."""
    (experts, on_device, (before, first, _), _), (few, few_on_device, (before_small, first_small, _), _) = large, small
    added, slots = experts - few, on_device - few_on_device
    everything_else = first_small["VmRSS"] - before_small["VmRSS"]
    assert added >= 300 * MIB
    growth = first["VmRSS"] - before["VmRSS"] - everything_else
    assert growth >= 0.9 * added, "measured something else"
    assert growth <= 1.10 * added + slots
    peak = first["VmHWM"] - before["VmRSS"] - everything_else
    assert peak <= 1.10 * added + slots + SHARD_BYTES


def test_a_second_engine_in_the_process_takes_the_place_of_the_first(large):
    """B01. The first one is deleted, not shut down."""
    experts, _, (_, first, second), _ = large
    assert second["VmRSS"] - first["VmRSS"] < 0.05 * experts
    assert second["VmHWM"] - first["VmHWM"] < 0.05 * experts


def test_the_log_tells_bytes_asked_for_and_taken(large):
    """B01."""
    experts, _, _, log = large
    pattern = (
        r"moe_lightning: \d+ MoE layers, ([\d.]+) MiB of experts; \d+ layers streamed from ([\d.]+) MiB of host pages"
    )
    asked, taken = re.findall(pattern, log)[0]
    assert float(asked) == pytest.approx(experts / MIB, abs=0.1)
    assert float(asked) <= float(taken) <= 1.01 * float(asked) + 0.1


def test_the_cpu_build_says_once_that_host_pages_are_not_pinned(checkpoint, hf_result):
    """B02 a."""
    result = run_engine(checkpoint("mixtral"), [Job(standard_prompts(4))], plugin=True)
    assert result.log.count("host memory is pageable, not pinned") == 1
    assert_same_tokens(result.token_ids, hf_result("mixtral", num_prompts=4), "default options")


def test_a_tight_limit_on_locked_memory_changes_nothing(checkpoint, hf_result):
    """B02 b and c. The emulated device pins nothing, so no call can fail; and no line of ours claims that it did."""
    result = run_engine(
        checkpoint("mixtral"), [Job(standard_prompts(4))], plugin=True, preload=[probe("limit_locked_memory")]
    )
    assert_same_tokens(result.token_ids, hf_result("mixtral", num_prompts=4), "memlock of 64 KiB")
    claims = [line for line in result.log.splitlines() if re.search(r"(?<!not )\bpinn?(ed|ing)\b", line)]
    assert not claims


def test_a_layer_with_nothing_to_page_makes_no_allocation(checkpoint, hf_result):
    """B02 d. Layer 1 of 3 is dense."""
    options = {"mlp_only_layers": [1]}
    model = checkpoint("qwen3_moe", **options)
    result = run_engine(
        model,
        [Job(standard_prompts(4))],
        plugin=True,
        moe_lightning={"page_mib": PAGE_MIB},
        preload=[probe("report_host_allocations")],
    )
    allocations = findings(result.log, "ALLOCATION")
    pages = [entry for entry in allocations if entry["name"].startswith("host pages")]
    assert [entry["num_bytes"] for entry in pages] == [n for n in expert_bytes_per_layer(model) if n]
    assert all(num_bytes > 0 for num_bytes in findings(result.log, "MAPPING"))
    assert len(findings(result.log, "MAPPING")) == len([entry for entry in allocations if entry["num_bytes"]])
    assert_pages_are_exact(result.jobs[0], model)
    assert_same_tokens(result.token_ids, hf_result("qwen3_moe", num_prompts=4, **options), "one dense layer")
