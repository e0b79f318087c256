# SPDX-License-Identifier: Apache-2.0
"""Session-wide checkpoints and oracle answers: each is made once, whichever test asks first."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# No deadline per example, since a busy machine would fail tests that are right; the same examples in every run.
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True)
hypothesis.settings.load_profile("steady")

# Functions that stock vLLM needs before it loads an architecture (tests/helpers/engine.py, `preload`).
STOCK_PRELOAD = {"dbrx": ["vllm_moe_lightning.integration.dbrx:apply"]}


def pytest_unconfigure() -> None:
    """Libraries that count what is left at the end want it collected (young_heap)."""
    gc.unfreeze()


def _key(*parts: Any) -> str:
    return json.dumps(parts, sort_keys=True, default=str)


@pytest.fixture(scope="module", autouse=True)
def young_heap() -> None:
    """What earlier modules left behind (imports, reports) is not walked again by each collection: by the end of the
    suite that takes longer than many a test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint("mixtral", num_layers=4, sliding_window=32)`: arguments of write_checkpoint. Shared, so read only."""
    from tests.helpers.checkpoints import write_checkpoint

    folders: dict[str, Path] = {}

    def get(arch: str, **options: Any) -> Path:
        key = _key(arch, options)
        if key not in folders:
            folders[key] = write_checkpoint(tmp_path_factory.mktemp(arch), arch, **options)
        return folders[key]

    return get


@pytest.fixture(scope="session")
def hf_result(checkpoint: Callable[..., Path]) -> Callable[..., Any]:
    """`hf_result("mixtral", num_prompts=8, num_layers=4)` -> OracleResult of the standard prompts by transformers.

    Other prompts: `prompts=[...]`. Further arguments: `max_tokens`, `oracle_dtype`; the rest go to `checkpoint`.
    """
    from tests.helpers.oracle import OracleResult, greedy
    from tests.helpers.prompts import NUM_NEW_TOKENS, standard_prompts

    results: dict[str, OracleResult] = {}

    def get(
        arch: str,
        *,
        num_prompts: int = 64,
        prompts: list[list[int]] | None = None,
        max_tokens: int = NUM_NEW_TOKENS,
        oracle_dtype: Any = None,
        **options: Any,
    ) -> OracleResult:
        dtype = {} if oracle_dtype is None else {"dtype": oracle_dtype}
        # A smaller standard set is the beginning of a larger one, and each prompt is answered by itself.
        key = _key(arch, "standard" if prompts is None else prompts, max_tokens, dtype, options)
        prompts = standard_prompts(num_prompts) if prompts is None else prompts
        if key not in results or len(results[key].token_ids) < len(prompts):
            results[key] = greedy(checkpoint(arch, **options), prompts, max_tokens=max_tokens, **dtype)
        return results[key].first(len(prompts))

    return get


@pytest.fixture(scope="session")
def stock_result(checkpoint: Callable[..., Path]) -> Callable[..., Any]:
    """`stock_result("mixtral", num_prompts=8, runner="v2")` -> EngineResult of vLLM without the plugin.

    Other prompts: `prompts=[...]`. Further arguments: `sampling`, `engine_args`, `env`; the rest go to `checkpoint`.
    """
    from tests.helpers.engine import EngineResult, Job, run_engine
    from tests.helpers.prompts import standard_prompts

    results: dict[str, EngineResult] = {}

    def get(
        arch: str,
        *,
        num_prompts: int = 64,
        prompts: list[list[int]] | None = None,
        runner: str = "v1",
        sampling: Any = None,
        engine_args: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> EngineResult:
        prompts = standard_prompts(num_prompts) if prompts is None else prompts
        key = _key(arch, prompts, runner, sampling, engine_args, env, options)
        if key not in results:
            results[key] = run_engine(
                checkpoint(arch, **options),
                [Job(prompts, sampling or {})],
                plugin=False,
                runner=runner,
                engine_args=engine_args,
                env=env,
                preload=STOCK_PRELOAD.get(arch, []),
            )
        return results[key]

    return get
