"""A sweep of a planned policy, timed task by task: shows the bubbles that the cost model's max() over resources cannot.

The schedule is the one that the engine would follow, the task times are the cost model's.
"""

from __future__ import annotations

from vllm_moe_lightning.cost_model import pages_per_layer, task_costs
from vllm_moe_lightning.hardware import HardwareProfile
from vllm_moe_lightning.model_spec import MoeModelSpec
from vllm_moe_lightning.pipeline.schedule import SweepShape, make_schedule
from vllm_moe_lightning.pipeline.simulator import SimulatedSweep, simulate
from vllm_moe_lightning.policy.policy import evenly_spread
from vllm_moe_lightning.workload import HrmPolicy, SweepLoad


def simulate_policy(spec: MoeModelSpec, profile: HardwareProfile, policy: HrmPolicy, load: SweepLoad) -> SimulatedSweep:
    """The second of two sweeps under `load`, when the pipeline is warm. Dense layers are taken to be the first ones."""
    dense = spec.num_dense_layers
    resident = {dense + layer for layer in evenly_spread(round(policy.num_resident_layers), spec.num_moe_layers)}
    pages = int(pages_per_layer(spec, policy)) if policy.ffn_on_gpu else 0
    tasks = task_costs(spec, profile, policy, load)
    raises_context = not policy.attention_on_gpu and tasks.kv_load.num_bytes > 0  # s4 has those tasks in any case
    shape = SweepShape(
        num_layers=spec.num_layers,
        num_micro_batches=policy.num_micro_batches,
        pages_per_layer=tuple(0 if layer < dense or layer in resident else pages for layer in range(spec.num_layers)),
        lookahead=policy.lookahead,
        context=frozenset(range(policy.num_micro_batches)) if raises_context else frozenset(),
    )
    schedule = make_schedule("s4" if policy.attention_on_gpu else "cgopipe", shape)
    return simulate(schedule, tasks.duration_s, num_sweeps=2)
