# SPDX-License-Identifier: Apache-2.0
"""Every name of vLLM that the integration imports stands in the ledger, with a reason."""

import ast
from pathlib import Path

import pytest

from vllm_moe_lightning.integration import compat

SOURCES = sorted(Path(compat.__file__).parent.glob("*.py"))
SYMBOLS = {entry.symbol for entry in compat.LEDGER}


def names_from_vllm(source: Path) -> set[str]:
    return {
        f"{node.module}:{alias.name}"
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm"
        for alias in node.names
    }


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_every_name_imported_from_vllm_is_in_the_ledger(source: Path) -> None:
    missing = [
        name
        for name in names_from_vllm(source)
        if not any(symbol == name or symbol.startswith(name + ".") for symbol in SYMBOLS)
    ]
    assert not missing


def test_the_scan_finds_names() -> None:
    assert any(names_from_vllm(source) for source in SOURCES)


@pytest.mark.parametrize("entry", compat.LEDGER, ids=lambda entry: entry.symbol)
def test_every_entry_says_why_and_until_when(entry: compat.TouchedName) -> None:
    assert entry.reason
    assert entry.remove_when
