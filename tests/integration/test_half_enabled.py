# SPDX-License-Identifier: Apache-2.0
"""Asked for means at work: a set-up is completed and its pages counted, or refused with the flag to drop (B36)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.engine import WORKER_CLS, EngineFailedError, Job, Rpc, run_engine
from tests.helpers.oracle import assert_same_tokens
from tests.helpers.paging import PAGE_MIB, assert_pages_are_exact
from tests.helpers.prompts import standard_prompts
from tests.helpers.start_probes import probe

pytestmark = pytest.mark.integration

SCHEDULER_CLS = "vllm_moe_lightning.integration.scheduler.MoELightningScheduler"
OPTIONS = {"moe_lightning": {"planner": "off", "page_mib": PAGE_MIB}}
PROMPTS = standard_prompts(4, max_tokens=40)
SAMPLING = {"max_tokens": 4, "logprobs": None}  # few: runner V2 goes through Triton's interpreter


@pytest.fixture(scope="module")
def oracle(hf_result):
    return hf_result("mixtral", prompts=PROMPTS, max_tokens=4)


@pytest.fixture
def run(checkpoint):
    """`run(worker_cls=...)`: only what is given asks for us, so that halves can be left out."""

    def run(*, runner: str = "v1", preload: str = "load_installed_plugins", **engine_args):
        jobs = [Job(PROMPTS, SAMPLING), Job([], before=[Rpc("moe_lightning_stats")])]
        result = run_engine(
            checkpoint("mixtral"),
            jobs,
            plugin=False,
            runner=runner,
            engine_args=engine_args,
            preload=[probe(name) for name in preload.split()],
        )
        answers, counted = result.jobs
        return replace(answers, stats=counted.rpc_results[0])

    return run


@pytest.fixture
def refusal(run):
    """`refusal(...)`: the one line in which the engine says why it does not start."""

    def refusal(**options) -> str:
        with pytest.raises(EngineFailedError) as failure:
            run(**options)
        assert failure.value.returncode == 1
        (message,) = [line for line in failure.value.log.splitlines() if "UnsupportedError: " in line]
        return message

    return refusal


@pytest.mark.parametrize(
    ("runner", "preload"),
    [
        ("v1", "load_installed_plugins"),
        ("v2", "load_installed_plugins"),
        ("v1", "load_installed_plugins leave_runner_unset"),  # without Triton, vLLM takes V1
    ],
    ids=["v1", "v2", "unset"],
)
def test_the_worker_class_alone_pages_on_each_runner(run, checkpoint, oracle, runner, preload):
    job = run(worker_cls=WORKER_CLS, additional_config=OPTIONS, runner=runner, preload=preload)
    assert_same_tokens(job.token_ids, oracle, runner)
    assert_pages_are_exact(job, checkpoint("mixtral"))


@pytest.mark.parametrize(
    "half",
    [{"scheduler_cls": SCHEDULER_CLS}, {}, {"scheduler_cls": SCHEDULER_CLS, "worker_cls": WORKER_CLS}],
    ids=["scheduler-class", "options", "both-classes"],
)
def test_any_part_of_the_set_up_brings_in_the_rest(run, checkpoint, oracle, half):
    job = run(additional_config=OPTIONS, **half)
    assert_same_tokens(job.token_ids, oracle, str(half))
    assert_pages_are_exact(job, checkpoint("mixtral"))


def test_the_scheduler_class_without_the_worker_class_pages(run, oracle):
    job = run(scheduler_cls=SCHEDULER_CLS, additional_config={"moe_lightning": {"planner": "off"}})
    assert_same_tokens(job.token_ids, oracle, "scheduler class alone")
    assert job.stats[0]["bytes_paged"] > 0


def test_a_worker_without_the_plugin_is_refused(refusal):
    message = refusal(worker_cls=WORKER_CLS, preload="leave_out_plugins")
    assert "VLLM_PLUGINS leaves it out" in message


def test_the_older_ray_executor_is_refused(refusal):
    """It would step past the worker, so that nothing is counted."""
    pytest.importorskip("ray", reason="pip install 'vllm-moe-lightning[ray]'")
    preload = "load_installed_plugins ask_for_the_older_ray_executor"
    message = refusal(worker_cls=WORKER_CLS, distributed_executor_backend="ray", preload=preload)
    assert "unset VLLM_USE_RAY_V2_EXECUTOR_BACKEND" in message


def test_a_scheduler_without_the_plugin_is_refused(refusal):
    message = refusal(scheduler_cls=SCHEDULER_CLS, preload="leave_out_plugins")
    assert f"use --worker-cls {WORKER_CLS}" in message


@pytest.mark.parametrize(
    ("conflict", "flag"),
    [
        ({"cpu_offload_gb": 1}, "--cpu-offload-gb"),
        ({"offload_group_size": 2}, "--offload-*"),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "--kv-transfer-config",
        ),
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "--scheduler-cls"),
        ({"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}, "--worker-cls"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_set_up_that_conflicts_is_refused_with_the_flag_to_drop(refusal, conflict, flag):
    message = refusal(**{"worker_cls": WORKER_CLS, "additional_config": OPTIONS, **conflict})
    assert flag in message
    assert "moe_lightning" in message
