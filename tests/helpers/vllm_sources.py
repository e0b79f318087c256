# SPDX-License-Identifier: Apache-2.0
"""What a vLLM's sources say about the names of the ledger, without importing them: so a version can be checked whose
wheel needs CUDA. Run as a script on an unpacked wheel to record it:

    python -m tests.helpers.vllm_sources FOLDER VERSION      # FOLDER holds vllm/; writes vllm_names/VERSION.json
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

RECORDS = Path(__file__).parents[1] / "unit" / "integration" / "vllm_names"
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.stmt


class VllmSources:
    """root: the folder that holds the package vllm."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def parameters(self, symbol: str) -> list[str] | None:
        """Of `module:attribute.path`: the parameters of a function, [] for what is none; None if it is not there."""
        module, _, path = symbol.partition(":")
        found = self._find(module, path.split("."))
        if found is None:
            return None
        if isinstance(found, ast.ClassDef):
            init = self._in_class(found, self._module_of(found), "__init__")
            if init is None:  # of a dataclass, its fields
                return [name for node in found.body if isinstance(node, ast.AnnAssign) for name in _names_bound(node)]
            found = init
        if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
            return []
        arguments = found.args
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        is_class_method = any(isinstance(d, ast.Name) and d.id == "classmethod" for d in found.decorator_list)
        return names[1:] if is_class_method else names

    @cache  # noqa: B019 (a few objects, as long as the tests)
    def _tree(self, module: str) -> ast.Module | None:
        path = self._root.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                tree = ast.parse(file.read_text())
                for node in ast.walk(tree):
                    node.module_name = module  # type: ignore[attr-defined]
                    node.is_package = file.name == "__init__.py"  # type: ignore[attr-defined]
                return tree
        return None

    @staticmethod
    def _module_of(node: ast.AST) -> str:
        return str(node.module_name)  # type: ignore[attr-defined]

    def _find(self, module: str, path: list[str]) -> Definition | None:
        found = self._in_module(module, path[0])
        for name in path[1:]:
            if not isinstance(found, ast.ClassDef):
                return None
            found = self._in_class(found, self._module_of(found), name)
        return found

    def _in_module(self, module: str, name: str) -> Definition | None:
        tree = self._tree(module)
        if tree is None:
            return None
        lazily = None
        for node in _statements(tree.body):
            if name in _names_bound(node):
                if isinstance(node, ast.ImportFrom):
                    original = next(alias.name for alias in node.names if name in (alias.asname, alias.name))
                    source = _absolute(node, module)
                    return self._in_module(source, original) or self._submodule(source, original)
                return node
            lazily = lazily or self._made_on_demand(node, module, name)
        return lazily or self._submodule(module, name)

    def _submodule(self, module: str, name: str) -> Definition | None:
        tree = self._tree(f"{module}.{name}")
        return None if tree is None or not tree.body else tree.body[0]

    def _made_on_demand(self, node: ast.stmt, module: str, name: str) -> Definition | None:
        """A module's table for its __getattr__: {"Name": ".module:Name"} or {"NAME": lambda: ...}."""
        value = getattr(node, "value", None)
        if not isinstance(value, ast.Dict):
            return None
        for key, entry in zip(value.keys, value.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == name:
                if isinstance(entry, ast.Constant) and isinstance(entry.value, str) and ":" in entry.value:
                    where, _, what = entry.value.partition(":")
                    return self._in_module(module + where if where.startswith(".") else where, what)
                return node
        return None

    def _in_class(self, node: ast.ClassDef, module: str, name: str) -> Definition | None:
        for statement in _statements(node.body):
            if name in _names_bound(statement):
                return statement
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            found = self._in_module(module, base.id) if isinstance(base, ast.Name) else None
            if isinstance(found, ast.ClassDef) and found is not node:
                inherited = self._in_class(found, self._module_of(found), name)
                if inherited is not None:
                    return inherited
        return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those inside of `if` and `try` too."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                yield from _statements(getattr(node, part, []))


def _names_bound(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Assign():
            return [target.id for target in node.targets if isinstance(target, ast.Name)]
        case ast.AnnAssign():
            return [node.target.id] if isinstance(node.target, ast.Name) else []
        case ast.ImportFrom():
            return [alias.asname or alias.name for alias in node.names]
    return []


def _absolute(node: ast.ImportFrom, module: str) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    keep = len(parts) - node.level + bool(node.is_package)  # type: ignore[attr-defined]
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])


def record(root: Path) -> dict[str, list[str] | None]:
    from vllm_moe_lightning.integration.ledger import LEDGER

    sources = VllmSources(root)
    return {symbol: sources.parameters(symbol) for symbol in sorted({entry.symbol for entry in LEDGER})}


if __name__ == "__main__":
    RECORDS.mkdir(exist_ok=True)
    names = record(Path(sys.argv[1]))
    (RECORDS / f"{sys.argv[2]}.json").write_text(json.dumps(names, indent=1) + "\n")
    print(sys.argv[2], "lacks", [symbol for symbol, parameters in names.items() if parameters is None])
