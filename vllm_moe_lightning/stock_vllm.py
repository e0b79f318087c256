"""What stock vLLM would do with the same model and machine, by the same cost model: all on the device, or its offload.

Stock runs a step as one batch, attends on the device and keeps the KV cache there. Its offload moves each offloaded
layer once per step, on one stream; here all of that is taken to overlap, which is the best that it can do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_moe_lightning.hardware import HardwareProfile
from vllm_moe_lightning.memory_model import kv_bytes
from vllm_moe_lightning.model_spec import MoeModelSpec
from vllm_moe_lightning.policy.grid import MS, PlanTable, tabulate
from vllm_moe_lightning.policy.limits import PlanLimits
from vllm_moe_lightning.workload import Workload

ALL_KV = 1.0  # the whole cache on the device


@dataclass(frozen=True)
class StockRun:
    """The fastest batch of one kind of run."""

    num_resident_layers: int
    num_seqs: int
    tokens_per_s: float
    weight_bytes: float
    """That stay on the device."""
    kv_bytes: float


@dataclass(frozen=True)
class StockRuns:
    """None: does not fit."""

    on_device: StockRun | None
    """Weights and KV cache both."""
    offload: StockRun | None
    """At least one layer offloaded."""


def stock_runs(spec: MoeModelSpec, machine: HardwareProfile, workload: Workload, limits: PlanLimits) -> StockRuns:
    """limits: batch sizes as for our own plan."""
    stock = PlanLimits(
        max_num_seqs=limits.max_num_seqs,
        fill_max_num_seqs=limits.fill_max_num_seqs,
        num_micro_batches=1,
        attention_on_gpu=True,
        ffn_on_gpu=True,
    )
    table = tabulate(spec, machine, workload, stock)
    layers = spec.num_moe_layers
    offloads = [run for resident in range(layers) if (run := _fastest(table, spec, workload, resident)) is not None]
    return StockRuns(
        on_device=_fastest(table, spec, workload, layers),
        offload=max(offloads, key=lambda run: run.tokens_per_s, default=None),
    )


def _fastest(table: PlanTable, spec: MoeModelSpec, workload: Workload, resident: int) -> StockRun | None:
    fits = (table.min_resident <= resident) & (resident <= table.max_resident)
    fits &= table.gpu_gb.at(resident, ALL_KV, 0) <= table.gpu_budget_gb
    fits &= table.host_gb.at(resident, ALL_KV, 0) <= table.host_budget_gb
    if not fits.any():
        return None
    ms_per_token = np.where(fits, table.ms_per_token(resident, ALL_KV, 0), np.inf)
    row = int(np.argmin(ms_per_token))
    policy = table.policy(row, (float(resident), ALL_KV, 0.0))
    return StockRun(
        num_resident_layers=resident,
        num_seqs=policy.batch_size,
        tokens_per_s=1.0 / (float(ms_per_token[row]) * MS),
        weight_bytes=spec.always_resident_bytes + resident * spec.expert_layer_bytes,
        kv_bytes=kv_bytes(spec, workload, policy),
    )
