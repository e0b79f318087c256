# SPDX-License-Identifier: Apache-2.0
"""The rehearsed start's own words: whose plugins it loads, and what it makes of vLLM's errors."""

from __future__ import annotations

import os
from importlib.metadata import EntryPoint

import pytest

from vllm_moe_lightning.integration import rehearsal

PYDANTIC = """1 validation error for ModelConfig
  Value error, User-specified max_model_len (100000) is greater than the derived one [type=value_error, input_value=...]
    For further information visit https://errors.pydantic.dev/2.13/v/value_error"""


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (PYDANTIC, "User-specified max_model_len (100000) is greater than the derived one"),
        ("Can't load the configuration of 'x'.\nIf you were trying", "Can't load the configuration of 'x'."),
        ("", "ValueError"),
    ],
)
def test_the_reason_is_found_in_an_error(message: str, reason: str) -> None:
    assert rehearsal._first_reason(ValueError(message)) == reason


@pytest.mark.parametrize(
    ("allowed", "left"),
    [(None, "theirs"), ("moe_lightning,other", "other"), ("other", "other"), ("moe_lightning", "")],
)
def test_all_plugins_but_ours_stay(allowed: str | None, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [EntryPoint(name, "x:y", rehearsal.PLUGIN_GROUP) for name in ("theirs", rehearsal.OURS)]
    monkeypatch.setattr(rehearsal, "entry_points", lambda group: installed)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    rehearsal._leave_our_plugin_out()
    assert os.environ["VLLM_PLUGINS"] == left
