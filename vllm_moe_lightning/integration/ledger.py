"""The ledger: every name of vLLM that we touch, why, and when the entry can go. Data; compat.py checks it."""

from __future__ import annotations

from vllm_moe_lightning.integration.ledger_front import FRONT
from vllm_moe_lightning.integration.ledger_worker import WORKER
from vllm_moe_lightning.integration.touched_name import TouchedName

LEDGER: tuple[TouchedName, ...] = (*FRONT, *WORKER)
