"""The paper's model as its artifact computes it, errors and all: to check our reading of it, never to plan with.

What the artifact gets wrong, on purpose kept here: attention counts one of QK^T and PV; all experts are always touched;
the context is the longest, not the mean; prefill, projections and LM head take no time; embeddings take no memory; FFN
activations are not times k; the head size is taken as hidden / heads; with attention on the GPU (A_g = 1) the decode is
charged for all of the KV there, whatever share of it the plan puts on the CPU. FFNs are on the GPU (F_g = 1). The
artifact prints figures for A_g = 0 only: of A_g = 1 only the formulas can be checked.
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
    attention_on_gpu: bool  # A_g
    weights_gpu_ratio: float  # r_w, or w_g
    kv_gpu_ratio: float  # r_c, or c_g
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


@dataclass(frozen=True)
class _Program:
    """The LP of one (mu, n_ub, A_g): its variables are w_g and c_g, with w_c = 1 - w_g and c_c = 1 - c_g."""

    model: PaperModel
    hardware: PaperHardware
    prompt_len: float  # s
    gen_len: int  # n
    micro_batch_size: int  # mu
    num_micro_batches: int  # n_ub
    attention_on_gpu: bool  # A_g

    @property
    def batch_size(self) -> int:
        return self.micro_batch_size * self.num_micro_batches

    @property
    def prefill_kv_bytes(self) -> float:
        """What the prefill's GPU memory has of the KV where all of it is on the GPU: one layer's."""
        return 4 * self.prompt_len * self.model.kv_hidden * self.batch_size

    @property
    def kv_bytes(self) -> float:
        return 4 * (self.prompt_len + self.gen_len) * self.model.kv_hidden * self.batch_size * self.model.num_layers

    def prefill_memory_bytes(self, ratio: float, kv_ratio: float) -> float:
        """home_p + gpu_w: affine in the ratios, with slopes wi * (l - 2) and `prefill_kv_bytes`."""
        model, tp, mu, s = self.model, self.hardware.tp_size, self.micro_batch_size, self.prompt_len
        if self.hardware.padded_prefill_form:
            hidden_states = tp * 8 * model.hidden * mu * s
        else:
            hidden_states = tp * (4 * model.hidden * mu * s + 2 * model.hidden * self.batch_size * s)
        kv = self.prefill_kv_bytes * kv_ratio + 8 * s * model.kv_hidden * mu
        return self._weights_on_gpu_bytes(ratio) + hidden_states + kv + self._workspace_bytes(ratio)

    def decode_memory_bytes(self, ratio: float) -> float:
        """home_d + gpu_w. The KV's factor in the artifact is c_g + c_c * A_g: all of it where A_g = 1."""
        hidden_states = 4 * self.model.hidden * self.batch_size * self.hardware.tp_size
        kv = self.kv_bytes * self.attention_on_gpu
        return self._weights_on_gpu_bytes(ratio) + hidden_states + kv + self._workspace_bytes(ratio)

    def _weights_on_gpu_bytes(self, ratio: float) -> float:
        return self.model.other_bytes + self.model.expert_layer_bytes * self.model.num_layers * ratio

    def _workspace_bytes(self, ratio: float) -> float:
        """gpu_w: two layers of streamed weights, and what the prefill computes on its way."""
        model, mu, s = self.model, self.micro_batch_size, self.prompt_len
        intermediates = (
            2 * mu * model.top_k * model.hidden * self.hardware.tp_size * s
            + 6 * mu * model.top_k * model.intermediate * s
        )
        return 2 * model.expert_layer_bytes * (1 - ratio) + WORKSPACE_FACTOR * intermediates

    def cpu_memory_bytes(self, ratio: float, kv_ratio: float) -> float:
        """Weights with two pinned layers, KV, and the hidden states of the prefill."""
        weights = self.model.expert_layer_bytes * (1 - ratio) * (self.model.num_layers + 2)
        hidden_states = 2 * self.model.hidden * self.batch_size * self.prompt_len * self.hardware.tp_size
        return weights + self.kv_bytes * (1 - kv_ratio) + hidden_states

    def link_s(self, ratio: float, kv_ratio: float) -> float:
        """ctog: the streamed weights, and with attention on the GPU the KV that is not there, at its mean length."""
        moved = self.model.expert_layer_bytes * (1 - ratio)
        if self.attention_on_gpu:
            mean_context = self.prompt_len + self.gen_len / 2
            moved += 4 * mean_context * self.model.kv_hidden * self.batch_size * (1 - kv_ratio)
        return moved / self.hardware.link_bytes_per_s

    def gpu_s(self) -> float:
        """Eq. 13, of one layer: FFNs, and attention where it is here."""
        mu, model = self.micro_batch_size, self.model
        flops_per_s = self.hardware.gpu_flops_per_s * self.hardware.tp_size
        bytes_per_s = self.hardware.gpu_bytes_per_s * self.hardware.tp_size
        seconds = max(model.ffn_flops(mu) / flops_per_s, model.ffn_bytes(mu) / bytes_per_s)
        if self.attention_on_gpu:
            seconds += self._attention_s(flops_per_s, bytes_per_s)
        return self.num_micro_batches * seconds

    def cpu_s(self) -> float:
        if self.attention_on_gpu:
            return 0.0
        hardware = self.hardware
        return self.num_micro_batches * self._attention_s(hardware.cpu_flops_per_s, hardware.cpu_bytes_per_s)

    def _attention_s(self, flops_per_s: float, bytes_per_s: float) -> float:
        """Of one micro-batch, over the longest context."""
        mu, context = self.micro_batch_size, self.prompt_len + self.gen_len
        return max(
            self.model.attention_flops(mu, 1, context) / flops_per_s,
            self.model.attention_bytes(mu, 1, context) / bytes_per_s,
        )

    def best_ratios(self) -> tuple[float, float] | None:
        """(w_g, c_g), None where GPU memory has no room even for 0. More of either on the GPU never hurts. Where they
        compete, in the prefill's memory, KV comes first: with more than three layers a byte of it there saves more of
        the link and of CPU memory than a byte of weights does."""
        budget = GPU_MEMORY_SHARE * self.hardware.gpu_memory_bytes * self.hardware.tp_size
        prefill_room = budget - self.prefill_memory_bytes(0.0, 0.0)
        decode_room = budget - self.decode_memory_bytes(0.0)
        if min(prefill_room, decode_room) < 0:
            return None
        kv_bytes = min(prefill_room, self.prefill_kv_bytes) if self.attention_on_gpu else 0.0
        room = min(prefill_room - kv_bytes, decode_room)
        ratio = room / (self.model.expert_layer_bytes * (self.model.num_layers - 2))
        return min(ratio, 1.0), kv_bytes / self.prefill_kv_bytes


def paper_plan(
    model: PaperModel,
    hardware: PaperHardware,
    prompt_len: float,
    gen_len: int,
    mu: int,
    n: int,
    *,
    attention_on_gpu: bool = False,
) -> PaperPlan | None:
    """The LP of one (mu, n_ub, A_g), solved in closed form. None where the weights don't fit beside the rest."""
    program = _Program(model, hardware, prompt_len, gen_len, mu, n, attention_on_gpu)
    ratios = program.best_ratios()
    if ratios is None:
        return None
    cpu_memory = program.cpu_memory_bytes(*ratios)
    if cpu_memory > CPU_MEMORY_SHARE * hardware.cpu_memory_bytes:
        return None
    link_s, gpu_s, cpu_s = program.link_s(*ratios), program.gpu_s(), program.cpu_s()
    return PaperPlan(
        mu,
        n,
        attention_on_gpu,
        *ratios,
        link_s,
        gpu_s,
        cpu_s,
        max(program.prefill_memory_bytes(*ratios), program.decode_memory_bytes(ratios[0])),
        cpu_memory,
        program.batch_size * gen_len / (max(link_s, gpu_s, cpu_s) * (gen_len - 1) * model.num_layers),
    )


def _micro_batch_sizes() -> Iterator[int]:
    """The artifact's grid: 1, 2, 3, 4, 36, 68, 100, ..."""
    yield from (1, 2, 3)
    mu = 4
    while True:
        yield mu
        mu += 32


def best_paper_plan(model: PaperModel, hardware: PaperHardware, prompt_len: float, gen_len: int) -> PaperPlan | None:
    """The better of the plans with attention on the CPU and on the GPU: a flag outside of the artifact's search."""
    searches = [
        best_paper_plan_with(model, hardware, prompt_len, gen_len, attention_on_gpu=flag) for flag in (False, True)
    ]
    return max(filter(None, searches), key=lambda plan: plan.decode_tokens_per_s, default=None)


def best_paper_plan_with(
    model: PaperModel, hardware: PaperHardware, prompt_len: float, gen_len: int, *, attention_on_gpu: bool
) -> PaperPlan | None:
    """The artifact's search: for each mu on its grid, counts upward until throughput drops first."""
    best: PaperPlan | None = None
    for mu in _micro_batch_sizes():
        previous = 0.0
        n = 1
        while (
            plan := paper_plan(model, hardware, prompt_len, gen_len, mu, n, attention_on_gpu=attention_on_gpu)
        ) is not None:
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
