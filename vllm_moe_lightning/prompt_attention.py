"""What prompts' attention takes of each processor and of the link, by the place that the policy gives it.

A prompt that a sweep reads whole, or the first chunk of one, attends to what is at hand; a later chunk has a context in
the host's cache. The two have places of their own (HrmPolicy.prompts_on_gpu, context_query_tokens).
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_moe_lightning.model_spec import MoeModelSpec
from vllm_moe_lightning.workload import HrmPolicy, SweepLoad


@dataclass(frozen=True)
class PromptAttention:
    """Of one layer, under some load. A pair is a query token and a key that it sees."""

    gpu_pairs: float
    cpu_pairs: float
    cpu_tokens: float
    """Whose queries go down, and whose outputs come up."""
    cpu_keys: float
    """Tokens of the cache that the CPU reads for them, each once."""
    raised_keys: float
    """Cached tokens that come up for the GPU, each once."""

    def cpu_flops(self, spec: MoeModelSpec, flops_per_logit: float) -> float:
        return self.cpu_pairs * cpu_flops_per_pair(spec, flops_per_logit)

    def cpu_bytes(self, spec: MoeModelSpec) -> float:
        attention = spec.attention
        new = self.cpu_tokens * (attention.q_elements_per_token + attention.out_elements_per_token)
        return self.cpu_keys * spec.kv_bytes_per_token_layer + new * spec.widths.activation_bytes


def cpu_flops_per_pair(spec: MoeModelSpec, flops_per_logit: float) -> float:
    """Products of a pair, and what its logits' exponentials cost beside them."""
    attention = spec.attention
    return attention.decode_flops_per_pair + attention.num_q_heads * flops_per_logit


def prompt_attention(spec: MoeModelSpec, policy: HrmPolicy, load: SweepLoad) -> PromptAttention:
    """The first chunk of a prompt, which may be all of it, in one place, the later ones in another or the same."""
    cuts, seqs = load.prefill_cuts, load.prefill_seqs
    pairs, tokens = seqs * spec.mean_causal_pairs(load.prefill_len), seqs * load.prefill_len
    first_pairs, first_tokens, context = pairs * cuts.first_pairs, tokens * cuts.first_tokens, seqs * cuts.context
    later_pairs, later_tokens = pairs - first_pairs, tokens - first_tokens
    first_on_cpu = 0.0 if policy.prompts_on_gpu else 1.0
    later_on_cpu = 0.0 if policy.attention_on_gpu else 1.0 - _on_gpu(policy.context_query_tokens, cuts.later_chunk)
    return PromptAttention(
        gpu_pairs=first_pairs * (1.0 - first_on_cpu) + later_pairs * (1.0 - later_on_cpu),
        cpu_pairs=first_pairs * first_on_cpu + later_pairs * later_on_cpu,
        cpu_tokens=first_tokens * first_on_cpu + later_tokens * later_on_cpu,
        cpu_keys=first_tokens * first_on_cpu + (context + later_tokens) * later_on_cpu,
        raised_keys=context * (1.0 - later_on_cpu),
    )


def _on_gpu(least_query_tokens: int, chunk: float) -> float:
    """1 or 0, by row where there are several."""
    return (chunk >= least_query_tokens) * 1.0 if least_query_tokens else 0.0
