"""Tries every name of the ledger against the installed vLLM: explicit use of the plugin fails with one sentence where
one is gone. Nothing here runs unless the plugin was asked for.
"""

from __future__ import annotations

import importlib
import inspect
import sys

from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.integration.ledger import LEDGER
from vllm_moe_lightning.integration.touched_name import TouchedName

SUPPORTED_VERSIONS = ((0, 32), (0, 33))
CHECKED_VERSIONS = "0.32.0 (run), 0.33.0 (names and parameters in its sources)"


def require_supported_version() -> None:
    """Raises UnsupportedError, one sentence, for a vLLM that this package was not checked with."""
    import vllm

    release = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2] if part.isdigit())
    if release not in SUPPORTED_VERSIONS:
        supported = ", ".join(".".join(map(str, version)) for version in SUPPORTED_VERSIONS)
        raise UnsupportedError(
            f"vllm_moe_lightning works with vLLM {supported}.x, found {vllm.__version__}; install one of these, or "
            "drop --worker-cls to run stock vLLM"
        )


def missing_names(ledger: tuple[TouchedName, ...] = LEDGER) -> list[str]:
    """Symbols of the ledger that the installed vLLM does not have, or has with other parameters."""
    from vllm.platforms import current_platform

    platform = "cpu" if current_platform.is_cpu() else "cuda"
    touched = [
        entry
        for entry in ledger
        if entry.platform in ("any", platform) and (entry.package is None or entry.package in sys.modules)
    ]
    return [entry.symbol for entry in touched if not _is_there(entry)]


def require_ledger() -> None:
    """Raises UnsupportedError if the installed vLLM moved a name that we touch."""
    require_supported_version()
    if missing := missing_names():
        import vllm

        raise UnsupportedError(
            f"vllm_moe_lightning cannot run on vLLM {vllm.__version__}: {missing} changed (checked with "
            f"{CHECKED_VERSIONS}); upgrade vllm-moe-lightning, or drop --worker-cls to run stock vLLM"
        )


def _is_there(entry: TouchedName) -> bool:
    module_name, _, path = entry.symbol.partition(":")
    try:
        value: object = importlib.import_module(module_name)
        for part in path.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError):
        return False
    if not entry.parameters:
        return True
    names = [name for name in inspect.signature(value).parameters if name in entry.parameters]  # type: ignore[arg-type]
    return names == list(entry.parameters)
