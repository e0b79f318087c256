# SPDX-License-Identifier: Apache-2.0
"""The examples over Ray, on a Ray of one machine: the tokens of an engine without it, and every page moved."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.engine import ENVIRONMENT, ROOT, Job, run_engine
from tests.helpers.server import serve_environment

pytest.importorskip("ray", reason="pip install 'vllm-moe-lightning[ray]'")
pytestmark = [pytest.mark.integration, pytest.mark.slow]

MODEL = ROOT / "examples/tiny-shakespeare-moe"
PROMPTS = ["ROMEO:\nO, she doth", "First Citizen:\nWe are", "KING HENRY V:\nOnce more"]
MAX_TOKENS = 12
PLAN = {"hardware": "t4", "device_memory_mib": 12, "num_resident_layers": 0, "kv_cache_gib": 0.25}
"""For a machine that is not measured."""
OPTIONS = {**PLAN, "num_micro_batches": 2, "attention_threads": 1}
TIMEOUT_S = 600


@pytest.fixture(scope="module")
def without_ray():
    """Tokens and texts, and what one rank moves."""
    job = Job(PROMPTS, {"max_tokens": MAX_TOKENS, "ignore_eos": False})
    options = {"num_resident_layers": 0, "num_micro_batches": 2}
    return run_engine(MODEL, [job], plugin=True, moe_lightning=options).jobs[0]


def run_example(name: str, *arguments: str, one_process: bool = False) -> str:
    """What it printed."""
    environment = {**serve_environment(), **({} if not one_process else ENVIRONMENT), "RAY_DEDUP_LOGS": "0"}
    common = ["--dtype", "float32", "--max-tokens", str(MAX_TOKENS), "--options", json.dumps(OPTIONS)]
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *common, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert result.returncode == 0, result.stdout[-6000:]
    return result.stdout


def test_two_ranks_as_ray_actors_give_the_same_tokens_and_page_half_each(without_ray, tmp_path: Path) -> None:
    log = run_example("ray_tensor_parallel.py", "--json", str(tmp_path / "answer.json"))
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["token_ids"] == without_ray.token_ids
    (alone,) = without_ray.stats
    assert len(answer["ranks"]) == 2
    for stats in answer["ranks"]:
        assert stats["sweeps"] > 0
        sweeps = stats["sweeps"] + stats["dummy_sweeps"]
        moved = stats["pages_per_sweep"] * sweeps + stats["pages_of_first_layer"] * stats["refills"]
        assert stats["pages_moved"] == moved > 0
        # Half, each slice padded by vLLM's CPU build.
        assert alone["expert_bytes_on_host"] / 2 <= stats["expert_bytes_on_host"] < alone["expert_bytes_on_host"]
    # Ranks of one machine write their metrics where the front end, at the end, reads them.
    assert "runs on another machine" not in log
    assert "the run in figures" in log


def test_engines_of_ray_data_answer_every_prompt_once_over_an_interruption(without_ray, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    kept = {"index": 1, "prompt": PROMPTS[1], "text": "of an earlier run", "finish_reason": "length"}
    output.write_text(json.dumps(kept) + "\n" + '{"index": 2, "prom')
    arguments = ("--prompts", str(prompts), "--output", str(output), "--num-engines", "2", "--batch-size", "1")
    assert "1 of 3 prompts are answered" in run_example("ray_data_bulk.py", *arguments, one_process=True)
    rows = sorted((json.loads(line) for line in output.read_text().splitlines()), key=lambda row: row["index"])
    assert [row["prompt"] for row in rows] == PROMPTS
    assert [row["text"] for row in rows] == [without_ray.texts[0], kept["text"], without_ray.texts[2]]
    assert "3 of 3 prompts are answered" in run_example("ray_data_bulk.py", *arguments)
