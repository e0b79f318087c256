# SPDX-License-Identifier: Apache-2.0
"""The long run: random requests, aborts, groups, prefix hits and preemptions; every answer as if alone, nothing left
over, and no growth. The full length runs with MOE_LIGHTNING_SOAK_REQUESTS=2000 (README, 'Scheduling')."""

from __future__ import annotations

import os
import random

import pytest

from tests.helpers.engine_call import call, calls, result_of
from tests.helpers.paging import reconfigured, run_paged

pytestmark = pytest.mark.integration
BLOCK_BYTES = 2 * 2 * 2 * 32 * 32 * 4  # layers, K and V, heads, tokens, head_dim, float32: the test Mixtral's
NUM_REQUESTS = int(os.environ.get("MOE_LIGHTNING_SOAK_REQUESTS", "150"))
MOST_GROWTH_BYTES = 4 << 20


def prompts():
    generator = random.Random(1)

    def tokens(count):
        return [generator.randrange(256) for _ in range(count)]

    heads = [tokens(count) for count in (32, 64, 96)]  # whole blocks, so that they are found in the cache
    return [
        *(tokens(count) for count in (1, 2, 31, 32, 33, 63, 65, 100, 150)),
        *(head + tokens(count) for head in heads for count in (1, 9, 40)),
    ]


@pytest.mark.parametrize(("admission", "num_blocks"), [("vllm", 16), ("worst_case", 32), ("expected", 32)])
def test_every_answer_of_a_long_run_is_as_if_alone_and_nothing_is_left_over(admission, num_blocks, checkpoint):
    """The smaller cache, with vLLM's own rule of admission, forces preemptions."""
    soak = call(
        "tests.helpers.stream_call:soak",
        prompts=prompts(),
        num_requests=NUM_REQUESTS,
        seed=5,
        max_tokens=40,
        under_way=12,
    )
    (job,) = run_paged(
        checkpoint("mixtral"),
        [calls(*reconfigured(num_micro_batches=3), soak)],
        options={"admission": admission},
        engine_args={
            "enable_prefix_caching": True,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 128,
            "kv_cache_memory_bytes": (num_blocks + 1) * BLOCK_BYTES,
        },
        preload=["tests.helpers.stream_call:keep_few_compiled_kernels"],
        timeout_s=120 + NUM_REQUESTS,
    ).jobs
    outcome = result_of(job, 2)
    figures = {key: value for key, value in outcome.items() if key != "resident"}
    print(figures, [(ended, round(size / 2**20, 1)) for ended, size in outcome["resident"]])
    assert outcome["num_differing"] == 0, outcome["differing"]
    assert outcome["finished"] + outcome["aborted"] == NUM_REQUESTS
    assert outcome["aborted"] > NUM_REQUESTS // 50
    assert outcome["answers"] > outcome["finished"]
    assert (outcome["preemptions"] > NUM_REQUESTS // 10) == (admission == "vllm")
    assert outcome["most_running"] <= 16
    assert outcome["after"] == outcome["before"]
    assert outcome["before"]["free_blocks"] == num_blocks
    warm = next(size for ended, size in outcome["resident"] if ended >= NUM_REQUESTS // 2)
    assert outcome["resident"][-1][1] - warm < MOST_GROWTH_BYTES
