"""The arithmetic of benchmarks/job_throughput.py: medians over workloads, ratios of arms that ran."""

import pytest

pytest.importorskip("torch")

from benchmarks.job_throughput import BLOCK_SIZE, DEFAULTS, MIXED, PHASED, SHAPES, CheckpointShape, summary_of


def rows(arm: str, *rates: float, error: float = 0.0) -> list[dict[str, object]]:
    return [
        {"workload": str(index), "arm": arm, "tokens_per_s": rate, "error": error} for index, rate in enumerate(rates)
    ]


def test_ratios_are_medians_of_the_workloads_and_errors_those_of_the_mixed_arm() -> None:
    of_mixed = rows(MIXED, 10.0, 20.0, 90.0)
    for row, error in zip(of_mixed, (-0.1, 0.3, -0.2), strict=True):
        row["error"] = error
    summary = summary_of([*of_mixed, *rows(PHASED, 5.0, 20.0, 30.0, error=9.0), *rows(DEFAULTS, 20.0, 20.0, 90.0)])
    assert summary["predicted_abs_error_median"] == pytest.approx(0.2)
    assert summary["predicted_abs_error_worst"] == pytest.approx(0.3)
    assert summary["mixed_over_phased"] == pytest.approx(2.0)
    assert summary["policy_over_vllm_defaults"] == pytest.approx(1.0)


def test_an_arm_that_did_not_run_has_no_ratio() -> None:
    assert summary_of(rows(MIXED, 10.0))["policy_over_vllm_defaults"] is None


def test_the_kv_cache_holds_the_slots_in_whole_blocks_and_the_null_block() -> None:
    checkpoint, shape = CheckpointShape(), SHAPES[1]
    blocks = shape.kv_bytes(checkpoint) / (BLOCK_SIZE * checkpoint.kv_bytes_per_token)
    assert blocks == shape.slots * 3 + 1  # 96 tokens
