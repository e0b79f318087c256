"""How many streamed layers' experts the CPU should compute in a sweep of so many tokens, by the cost model.

A streamed layer costs its bytes on the link whatever the batch; on the CPU it costs the bytes of the experts that
tokens go to, at the speed of host memory. With few tokens the CPU wins, and both can work at once, on other layers.
"""

from __future__ import annotations

from dataclasses import replace

from vllm_moe_lightning.cost_model import sweep_cost
from vllm_moe_lightning.hardware import HardwareProfile
from vllm_moe_lightning.kernel_costs import Machine, experts_work
from vllm_moe_lightning.model_spec import MoeModelSpec
from vllm_moe_lightning.resources import HrmResource
from vllm_moe_lightning.workload import HrmPolicy, SweepLoad

WORTH_IT = 0.9
"""Of the time with all experts on the device: less gained is no reason to move."""


def cpu_expert_layers(
    spec: MoeModelSpec, machine: HardwareProfile, policy: HrmPolicy, context: float, most_tokens: int
) -> list[tuple[int, int]]:
    """[(most tokens of a sweep, layers on the CPU)], ascending; beyond the last entry none.

    context: mean length of the decoding sequences.
    """
    table: list[tuple[int, int]] = []
    tokens = 1
    while tokens <= most_tokens:
        layers = _best_count(spec, machine, policy, context, tokens)
        if not layers:
            break
        if table and table[-1][1] == layers:
            table.pop()
        table.append((tokens, layers))
        tokens *= 2
    return table


def _best_count(spec: MoeModelSpec, machine: HardwareProfile, policy: HrmPolicy, context: float, tokens: int) -> int:
    streamed = spec.num_moe_layers - int(policy.num_resident_layers)
    load = SweepLoad(decode_seqs=tokens, decode_context=context, prefill_seqs=0.0, prefill_len=0.0)
    count = min(policy.num_micro_batches, tokens)
    policy = replace(policy, num_micro_batches=count, micro_batch_size=-(-tokens // count), ffn_on_gpu=True)
    busy = sweep_cost(spec, machine, policy, load).busy_s
    share = experts_work(spec, tokens / count)
    link_s = spec.expert_layer_bytes / machine.link.h2d_bytes_per_s
    gpu_s = count * Machine(machine).gpu_experts_s(*share)
    cpu_s = count * (Machine(machine).cpu_experts_s(*share) + machine.overheads.cpu_task_s)

    def time_s(on_cpu: int) -> float:
        return max(
            busy[HrmResource.H2D] - on_cpu * link_s,
            # What the CPU computes the device waits for: with few tokens, micro-batches hide little of it.
            busy[HrmResource.GPU] + on_cpu * (cpu_s - gpu_s),
            busy[HrmResource.CPU] + on_cpu * cpu_s,
        )

    best = min(range(streamed + 1), key=time_s)
    return best if time_s(best) < WORTH_IT * time_s(0) else 0
