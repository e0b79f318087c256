# SPDX-License-Identifier: Apache-2.0
"""The public name: `--worker-cls vllm_moe_lightning.worker.MoELightningWorker`.

The ledger is checked before the worker's own imports, which another vLLM might not have.
"""

from vllm_moe_lightning.integration.compat import require_ledger

require_ledger()

from vllm_moe_lightning.integration.worker import MoELightningWorker  # noqa: E402

__all__ = ["MoELightningWorker"]
