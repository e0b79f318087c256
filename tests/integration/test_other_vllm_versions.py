# SPDX-License-Identifier: Apache-2.0
"""With a vLLM that we were not checked with, asking for us fails in one sentence, and everything else works (B38)."""

from __future__ import annotations

import pytest

from tests.helpers.engine import EngineFailedError, Job, run_engine
from tests.helpers.prompts import standard_prompts
from tests.helpers.start_probes import MODULE_NEEDED_BY_US_ONLY, findings, probe

pytestmark = pytest.mark.integration

PROMPTS = standard_prompts(2)
CHANGES = {
    "pretend_vllm_is_older": ("works with vLLM 0.32, 0.33.x, found 0.31.2", "drop --worker-cls"),
    "pretend_vllm_is_newer": ("works with vLLM 0.32, 0.33.x, found 0.34.0", "drop --worker-cls"),
    "hide_a_module": (MODULE_NEEDED_BY_US_ONLY, "upgrade vllm-moe-lightning"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_asking_for_us_fails_fast_and_in_one_sentence(checkpoint, change):
    with pytest.raises(EngineFailedError) as failure:
        run_engine(checkpoint("mixtral"), [Job(PROMPTS)], plugin=True, preload=[probe(change)])
    assert failure.value.returncode == 1
    log = failure.value.log
    assert "Starting to load model" not in log
    (message,) = [line for line in log.splitlines() if "UnsupportedError: " in line]
    for part in CHANGES[change]:
        assert part in message


@pytest.mark.parametrize("change", CHANGES)
def test_other_use_of_vllm_works(checkpoint, stock_result, change):
    """The plugin is loaded, as it is whenever the package is installed."""
    preload = [probe("load_installed_plugins"), probe(change)]
    result = run_engine(checkpoint("mixtral"), [Job(PROMPTS)], plugin=False, preload=preload)
    assert result.token_ids == stock_result("mixtral", num_prompts=len(PROMPTS)).token_ids
    assert findings(result.log, "MODULES"), "the plugin was not loaded"


@pytest.mark.parametrize("change", ["pretend_vllm_is_older", "hide_a_module"])
def test_the_worker_class_itself_checks_before_its_own_imports(checkpoint, change):
    """Where the plugin is not loaded, or vLLM has no hook for it: the sentence is the same."""
    preload = [probe("leave_out_plugins"), probe(change)]
    with pytest.raises(EngineFailedError) as failure:
        run_engine(checkpoint("mixtral"), [Job(PROMPTS)], plugin=True, preload=preload)
    (message,) = {line for line in failure.value.log.splitlines() if "UnsupportedError: " in line}
    for part in CHANGES[change]:
        assert part in message


def test_every_entry_of_the_ledger_is_in_the_installed_vllm(checkpoint):
    result = run_engine(checkpoint("mixtral"), [], plugin=True, preload=[probe("report_ledger")])
    (ledger,) = findings(result.log, "LEDGER")
    assert ledger["missing"] == []
    assert len(ledger["entries"]) > 10
