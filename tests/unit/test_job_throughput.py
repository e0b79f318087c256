"""The arithmetic of benchmarks/job_throughput.py: medians over workloads, ratios of arms that ran."""

import pytest

pytest.importorskip("torch")

from benchmarks.job_rows import BLOCK_SIZE, DEFAULTS, MIXED, PHASED, Shape, summary_of
from benchmarks.job_throughput import SHAPES, CheckpointShape
from vllm_moe_lightning.job_prediction import Job


def rows(arm: str, *rates: float, predicted: tuple[float, ...] = (), error: float = 0.0) -> list[dict[str, object]]:
    return [
        {
            "workload": str(index),
            "arm": arm,
            "tokens_per_s": rate,
            "predicted_tokens_per_s": predicted[index] if predicted else rate,
            "error": error,
        }
        for index, rate in enumerate(rates)
    ]


def test_ratios_are_medians_of_the_workloads_and_errors_those_of_the_mixed_arm() -> None:
    of_mixed = rows(MIXED, 10.0, 20.0, 90.0)
    for row, error in zip(of_mixed, (-0.1, 0.3, -0.2), strict=True):
        row["error"] = error
    summary = summary_of([*of_mixed, *rows(PHASED, 5.0, 20.0, 30.0, error=9.0), *rows(DEFAULTS, 20.0, 20.0, 90.0)])
    assert summary["predicted_abs_error_median"] == pytest.approx(0.2)
    assert summary["predicted_abs_error_worst"] == pytest.approx(0.3)
    assert summary["mixed_over_phased_all"] == pytest.approx(2.0)
    assert summary["policy_over_vllm_defaults"] == pytest.approx(1.0)


def test_mixed_sweeps_are_judged_by_the_workloads_that_should_gain() -> None:
    summary = summary_of(
        [*rows(MIXED, 13.0, 20.0), *rows(PHASED, 10.0, 20.0, predicted=(13.0, 10.0))]
    )  # predicted: no gain, and twice
    assert summary["mixed_over_phased_of"] == ["1"]
    assert summary["mixed_over_phased"] == pytest.approx(1.0)
    assert summary["mixed_over_phased_predicted"] == pytest.approx(2.0)


def test_the_distance_from_the_predicted_factor_is_the_worst_one() -> None:
    summary = summary_of([*rows(MIXED, 10.0, 10.0), *rows(DEFAULTS, 10.0, 5.0, predicted=(10.0, 4.0))])
    assert summary["policy_over_vllm_defaults_off_worst"] == pytest.approx(0.2)


def test_an_arm_that_did_not_run_has_no_ratio() -> None:
    summary = summary_of(rows(MIXED, 10.0))
    assert summary["policy_over_vllm_defaults"] is None
    assert summary["policy_over_vllm_defaults_off_worst"] is None
    assert summary["mixed_over_phased"] is None


def test_the_kv_cache_holds_the_slots_in_whole_blocks_and_the_null_block() -> None:
    checkpoint, shape = CheckpointShape(), SHAPES[1]
    blocks = shape.kv_bytes(checkpoint) / (BLOCK_SIZE * checkpoint.kv_bytes_per_token)
    assert blocks == shape.slots * 3 + 1  # 96 tokens


def test_more_sequences_run_where_blocks_are_taken_as_they_are_needed() -> None:
    shape = Shape("", Job(1, prompt_len=1, gen_len=2 * BLOCK_SIZE - 1), h2d_gb_per_s=1.0, slots=64)
    assert shape.running_by_need == 64 * 2 * 64 // 96  # one block at first, then two
