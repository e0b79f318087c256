"""The general plugin: called once or more in every vLLM process, before anything is configured.

Decides only whether the plugin was asked for. Installed but not asked for, it leaves one inert wrapper behind and
imports nothing of ours beyond this file.
"""

from __future__ import annotations

import functools
from typing import Any

WORKER_CLS = "vllm_moe_lightning.worker.MoELightningWorker"
SCHEDULER_MODULE = "vllm_moe_lightning.integration.scheduler"
OPTIONS_KEY = "moe_lightning"


def register() -> None:
    """Entry point `vllm.general_plugins`. Idempotent; a vLLM without the hook is left alone (explicit use fails)."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    original = getattr(platform, "apply_config_platform_defaults", None)
    if original is None or getattr(original, "is_moe_lightning", False):
        return

    @functools.wraps(original)
    def apply_config_platform_defaults(vllm_config: Any) -> None:
        original(vllm_config)
        if is_asked_for(vllm_config):
            # First: with another vLLM, the imports of our other files may fail, and with less than a sentence.
            from vllm_moe_lightning.integration.compat import require_ledger

            require_ledger()
            from vllm_moe_lightning.integration.configure import configure

            configure(vllm_config)

    apply_config_platform_defaults.is_moe_lightning = True  # type: ignore[attr-defined]
    platform.apply_config_platform_defaults = staticmethod(apply_config_platform_defaults)


def is_asked_for(vllm_config: Any) -> bool:
    """By worker class, by scheduler class, or by options."""
    scheduler_cls = vllm_config.scheduler_config.scheduler_cls
    additional = vllm_config.additional_config
    return (
        vllm_config.parallel_config.worker_cls == WORKER_CLS
        or (isinstance(scheduler_cls, str) and scheduler_cls.startswith("vllm_moe_lightning."))
        or (isinstance(additional, dict) and OPTIONS_KEY in additional)
    )
