"""The general plugin: called once or more in every vLLM process, before anything is configured.

Decides only whether the plugin was asked for. Installed but not asked for, it leaves two inert wrappers behind and
imports nothing of ours beyond this file.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

WORKER_CLS = "vllm_moe_lightning.worker.MoELightningWorker"
SCHEDULER_MODULE = "vllm_moe_lightning.integration.scheduler"
OPTIONS_KEY = "moe_lightning"
STEPPED_ASIDE_KEY = "moe_lightning_stepped_aside"
"""In `additional_config`: the planner has left this engine to stock vLLM, and why."""


def register() -> None:
    """Entry point `vllm.general_plugins`. Idempotent; a vLLM without the hook is left alone (explicit use fails)."""
    _note_what_the_user_gives()
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


def _note_what_the_user_gives() -> None:
    """Only where engine arguments are made into a configuration: elsewhere their module is not even imported."""
    arguments = getattr(sys.modules.get("vllm.engine.arg_utils"), "EngineArgs", None)
    name = "_set_default_max_num_seqs_and_batched_tokens_args"
    original = getattr(arguments, name, None)
    if original is None or getattr(original, "is_moe_lightning", False):
        return

    @functools.wraps(original)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _asks_for_us(self.worker_cls, self.scheduler_cls, self.additional_config):
            from vllm_moe_lightning.integration.given_limits import note_given_limits

            note_given_limits(self)
        return original(self, *args, **kwargs)

    noting.is_moe_lightning = True  # type: ignore[attr-defined]
    setattr(arguments, name, noting)


def is_asked_for(vllm_config: Any) -> bool:
    """By worker class, by scheduler class, or by options; and not where we have stepped aside."""
    return _asks_for_us(
        vllm_config.parallel_config.worker_cls,
        vllm_config.scheduler_config.scheduler_cls,
        vllm_config.additional_config,
    )


def _asks_for_us(worker_cls: object, scheduler_cls: object, additional: object) -> bool:
    keys = additional if isinstance(additional, dict) else {}
    return STEPPED_ASIDE_KEY not in keys and (
        worker_cls == WORKER_CLS
        or (isinstance(scheduler_cls, str) and scheduler_cls.startswith("vllm_moe_lightning."))
        or OPTIONS_KEY in keys
    )
