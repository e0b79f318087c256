# SPDX-License-Identifier: Apache-2.0
"""Options that `run` has no flag for: as JSON or as they stand, and never twice."""

from typing import Any

import pytest

from vllm_moe_lightning.cli.run import _with_others


@pytest.mark.parametrize(
    ("text", "value"),
    [("experts=fetched", "fetched"), ("expert_slots=12", 12), ("stall_timeout_s=1.5", 1.5), ("hardware=null", None)],
)
def test_a_value_is_json_or_as_it_stands(text: str, value: Any) -> None:
    assert _with_others({"page_mib": 1.0}, [text]) == {"page_mib": 1.0, text.partition("=")[0]: value}


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (["experts"], "--option experts: expected NAME=VALUE"),
        (["page_mib=2"], r"page_mib is given twice, the other time as 1\.0"),
        (["experts=cpu", "experts=device"], "experts is given twice, the other time as 'cpu'"),
    ],
)
def test_what_is_given_twice_or_without_a_value_is_refused(others: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _with_others({"page_mib": 1.0}, others)
