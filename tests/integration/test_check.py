# SPDX-License-Identifier: Apache-2.0
"""`check` passes a healthy engine and finds each planted fault in one run, with a verdict that names it."""

from __future__ import annotations

import json
import re

import pytest
import torch

from tests.helpers.engine import ENVIRONMENT, ROOT, EngineFailedError, run_engine
from tests.helpers.engine_call import PRELOAD, call, calls, result_of
from vllm_moe_lightning.config import OPTIONS_KEY
from vllm_moe_lightning.integration.parity_engine import reason
from vllm_moe_lightning.integration.parity_run import CheckRequest, EngineJob, check, request_of, run_in_process
from vllm_moe_lightning.parity import EngineAnswers
from vllm_moe_lightning.pipeline.schedule import SweepShape, make_schedule

pytestmark = pytest.mark.integration
ANSWERS = "vllm_moe_lightning.integration.parity_engine:answers_of"
NUM_LAYERS = 4

_stock: dict[str, EngineAnswers] = {}


def forked(job: EngineJob) -> EngineAnswers:
    """As parity_run.run_in_process, but by the fork server; stock vLLM's answers to one job are asked for once."""
    key = json.dumps([dict(job.engine_args), request_of(job)["job"]], default=str)
    if not job.is_ours and key in _stock:
        return _stock[key]
    args = dict(job.engine_args)
    model, options = args.pop("model"), args.pop("additional_config", {}).get(OPTIONS_KEY)
    args.pop("worker_cls", None)
    rpc = call(ANSWERS, **request_of(job)["job"])
    try:
        result = run_engine(
            model, [calls(rpc)], plugin=job.is_ours, moe_lightning=options, engine_args=args, preload=[PRELOAD]
        )
    except EngineFailedError as error:
        *_, (kind, message) = re.findall(r"^(?:\w+\.)*(\w*Error): (.+)$", error.log, re.MULTILINE)
        return EngineAnswers(error=reason(kind, message))
    answers = EngineAnswers(**result_of(result.jobs[0]))
    if not job.is_ours:
        _stock[key] = answers
    return answers


@pytest.fixture(scope="module")
def model(checkpoint):
    return checkpoint("mixtral", num_layers=NUM_LAYERS)


def test_a_healthy_engine_passes_and_the_verdict_says_what_was_compared(model, tmp_path):
    report = check(CheckRequest(model, max_tokens=8), tmp_path, run=forked)
    verdict = report.parity.verdict()
    assert report.parity.is_right, verdict
    # 8 experts of two matrices in each layer, as vLLM packs them.
    assert f"{NUM_LAYERS * 8 * 2} expert matrices are stock's, byte for byte" in verdict
    assert "tokens: all 128 the same" in verdict
    figures = report.to_dict()
    assert figures["ours"]["pages_moved"] > 0
    assert max(figures["ours"]["steps"]).endswith("x3")
    assert figures["stock"]["prefix_cache_hit_tokens"] == figures["ours"]["prefix_cache_hit_tokens"] == 0
    assert json.loads(json.dumps(figures))["settings"]["layers"] == NUM_LAYERS


def test_a_zeroed_page_is_found_and_its_layer_and_expert_are_named(model, tmp_path):
    report = check(CheckRequest(model, max_tokens=8, plant="zero_page"), tmp_path, run=forked)
    wrong = {finding.what: finding.detail for finding in report.parity.findings if not finding.is_right}
    assert f"model.layers.{NUM_LAYERS - 1}." in wrong["experts held"]
    assert "w13_weight of expert 0" in wrong["experts held"]
    assert "log-probabilities" in wrong  # and it does matter


WAITS = make_schedule("cgopipe", SweepShape(NUM_LAYERS, 3, (8,) * NUM_LAYERS)).wait_names()


@pytest.mark.parametrize("wait", WAITS)
def test_each_removed_wait_is_found_and_the_two_tasks_are_named(model, tmp_path, wait):
    report = check(CheckRequest(model, max_tokens=2, plant=wait), tmp_path, run=forked)
    assert not report.parity.is_right
    said = r"FAIL: our engine: HazardError: buffer '.+': '.+' on stream '.+' .+, and nothing orders that after '.+' on"
    assert re.match(said, report.parity.verdict()), report.parity.verdict()


def test_bfloat16_is_measured_against_stocks_own_distance_from_float32(checkpoint, tmp_path):
    model = checkpoint("mixtral", dtype=torch.bfloat16)
    report = check(CheckRequest(model, max_tokens=8, dtype="bfloat16"), tmp_path, run=forked)
    assert report.parity.is_right, report.parity.verdict()
    assert "from float32 in the mean, stock" in report.parity.verdict()


def test_the_first_layers_are_checked_as_well_in_a_process_of_its_own(tmp_path):
    """The process is ours alone, to save time: stock vLLM answers in a fork."""
    request = CheckRequest(ROOT / "examples/tiny-shakespeare-moe", num_layers=2, max_tokens=2)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        report = check(request, tmp_path, run=lambda job: run_in_process(job) if job.is_ours else forked(job))
    verdict = report.parity.verdict()
    assert verdict.startswith(f"PASS: experts held: {2 * 8 * 2} expert matrices are stock's, byte for byte; "), verdict
    assert (report.settings["layers"], report.settings["layers_of_model"]) == (2, 8)
