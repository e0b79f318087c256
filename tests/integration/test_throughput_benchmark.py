"""benchmarks/throughput.py at its smallest, on the installed vLLM: its rows, its counters, its guards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.integration


def test_two_schedules_answer_the_same_prompts_and_page_in_every_sweep(tmp_path: Path) -> None:
    out = tmp_path / "throughput.json"
    command = [sys.executable, "benchmarks/throughput.py", "--json", str(out), "--quick", "--rounds", "1"]
    command += ["--workload", "mtbench-32", "--requests", "8", "--arms", "cgopipe,serial"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert [row["arm"] for row in result["rows"]] == ["cgopipe", "serial"]
    for row in result["rows"]:
        assert row["device"] == "emulated"
        assert (row["text_tokens"], row["padding_tokens"], row["generated_tokens"]) == (8 * 77, 0, 8 * 32)
        assert row["bytes_paged"] > 0
        assert row["prefix_hits"] == 0
        assert not row["conditions"]["prefix_caching"]
        assert row["tokens_per_s"] > 0
    assert result["rows"][0]["modelled_tokens_per_s"] > 0
    assert result["summary"]["cgopipe_is_faster_by"].keys() == {"serial"}
