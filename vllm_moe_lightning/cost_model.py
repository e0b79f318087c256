"""The hierarchical roofline model: seconds of every task, sweep and job. MILP, simulator and explain all call this.

A task's time follows from its kernels' (kernel_costs); a sweep's is Eq. 12 over six resources, summed
over all layers because resident and streamed layers differ. Memory is memory_model's business; the artifact's own
formulas are in paper_model. Not in the model: traffic between GPUs, and uneven routing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from vllm_moe_lightning.affine import Affine, affine_terms
from vllm_moe_lightning.hardware import HardwareProfile
from vllm_moe_lightning.kernel_costs import (
    Machine,
    attention_work,
    experts_work,
    head_s,
    post_attention_kernel_s,
    pre_attention_kernel_s,
)
from vllm_moe_lightning.model_spec import MoeModelSpec
from vllm_moe_lightning.pipeline.tasks import Task, TaskName
from vllm_moe_lightning.policy.policy import MAX_AUTO_PAGE_BYTES, MIN_AUTO_PAGE_BYTES
from vllm_moe_lightning.prompt_attention import PromptAttention, prompt_attention
from vllm_moe_lightning.resources import HrmResource
from vllm_moe_lightning.rowwise import larger, rounded_up, smaller
from vllm_moe_lightning.workload import (
    HrmPolicy,
    SweepLoad,
    Workload,
    decode_load,
    num_prefill_sweeps,
    prefill_load,
    steady_load,
)

TINY_S = 1e-30  # keeps a ratio of two times that are both zero from dividing by it


@dataclass(frozen=True)
class _Copies:
    """Bytes over the link, in copies; a copy costs the link's latency."""

    num_bytes: float = 0.0
    num_copies: float = 0.0

    def __add__(self, other: _Copies) -> _Copies:
        return _Copies(self.num_bytes + other.num_bytes, self.num_copies + other.num_copies)

    def times(self, factor: float) -> _Copies:
        return _Copies(self.num_bytes * factor, self.num_copies * factor)

    def time_s(self, bytes_per_s: float, latency_s: float) -> float:
        return self.num_copies * latency_s + self.num_bytes / bytes_per_s


def pages_per_layer(spec: MoeModelSpec, policy: HrmPolicy) -> int:
    """Pages of a streamed layer under the engine's automatic page size."""
    layer_bytes = spec.expert_layer_bytes
    page = smaller(larger(layer_bytes / policy.num_micro_batches, MIN_AUTO_PAGE_BYTES), MAX_AUTO_PAGE_BYTES)
    return rounded_up(layer_bytes / page)


def hidden_via_host(policy: HrmPolicy, load: SweepLoad) -> bool:
    """The paper's prefill: more hidden states than the GPU holds, so they wait on the host between layers."""
    return policy.prefill_tokens_per_sweep is None and load.prefill_len > 0 and not load.decodes


@dataclass(frozen=True)
class TaskCosts:
    """Seconds of each task of one micro-batch, as if it had its resource and the host's memory to itself."""

    pre_attention_s: float
    attention_s: float
    """Attention on the CPU: of decode tokens, and of prompts where the policy leaves them there."""
    device_attention_s: float
    """Decode attention on the GPU."""
    moe_post_attention_s: float
    dense_post_attention_s: float
    cpu_experts_s: float
    """Experts of a layer that is not resident, under ffn_on_gpu = False."""
    qkv_offload: _Copies
    hidden_load: _Copies
    kv_load: _Copies
    weight_page: _Copies
    num_dense_layers: int
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    latency_s: float
    kv_append_s: float
    slowdown: Mapping[HrmResource, float]
    """Factor by which the sweep's contention stretches the tasks of a resource."""

    def duration_s(self, task: Task) -> float:
        """For `pipeline.simulator.simulate`. Dense layers are taken to be the first ones."""
        stretch = self.slowdown
        match task.key.name:
            case TaskName.PRE_ATTENTION:
                return self.pre_attention_s
            case TaskName.POST_ATTENTION:
                dense = task.key.layer < self.num_dense_layers
                return self.dense_post_attention_s if dense else self.moe_post_attention_s
            case TaskName.ATTENTION:
                return self.attention_s * stretch[HrmResource.CPU]
            case TaskName.KV_APPEND:
                return self.kv_append_s * stretch[HrmResource.CPU]
            case TaskName.DEVICE_ATTENTION:
                return self.device_attention_s
            case TaskName.EXPERTS:
                return self.cpu_experts_s * stretch[HrmResource.CPU]
            case TaskName.QKV_OFFLOAD:
                return self._d2h_s(self.qkv_offload) * stretch[HrmResource.D2H]
            case TaskName.HIDDEN_LOAD:
                return self._h2d_s(self.hidden_load) * stretch[HrmResource.H2D]
            case TaskName.KV_LOAD:
                return self._h2d_s(self.kv_load) * stretch[HrmResource.H2D]
            case TaskName.WEIGHT_PAGE:
                return self._h2d_s(self.weight_page) * stretch[HrmResource.H2D]
            case _:
                return 0.0

    def _h2d_s(self, copies: _Copies) -> float:
        return copies.time_s(self.h2d_bytes_per_s, self.latency_s)

    def _d2h_s(self, copies: _Copies) -> float:
        return copies.time_s(self.d2h_bytes_per_s, self.latency_s)


@dataclass(frozen=True)
class SweepCost:
    """How long one sweep keeps each resource busy."""

    busy_s: Mapping[HrmResource, float]
    overhead_s: float

    @property
    def time_s(self) -> float:
        # Eq. 12: a sweep is as slow as its busiest resource, because CGOPipe overlaps all of them.
        return max(self.busy_s.values()) + self.overhead_s

    @property
    def bottleneck(self) -> HrmResource:
        return max(self.busy_s, key=lambda resource: self.busy_s[resource])


@dataclass(frozen=True)
class _MicroBatch:
    """The tasks of one micro-batch and what they add up to over a sweep."""

    spec: MoeModelSpec
    machine: Machine
    policy: HrmPolicy
    load: SweepLoad

    def tasks(self) -> TaskCosts:
        spec, machine, policy, load = self.spec, self.machine, self.policy, self.load
        link, overheads = machine.profile.link, machine.profile.overheads
        dense_s, moe_s, experts_s = post_attention_kernel_s(spec, machine, load)
        on_gpu = policy.attention_on_gpu
        attention_flops, attention_bytes = attention_work(spec, load)
        prompts = prompt_attention(spec, policy, load)
        # 1 or 0, by row where there are several.
        on_cpu = 0.0 if on_gpu else larger(float(load.decodes), (prompts.cpu_tokens > 0) * 1.0)
        decode_s = machine.cpu_attention_s(attention_flops, attention_bytes)
        prompt_flops = prompts.cpu_flops(spec, machine.profile.efficiencies.cpu_logit_flops)
        prompt_s = machine.cpu_prompt_attention_s(prompt_flops, prompts.cpu_bytes(spec))
        copied = self._layer_copies(prompts)
        pages = pages_per_layer(spec, policy)
        return TaskCosts(
            pre_attention_s=pre_attention_kernel_s(spec, machine, load, prompts.gpu_pairs),
            attention_s=(decode_s + prompt_s + overheads.cpu_task_s) * on_cpu,
            device_attention_s=machine.gpu_attention_s(attention_flops, attention_bytes) if on_gpu else 0.0,
            moe_post_attention_s=moe_s + (experts_s if policy.ffn_on_gpu else 0.0),
            dense_post_attention_s=dense_s,
            cpu_experts_s=0.0
            if policy.ffn_on_gpu
            else machine.cpu_experts_s(*experts_work(spec, load.tokens)) + overheads.cpu_task_s,
            qkv_offload=_Copies(copied.offload_bytes, 1.0),
            hidden_load=_Copies(copied.load_bytes, larger(on_cpu, float(hidden_via_host(policy, load)))),
            # One copy even where all KV is on the GPU, so that the time stays a line in kv_gpu_ratio.
            kv_load=_Copies(
                copied.context_bytes, larger(float(load.decodes and on_gpu), (prompts.raised_keys > 0) * 1.0)
            ),
            weight_page=_Copies(spec.expert_layer_bytes / pages, 1.0),
            num_dense_layers=spec.num_dense_layers,
            h2d_bytes_per_s=link.h2d_bytes_per_s,
            d2h_bytes_per_s=link.d2h_bytes_per_s,
            latency_s=link.latency_s,
            kv_append_s=overheads.cpu_task_s if on_gpu else 0.0,
            slowdown=MappingProxyType(dict.fromkeys(HrmResource, 1.0)),
        )

    def _layer_copies(self, prompts: PromptAttention) -> _LayerCopies:
        spec, policy, load = self.spec, self.policy, self.load
        width = spec.widths.activation_bytes
        on_host = 1.0 - policy.kv_gpu_ratio
        # As the model made them: a cache of another type is filled on the host.
        new_kv_bytes = load.tokens * spec.attention.kv_elements_per_token * width * on_host
        hidden_bytes = load.tokens * spec.hidden * width if hidden_via_host(policy, load) else 0.0
        context_bytes = prompts.raised_keys * spec.kv_bytes_per_token_layer * on_host
        if policy.attention_on_gpu:
            read = load.decode_seqs * spec.mean_context_read(load.decode_context)
            context_bytes += read * spec.kv_bytes_per_token_layer * on_host
            return _LayerCopies(new_kv_bytes + hidden_bytes, hidden_bytes, context_bytes)
        attended = load.decode_seqs + prompts.cpu_tokens
        query_bytes = attended * spec.attention.q_elements_per_token * width
        out_bytes = attended * spec.attention.out_elements_per_token * width
        return _LayerCopies(new_kv_bytes + query_bytes + hidden_bytes, out_bytes + hidden_bytes, context_bytes)


@dataclass(frozen=True)
class _LayerCopies:
    """Bytes of one micro-batch and layer, weights apart."""

    offload_bytes: float
    load_bytes: float
    context_bytes: float


@dataclass(frozen=True)
class _SweepWork:
    """All of one sweep, before the resources get in each other's way. Every field is affine in the policy's
    num_resident_layers, kv_gpu_ratio and num_disk_layers, which `sweep_terms` relies on."""

    gpu_s: float
    cpu_s: float
    cpu_bytes: float
    up: _Copies
    down: _Copies
    disk_bytes: float

    def solo_link_s(self, profile: HardwareProfile) -> tuple[float, float]:
        """(up, down), each with the link to itself."""
        link = profile.link
        up_s = self.up.time_s(link.h2d_bytes_per_s, link.latency_s)
        return up_s, self.down.time_s(link.d2h_bytes_per_s, link.latency_s)


def _sweep_work(spec: MoeModelSpec, profile: HardwareProfile, policy: HrmPolicy, load: SweepLoad) -> _SweepWork:
    n, layers = policy.num_micro_batches, spec.num_layers
    machine = Machine(profile)
    share = load.divided(n)
    tasks = _MicroBatch(spec, machine, policy, share).tasks()
    resident = policy.num_resident_layers
    streamed = spec.num_moe_layers - resident

    gpu_s = layers * (tasks.pre_attention_s + tasks.device_attention_s)
    gpu_s += spec.num_dense_layers * tasks.dense_post_attention_s + spec.num_moe_layers * tasks.moe_post_attention_s
    cpu_s = layers * (tasks.attention_s + tasks.kv_append_s)
    attended_bytes = attention_work(spec, share)[1] + prompt_attention(spec, policy, share).cpu_bytes(spec)
    cpu_bytes = 0.0 if policy.attention_on_gpu else layers * n * attended_bytes
    down = tasks.qkv_offload.times(layers * n)
    up = (tasks.hidden_load + tasks.kv_load).times(layers * n)
    if policy.ffn_on_gpu:
        up += tasks.weight_page.times(pages_per_layer(spec, policy) * streamed)
    else:
        experts = experts_work(spec, share.tokens)
        hidden = _Copies(share.tokens * spec.hidden * spec.widths.activation_bytes, 1.0).times(streamed * n)
        down += hidden
        up += hidden
        gpu_s += resident * machine.gpu_experts_s(*experts)
        cpu_s += streamed * tasks.cpu_experts_s
        cpu_bytes += streamed * n * experts[1]
    disk_bytes = policy.num_disk_layers * spec.expert_layer_bytes
    return _SweepWork(n * gpu_s + head_s(spec, machine, load), n * cpu_s, cpu_bytes, up, down, disk_bytes)


def _busy_s(profile: HardwareProfile, work: _SweepWork) -> Mapping[HrmResource, float]:
    up_s, down_s = work.solo_link_s(profile)
    against = profile.link.slowdown_per_opposite_s
    host_bytes = work.cpu_bytes + work.up.num_bytes + work.down.num_bytes + work.disk_bytes
    busy = {
        HrmResource.GPU: work.gpu_s,
        HrmResource.CPU: work.cpu_s,
        # Two directions that overlap for x seconds do share * x of work each, so the longer one, a, takes
        # a + b * (1 / share - 1) beside the shorter one, b; the same line for b is then the lower bound.
        HrmResource.H2D: up_s + against * down_s,
        HrmResource.D2H: down_s + against * up_s,
        HrmResource.HOST_MEMORY: host_bytes / profile.cpu.bandwidth_bytes_per_s,
        HrmResource.DISK: work.disk_bytes / profile.disk.read_bytes_per_s if profile.disk else 0.0,
    }
    return MappingProxyType(busy)


def _check_policy(spec: MoeModelSpec, profile: HardwareProfile, policy: HrmPolicy) -> None:
    layers = policy.num_resident_layers + policy.num_disk_layers
    if layers > spec.num_moe_layers + 1e-9:
        raise ValueError(f"{policy} places {layers} of only {spec.num_moe_layers} MoE layers of {spec.name}")
    if policy.num_disk_layers and profile.disk is None:
        raise ValueError(f"{profile.name} has no disk to read {policy.num_disk_layers} layers from")


def sweep_cost(spec: MoeModelSpec, profile: HardwareProfile, policy: HrmPolicy, load: SweepLoad) -> SweepCost:
    _check_policy(spec, profile, policy)
    return SweepCost(_busy_s(profile, _sweep_work(spec, profile, policy, load)), profile.overheads.sweep_s)


def task_costs(spec: MoeModelSpec, profile: HardwareProfile, policy: HrmPolicy, load: SweepLoad) -> TaskCosts:
    """Task times of an average micro-batch of the sweep, stretched where the sweep's resources get in each other's way:
    both directions of the link, and the host's memory where CPU attention and the link ask for more than it has."""
    _check_policy(spec, profile, policy)
    work = _sweep_work(spec, profile, policy, load)
    busy = _busy_s(profile, work)
    users_s = max(busy[resource] for resource in (HrmResource.CPU, HrmResource.H2D, HrmResource.D2H))
    crowded = max(1.0, busy[HrmResource.HOST_MEMORY] / users_s) if users_s else 1.0
    up_s, down_s = work.solo_link_s(profile)
    # The shorter direction runs beside the longer one all of its time, the longer one part of its time.
    shorter = 1.0 / profile.link.bidirectional_share
    longer = 1.0 + profile.link.slowdown_per_opposite_s * min(up_s, down_s) / max(up_s, down_s, TINY_S)
    slowdown = dict.fromkeys(HrmResource, 1.0)
    slowdown[HrmResource.CPU] = crowded
    slowdown[HrmResource.H2D] = crowded * (longer if up_s >= down_s else shorter)
    slowdown[HrmResource.D2H] = crowded * (shorter if up_s >= down_s else longer)
    tasks = _MicroBatch(spec, Machine(profile), policy, load.divided(policy.num_micro_batches)).tasks()
    return replace(tasks, slowdown=MappingProxyType(slowdown))


def sweep_terms(
    spec: MoeModelSpec, profile: HardwareProfile, policy: HrmPolicy, load: SweepLoad
) -> Mapping[HrmResource, Affine]:
    """Busy seconds of each resource as lines, for a solver; the policy's own continuous choices are ignored."""
    return affine_terms(lambda choice: _busy_s(profile, _sweep_work(spec, profile, choice, load)), policy)


@dataclass(frozen=True)
class JobCost:
    """A static batch from its prompts to its last token, or one sweep of the steady state."""

    prefill: SweepCost | None
    decode: SweepCost
    num_prefill_sweeps: float
    num_decode_sweeps: float
    num_tokens: float
    """Generated in all these sweeps."""

    @property
    def time_s(self) -> float:
        prefill_s = self.prefill.time_s * self.num_prefill_sweeps if self.prefill else 0.0
        return prefill_s + self.decode.time_s * self.num_decode_sweeps

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.time_s


def static_batch_cost(spec: MoeModelSpec, profile: HardwareProfile, workload: Workload, policy: HrmPolicy) -> JobCost:
    """The paper's way: prefill N prompts, then gen_len - 1 decode sweeps of all of them."""
    return JobCost(
        prefill=sweep_cost(spec, profile, policy, prefill_load(workload, policy)),
        decode=sweep_cost(spec, profile, policy, decode_load(workload, policy)),
        num_prefill_sweeps=num_prefill_sweeps(workload, policy),
        num_decode_sweeps=workload.gen_len - 1,
        num_tokens=policy.batch_size * workload.gen_len,
    )


def steady_state_cost(spec: MoeModelSpec, profile: HardwareProfile, workload: Workload, policy: HrmPolicy) -> JobCost:
    """Continuous batching: every sweep carries decode tokens and the prompts that take the places of finished ones."""
    return JobCost(
        prefill=None,
        decode=sweep_cost(spec, profile, policy, steady_load(workload, policy)),
        num_prefill_sweeps=0.0,
        num_decode_sweeps=1.0,
        num_tokens=policy.batch_size,
    )
