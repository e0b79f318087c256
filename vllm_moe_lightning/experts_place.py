"""What becomes of streamed layers' experts in a sweep of so many tokens, by the cost model: how many layers the CPU
should compute, and up to how many tokens it is faster to fetch the experts that are asked for.

A streamed layer costs its bytes on the link whatever the batch; on the CPU it costs the bytes of the experts that
tokens go to, at the speed of host memory. With few tokens the CPU wins, and both can work at once, on other layers.
"""

from __future__ import annotations

import math
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
        layers = _SmallSweep(spec, machine, policy, context, tokens).best_on_cpu()
        if not layers:
            break
        if table and table[-1][1] == layers:
            table.pop()
        table.append((tokens, layers))
        tokens *= 2
    return table


def fetched_up_to_tokens(
    spec: MoeModelSpec, machine: HardwareProfile, policy: HrmPolicy, context: float, num_slots: int, most_tokens: int
) -> int:
    """The largest sweep, up to most_tokens, for which fetching experts is predicted to take less time than streaming
    layers; 0 if there is none. num_slots: experts that have room on the device.

    Takes all experts to be asked for alike, which finds them on the device least often: real routing does better.
    """
    low, high = 0, most_tokens + 1
    while high - low > 1:
        tokens = (low + high) // 2
        if _SmallSweep(spec, machine, policy, context, tokens).is_better_fetched(num_slots):
            low = tokens
        else:
            high = tokens
    return low


def tokens_asking_for(share: float, num_experts: int, top_k: int) -> int:
    """The most tokens that ask for no more than this share (0..1) of a layer's experts, if they ask for all alike."""
    if top_k >= num_experts:
        return 0
    return int(math.log(1.0 - share) / math.log(1.0 - top_k / num_experts))


class _SmallSweep:
    """A sweep of so many decode tokens that streams its layers, and what other places of the experts change."""

    def __init__(
        self, spec: MoeModelSpec, machine: HardwareProfile, policy: HrmPolicy, context: float, tokens: int
    ) -> None:
        self.spec, self.machine, self.tokens = spec, machine, tokens
        self.streamed = spec.num_moe_layers - int(policy.num_resident_layers)
        self.count = min(policy.num_micro_batches, tokens)
        load = SweepLoad(decode_seqs=tokens, decode_context=context, prefill_seqs=0.0, prefill_len=0.0)
        policy = replace(policy, num_micro_batches=self.count, micro_batch_size=-(-tokens // self.count))
        self.busy = sweep_cost(spec, machine, replace(policy, ffn_on_gpu=True), load).busy_s
        self.layer_link_s = spec.expert_layer_bytes / machine.link.h2d_bytes_per_s

    def is_better_fetched(self, num_slots: int) -> bool:
        spec, link = self.spec, self.machine.link
        missed = max(0.0, 1.0 - num_slots / (self.streamed * spec.num_experts)) if self.streamed else 0.0
        share = missed * spec.expected_experts_touched(self.tokens) / spec.num_experts
        # Routing goes down before anything can come up, and a micro-batch in flight hides it from the next one only.
        routing_s = self.streamed * self.count * 2 * link.latency_s
        fetched_s = max(
            self.busy[HrmResource.H2D] - self.streamed * (1.0 - share) * self.layer_link_s + routing_s,
            self.busy[HrmResource.GPU] + routing_s,
            self.busy[HrmResource.CPU],
        )
        return fetched_s < WORTH_IT * max(self.busy[r] for r in (HrmResource.H2D, HrmResource.GPU, HrmResource.CPU))

    def best_on_cpu(self) -> int:
        """Layers whose experts the CPU should compute."""
        share = experts_work(self.spec, self.tokens / self.count)
        gpu_s = self.count * Machine(self.machine).gpu_experts_s(*share)
        cpu_s = self.count * (Machine(self.machine).cpu_experts_s(*share) + self.machine.overheads.cpu_task_s)

        def time_s(on_cpu: int) -> float:
            return max(
                self.busy[HrmResource.H2D] - on_cpu * self.layer_link_s,
                # What the CPU computes the device waits for: with few tokens, micro-batches hide little of it.
                self.busy[HrmResource.GPU] + on_cpu * (cpu_s - gpu_s),
                self.busy[HrmResource.CPU] + on_cpu * cpu_s,
            )

        best = min(range(self.streamed + 1), key=time_s)
        return best if time_s(best) < WORTH_IT * time_s(0) else 0
