"""From how many new tokens on a row's cached context should come up to the device, by the cost model.

The link brings each cached token once, whatever the row computes; the CPU computes with it for each new token.
"""

from __future__ import annotations

import math

from vllm_moe_lightning.hardware import HardwareProfile
from vllm_moe_lightning.kernel_costs import Machine
from vllm_moe_lightning.model_spec import MoeModelSpec
from vllm_moe_lightning.prompt_attention import cpu_flops_per_pair

MOST_QUERY_TOKENS = 1 << 16


def context_query_tokens(spec: MoeModelSpec, machine: HardwareProfile) -> int:
    """Least new tokens for which the link takes less time per cached token than the CPU; 0: there is no such number.

    Per cached token: link_s = bytes / h2d, cpu_s = new tokens * FLOPs / (FLOP/s), of one layer.
    """
    link_s = spec.kv_bytes_per_token_layer / machine.link.h2d_bytes_per_s
    flops = cpu_flops_per_pair(spec, machine.efficiencies.cpu_logit_flops)
    cpu_s_per_query = Machine(machine).cpu_prompt_attention_s(flops, 0.0)
    least = math.floor(link_s / cpu_s_per_query) + 1
    return least if least <= MOST_QUERY_TOKENS else 0
