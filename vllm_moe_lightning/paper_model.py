"""The paper's model as its artifact computes it, errors and all: to check our reading of it, never to plan with.

What the artifact gets wrong, on purpose kept here: attention counts one of QK^T and PV; all experts are always touched;
the context is the longest, not the mean; prefill, projections and LM head take no time; embeddings take no memory; FFN
activations are not times k; the head size is taken as hidden / heads. Only A_g = 0, F_g = 1, which its search always
returns: the artifact prints no figure to check any other against.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_moe_lightning.hardware import GIB

GPU_MEMORY_SHARE = 0.86
CPU_MEMORY_SHARE = 0.8
PRINTED_GPU_MEMORY_SHARE = 0.9  # what it prints as the limit, while the constraint has 0.86
WORKSPACE_FACTOR = 1.2


@dataclass(frozen=True)
class PaperModel:
    """Sizes under the names of the paper's Table 1. fp16 throughout."""

    num_layers: int  # l
    hidden: int  # h1
    intermediate: int  # h2
    num_q_heads: int  # n_q
    num_kv_heads: int  # n_kv
    num_experts: int  # n_e
    top_k: int  # k

    @property
    def kv_hidden(self) -> float:
        return self.hidden * self.num_kv_heads / self.num_q_heads

    @property
    def expert_layer_bytes(self) -> float:
        """wi"""
        return 6 * self.hidden * self.intermediate * self.num_experts

    @property
    def other_bytes(self) -> float:
        """w_other: the projections of all layers, and nothing else."""
        return self.num_layers * (4 * self.hidden**2 + 4 * self.hidden**2 * self.num_kv_heads / self.num_q_heads)

    def attention_flops(self, tokens: float, query: float, context: float) -> float:
        """Counts one of the two products, and a softmax."""
        head_dim = self.hidden / self.num_q_heads
        return (
            2 * tokens * query * context * self.num_q_heads * head_dim + 2 * tokens * query * context * self.num_q_heads
        )

    def attention_bytes(self, tokens: float, query: float, context: float) -> float:
        head_dim = self.hidden / self.num_q_heads
        return 2 * (
            2 * tokens * query * self.num_q_heads * head_dim + 2 * tokens * context * self.num_kv_heads * head_dim
        )

    def ffn_flops(self, tokens: float) -> float:
        return 6 * tokens * self.hidden * self.intermediate * self.top_k

    def ffn_bytes(self, tokens: float) -> float:
        return 2 * tokens * (self.hidden + self.intermediate) + self.expert_layer_bytes


@dataclass(frozen=True)
class PaperHardware:
    """Peaks of one GPU, of which `tp_size` share the work; the link is counted once."""

    gpu_memory_bytes: float  # m_g
    gpu_bytes_per_s: float  # b_g
    gpu_flops_per_s: float  # p_g
    link_bytes_per_s: float  # b_cg
    cpu_memory_bytes: float  # m_c
    cpu_bytes_per_s: float  # b_c
    cpu_flops_per_s: float  # p_c
    tp_size: int = 1
    padded_prefill_form: bool = False
    """The artifact has two forms of the prefill's memory; the second is in comments and fits only padded L4 runs."""


@dataclass(frozen=True)
class PaperPlan:
    """A policy and what the artifact would print about it."""

    micro_batch_size: int
    num_micro_batches: int
    weights_gpu_ratio: float  # r_w, or w_g
    link_s: float  # ctog, of one layer
    gpu_s: float
    cpu_s: float
    gpu_memory_bytes: float
    cpu_memory_bytes: float
    decode_tokens_per_s: float

    @property
    def batch_size(self) -> int:
        return self.micro_batch_size * self.num_micro_batches

    @property
    def layer_time_s(self) -> float:
        # Eq. 12
        return max(self.link_s, self.gpu_s, self.cpu_s)


def _gpu_memory_bytes(
    model: PaperModel, hardware: PaperHardware, prompt_len: float, mu: int, n: int, ratio: float
) -> float:
    """home + workspace: affine in the ratio, with slope wi * (l - 2)."""
    tp, h1, s, batch = hardware.tp_size, model.hidden, prompt_len, mu * n
    weights = model.other_bytes + model.expert_layer_bytes * model.num_layers * ratio
    decode_home = weights + 4 * h1 * batch * tp
    if hardware.padded_prefill_form:
        prefill_home = weights + tp * 8 * h1 * mu * s + 8 * s * model.kv_hidden * mu
    else:
        prefill_home = weights + tp * (4 * h1 * mu * s + 2 * h1 * batch * s) + 8 * s * model.kv_hidden * mu
    intermediates = 2 * mu * model.top_k * h1 * tp * s + 6 * mu * model.top_k * model.intermediate * s
    workspace = 2 * model.expert_layer_bytes * (1 - ratio) + WORKSPACE_FACTOR * intermediates
    return max(prefill_home, decode_home) + workspace


def _cpu_memory_bytes(
    model: PaperModel, hardware: PaperHardware, prompt_len: float, gen_len: int, batch: int, ratio: float
) -> float:
    """Weights with two pinned layers, KV, and the hidden states of the prefill."""
    weights = model.expert_layer_bytes * (1 - ratio) * (model.num_layers + 2)
    kv = 4 * (prompt_len + gen_len) * model.kv_hidden * batch * model.num_layers
    return weights + kv + 2 * model.hidden * batch * prompt_len * hardware.tp_size


def paper_plan(
    model: PaperModel, hardware: PaperHardware, prompt_len: float, gen_len: int, mu: int, n: int
) -> PaperPlan | None:
    """The LP of one (mu, n_ub), solved in closed form: more of the weights on the GPU never hurts, so the ratio is
    what GPU memory allows. None where that is below 0 or the rest does not fit the CPU."""
    batch, wi = mu * n, model.expert_layer_bytes
    without = _gpu_memory_bytes(model, hardware, prompt_len, mu, n, 0.0)
    budget = GPU_MEMORY_SHARE * hardware.gpu_memory_bytes * hardware.tp_size
    ratio = (budget - without) / (wi * (model.num_layers - 2))
    if ratio < 0:
        return None
    ratio = min(ratio, 1.0)
    cpu_memory = _cpu_memory_bytes(model, hardware, prompt_len, gen_len, batch, ratio)
    if cpu_memory > CPU_MEMORY_SHARE * hardware.cpu_memory_bytes:
        return None
    tp, context = hardware.tp_size, prompt_len + gen_len
    gpu_s = n * max(
        model.ffn_flops(mu) / (hardware.gpu_flops_per_s * tp),
        model.ffn_bytes(mu) / (hardware.gpu_bytes_per_s * tp),
    )
    cpu_s = n * max(
        model.attention_flops(mu, 1, context) / hardware.cpu_flops_per_s,
        model.attention_bytes(mu, 1, context) / hardware.cpu_bytes_per_s,
    )
    link_s = wi * (1 - ratio) / hardware.link_bytes_per_s
    layer_s = max(link_s, gpu_s, cpu_s)
    return PaperPlan(
        mu,
        n,
        ratio,
        link_s,
        gpu_s,
        cpu_s,
        _gpu_memory_bytes(model, hardware, prompt_len, mu, n, ratio),
        cpu_memory,
        batch * gen_len / (layer_s * (gen_len - 1) * model.num_layers),
    )


def _micro_batch_sizes() -> Iterator[int]:
    """The artifact's grid: 1, 2, 3, 4, 36, 68, 100, ..."""
    yield from (1, 2, 3)
    mu = 4
    while True:
        yield mu
        mu += 32


def best_paper_plan(model: PaperModel, hardware: PaperHardware, prompt_len: float, gen_len: int) -> PaperPlan | None:
    """The artifact's search: for each mu on its grid, counts upward until throughput drops first."""
    best: PaperPlan | None = None
    for mu in _micro_batch_sizes():
        previous = 0.0
        n = 1
        while (plan := paper_plan(model, hardware, prompt_len, gen_len, mu, n)) is not None:
            if plan.decode_tokens_per_s < previous:
                break
            previous = plan.decode_tokens_per_s
            if best is None or previous > best.decode_tokens_per_s:
                best = plan
            n += 1
        if n == 1:
            return best
    return best


MIXTRAL_8X7B = PaperModel(32, 4096, 14336, 32, 8, 8, 2)
MIXTRAL_8X22B = PaperModel(56, 6144, 16384, 48, 8, 8, 2)
DBRX = PaperModel(40, 6144, 10752, 48, 8, 16, 4)


def artifact_l4(cpu_memory_gib: float = 184.29, cpu_gib_per_s: float = 76, *, padded: bool = False) -> PaperHardware:
    """S2's machine as the artifact has it. Its host memory is what was free when it started."""
    return PaperHardware(
        gpu_memory_bytes=24 * GIB,
        gpu_bytes_per_s=285 * GIB,
        gpu_flops_per_s=104e12,
        link_bytes_per_s=16 * GIB,
        cpu_memory_bytes=cpu_memory_gib * GIB,
        cpu_bytes_per_s=cpu_gib_per_s * GIB,
        cpu_flops_per_s=1.6e12,
        padded_prefill_form=padded,
    )


def artifact_t4(cpu_memory_gib: float = 184.29, cpu_gib_per_s: float = 76, *, tp_size: int = 1) -> PaperHardware:
    """The machines of S1 and S6 to S9."""
    return PaperHardware(
        gpu_memory_bytes=15 * GIB,
        gpu_bytes_per_s=300 * GIB,
        gpu_flops_per_s=65e12,
        link_bytes_per_s=16 * GIB,
        cpu_memory_bytes=cpu_memory_gib * GIB,
        cpu_bytes_per_s=cpu_gib_per_s * GIB,
        cpu_flops_per_s=0.8e12,
        tp_size=tp_size,
    )
