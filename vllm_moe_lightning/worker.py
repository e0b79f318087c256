"""The public name: `--worker-cls vllm_moe_lightning.worker.MoELightningWorker`."""

from vllm_moe_lightning.integration.worker import MoELightningWorker

__all__ = ["MoELightningWorker"]
