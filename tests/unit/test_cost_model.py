"""Times and memory: hand-computed values, exact lines, more of any resource never hurts, and agreement of all users."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_moe_lightning.cost_model import (
    JobCost,
    pages_per_layer,
    static_batch_cost,
    steady_state_cost,
    sweep_cost,
    sweep_terms,
    task_costs,
)
from vllm_moe_lightning.hardware import DiskLevel, HardwareProfile, KernelEfficiencies, TaskOverheads
from vllm_moe_lightning.hardware_presets import GPU_PRESETS, preset_profile
from vllm_moe_lightning.kernel_costs import Machine, head_s
from vllm_moe_lightning.memory_model import gpu_memory, host_memory, memory_terms
from vllm_moe_lightning.model_config import read_model_spec
from vllm_moe_lightning.pipeline.schedule import SweepShape, make_schedule
from vllm_moe_lightning.pipeline.simulator import simulate
from vllm_moe_lightning.resources import HrmResource
from vllm_moe_lightning.workload import (
    HrmPolicy,
    SweepLoad,
    Workload,
    decode_load,
    prefill_load,
    steady_load,
)

NO_DEADLINE = settings(deadline=None)  # of a busy machine
CONFIGS = Path(__file__).parent / "model_configs"
SPECS = {file.stem: read_model_spec(file) for file in CONFIGS.glob("*.json")}
MIXTRAL = SPECS["mixtral-8x7b"]
L4 = preset_profile("l4")
MTBENCH = Workload(77, 128)
PEAKS = KernelEfficiencies(**dict.fromkeys(KernelEfficiencies.__struct_fields__, 1.0))
NO_OVERHEADS = TaskOverheads(gpu_task_s=0.0, cpu_task_s=0.0, sweep_s=0.0)


def with_disk(profile: HardwareProfile) -> HardwareProfile:
    disk = DiskLevel(name="nvme", capacity_bytes=1 << 41, read_bytes_per_s=5e9)
    return msgspec.structs.replace(profile, disk=disk)


def ideal(profile: HardwareProfile) -> HardwareProfile:
    link = msgspec.structs.replace(profile.link, bidirectional_share=1.0, latency_s=0.0)
    return msgspec.structs.replace(profile, efficiencies=PEAKS, overheads=NO_OVERHEADS, link=link)


specs = st.sampled_from(sorted(SPECS)).map(SPECS.__getitem__)
profiles = st.builds(preset_profile, st.sampled_from(sorted(GPU_PRESETS)), num_gpus=st.sampled_from([1, 2, 4]))
workloads = st.builds(Workload, st.integers(1, 4000), st.integers(2, 1024))


@st.composite
def policies(draw: st.DrawFn, max_layers: int = 16) -> HrmPolicy:
    on_gpu = draw(st.booleans())
    return HrmPolicy(
        micro_batch_size=draw(st.integers(1, 400)),
        num_micro_batches=draw(st.integers(1, 20)),
        attention_on_gpu=on_gpu,
        ffn_on_gpu=draw(st.booleans()),
        num_resident_layers=draw(st.integers(0, max_layers - 1)),
        kv_gpu_ratio=draw(st.floats(0, 1)) if on_gpu else 0.0,
        prefill_tokens_per_sweep=draw(st.one_of(st.none(), st.integers(1, 100_000))),
        prompts_on_gpu=on_gpu or draw(st.booleans()),
        context_query_tokens=draw(st.sampled_from([0, 1, 1000])),
    )


# By hand


def test_a_decode_sweep_of_mixtral_by_hand() -> None:
    policy = HrmPolicy(100, 10)
    load = SweepLoad(decode_seqs=1000, decode_context=512)
    busy = sweep_cost(MIXTRAL, ideal(L4), policy, load).busy_s
    kv_bytes = 32 * 1000 * 512 * 4096
    assert busy[HrmResource.CPU] == pytest.approx((kv_bytes + 32 * 1000 * 2 * 4096 * 2) / 76e9)
    weights_bytes = 32 * 8 * 3 * 4096 * 14336 * 2
    assert busy[HrmResource.H2D] == pytest.approx((weights_bytes + 32 * 1000 * 4096 * 2) / 12.3e9)
    assert busy[HrmResource.D2H] == pytest.approx(32 * 1000 * (4096 + 2 * 1024) * 2 / 12.3e9)
    # 100 tokens: weights bound the kernels, and each of the 10 micro-batches reads them.
    touched = MIXTRAL.expected_experts_touched(100) / 8
    activations = 32 * 1000 * 2 * (2 * 4096 + 2 * (3 * 14336 + 2 * 4096))
    projections = 32 * 10 * 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    router = 32 * 10 * 2 * 4096 * 8
    experts = 10 * weights_bytes * touched + activations
    head = head_s(MIXTRAL, Machine(ideal(L4)), load)
    assert busy[HrmResource.GPU] == pytest.approx((experts + projections + router) / 300e9 + head, rel=1e-6)


def test_a_prefill_sweep_is_bound_by_the_flops_of_its_tokens() -> None:
    policy = HrmPolicy(50, 4)
    workload = Workload(1000, 32)
    cost = sweep_cost(MIXTRAL, ideal(L4), policy, prefill_load(workload, policy))
    assert cost.bottleneck is HrmResource.GPU
    tokens = 200 * 1000
    matrices = MIXTRAL.active_params - MIXTRAL.embedding_params
    attention = 32 * 200 * 4 * 4096 * 1000 * 1001 / 2  # half of the square
    head = 2 * 32000 * 4096 * 200  # one token of each sequence
    assert cost.busy_s[HrmResource.GPU] == pytest.approx((2 * matrices * tokens + attention + head) / 121e12, rel=0.01)


def test_attention_on_the_gpu_brings_the_context_over_the_link() -> None:
    load = SweepLoad(decode_seqs=1000, decode_context=512)
    on_cpu = sweep_cost(MIXTRAL, ideal(L4), HrmPolicy(100, 10), load).busy_s
    on_gpu = sweep_cost(MIXTRAL, ideal(L4), HrmPolicy(100, 10, attention_on_gpu=True), load).busy_s
    context_s = 32 * 1000 * 512 * 4096 / 12.3e9
    out_s = 32 * 1000 * 4096 * 2 / 12.3e9
    assert on_gpu[HrmResource.H2D] - on_cpu[HrmResource.H2D] == pytest.approx(context_s - out_s)
    assert on_gpu[HrmResource.CPU] == 0
    assert on_gpu[HrmResource.GPU] > on_cpu[HrmResource.GPU]


def test_experts_on_the_cpu_leave_only_hidden_states_on_the_link() -> None:
    load = SweepLoad(decode_seqs=8, decode_context=512)
    busy = sweep_cost(MIXTRAL, L4, HrmPolicy(4, 2, ffn_on_gpu=False), load).busy_s
    assert busy[HrmResource.H2D] < 0.02
    assert busy[HrmResource.CPU] > 1


def test_experts_on_the_cpu_take_as_long_as_their_weights_or_their_arithmetic_at_the_measured_efficiencies() -> None:
    efficiencies = msgspec.structs.replace(PEAKS, cpu_experts_bandwidth=0.4, cpu_gemm=2.0)
    profile = msgspec.structs.replace(L4, efficiencies=efficiencies)
    expert_bytes = MIXTRAL.params_per_expert * MIXTRAL.widths.expert_bytes

    def experts_s(tokens: int) -> float:
        policy, load = HrmPolicy(tokens, 1, ffn_on_gpu=False), SweepLoad(decode_seqs=tokens, decode_context=512)
        return task_costs(MIXTRAL, profile, policy, load).cpu_experts_s - profile.overheads.cpu_task_s

    read_s = MIXTRAL.expected_experts_touched(2) * expert_bytes / (profile.cpu.bandwidth_bytes_per_s * 0.4)
    assert experts_s(2) == pytest.approx(read_s, rel=0.01)  # and the activations
    flops = 2 * MIXTRAL.params_per_expert * MIXTRAL.top_k * 20000
    assert experts_s(20000) == pytest.approx(flops / (profile.cpu.flops_per_s * 2.0))


def test_cpu_attention_and_the_link_share_the_host_s_memory() -> None:
    policy, load = HrmPolicy(400, 10), SweepLoad(decode_seqs=4000, decode_context=2000)
    slow = msgspec.structs.replace(
        L4, cpu=msgspec.structs.replace(L4.cpu, bandwidth_bytes_per_s=20e9), efficiencies=PEAKS
    )
    busy = sweep_cost(MIXTRAL, slow, policy, load).busy_s
    assert busy[HrmResource.HOST_MEMORY] > busy[HrmResource.CPU]
    stretched = task_costs(MIXTRAL, slow, policy, load)
    assert stretched.slowdown[HrmResource.CPU] == pytest.approx(
        busy[HrmResource.HOST_MEMORY] / max(busy[HrmResource.CPU], busy[HrmResource.H2D])
    )


def test_layers_on_disk_cost_reads_and_free_host_memory() -> None:
    profile = with_disk(L4)
    policy = HrmPolicy(36, 14)
    spilled = replace(policy, num_disk_layers=4)
    load = decode_load(MTBENCH, policy)
    busy = sweep_cost(MIXTRAL, profile, spilled, load).busy_s
    assert busy[HrmResource.DISK] == pytest.approx(4 * MIXTRAL.expert_layer_bytes / 5e9)
    peak = prefill_load(MTBENCH, policy)
    freed = host_memory(MIXTRAL, profile, MTBENCH, policy, peak).total_bytes
    freed -= host_memory(MIXTRAL, profile, MTBENCH, spilled, peak).total_bytes
    assert freed == pytest.approx(4 * MIXTRAL.expert_layer_bytes)
    with pytest.raises(ValueError, match="no disk"):
        sweep_cost(MIXTRAL, L4, spilled, load)


def test_more_layers_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="of only 32"):
        sweep_cost(MIXTRAL, L4, HrmPolicy(1, 1, num_resident_layers=33), SweepLoad(decode_seqs=1))


@pytest.mark.parametrize(
    "arguments",
    [
        {"micro_batch_size": 0, "num_micro_batches": 1},
        {"micro_batch_size": 1, "num_micro_batches": 0},
        {"micro_batch_size": 1, "num_micro_batches": 1, "kv_gpu_ratio": 0.5},
        {"micro_batch_size": 1, "num_micro_batches": 1, "attention_on_gpu": True, "kv_gpu_ratio": 1.5},
        {"micro_batch_size": 1, "num_micro_batches": 1, "num_resident_layers": -1},
        {"micro_batch_size": 1, "num_micro_batches": 1, "attention_on_gpu": True, "prompts_on_gpu": False},
        {"micro_batch_size": 1, "num_micro_batches": 1, "context_query_tokens": -1},
    ],
)
def test_an_impossible_policy_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"must|can't|needs"):
        HrmPolicy(**arguments)  # type: ignore[arg-type]


# Jobs


def test_a_static_batch_is_one_prefill_and_a_sweep_per_further_token() -> None:
    policy = HrmPolicy(164, 16)
    job = static_batch_cost(MIXTRAL, L4, MTBENCH, policy)
    assert job.prefill is not None
    assert job.time_s == pytest.approx(job.prefill.time_s + 127 * job.decode.time_s)
    assert job.tokens_per_s == pytest.approx(164 * 16 * 128 / job.time_s)


def test_the_steady_state_turns_over_every_slot_once_per_generation() -> None:
    policy = HrmPolicy(164, 16)
    load = steady_load(MTBENCH, policy)
    assert load.seqs == policy.batch_size
    assert load.prefill_seqs * MTBENCH.gen_len == policy.batch_size
    job = steady_state_cost(MIXTRAL, L4, MTBENCH, policy)
    assert job.tokens_per_s == pytest.approx(policy.batch_size / job.decode.time_s)


@pytest.mark.parametrize("gpu", GPU_PRESETS)
def test_overlapping_prefill_and_decode_gains_over_one_after_the_other(gpu: str) -> None:
    """gen_len sweeps for gen_len tokens in both; the steady state reads a sweep's weights once for both kinds."""
    profile, policy = preset_profile(gpu), HrmPolicy(100, 10)
    for workload in (MTBENCH, Workload(418, 32), Workload(1693, 64)):
        steady = steady_state_cost(MIXTRAL, profile, workload, policy)
        static = static_batch_cost(MIXTRAL, profile, workload, policy)
        assert steady.tokens_per_s > static.tokens_per_s


# Lines


@NO_DEADLINE
@given(specs, profiles, workloads, policies())
def test_the_solver_s_lines_give_exactly_what_the_formula_gives(
    spec: object, profile: HardwareProfile, workload: Workload, policy: HrmPolicy
) -> None:
    assert isinstance(spec, type(MIXTRAL))
    profile = with_disk(profile)
    policy = replace(policy, num_disk_layers=1)
    for load in (decode_load(workload, policy), prefill_load(workload, policy), steady_load(workload, policy)):
        busy = sweep_cost(spec, profile, policy, load).busy_s
        terms = sweep_terms(spec, profile, policy, load)
        assert {r: line.at(policy) for r, line in terms.items()} == pytest.approx(dict(busy), rel=1e-6, abs=1e-9)
    peak = prefill_load(workload, policy)
    gpu, host = memory_terms(spec, profile, workload, policy, peak)
    assert gpu.at(policy) == pytest.approx(gpu_memory(spec, profile, workload, policy, peak).total_bytes, rel=1e-6)
    assert host.at(policy) == pytest.approx(host_memory(spec, profile, workload, policy, peak).total_bytes, rel=1e-6)


@NO_DEADLINE
@given(specs, profiles, workloads, policies())
def test_arrays_of_sizes_give_what_each_size_gives(
    spec: object, profile: HardwareProfile, workload: Workload, policy: HrmPolicy
) -> None:
    """The planner evaluates its whole table in one call, with arrays for the two sizes."""
    assert isinstance(spec, type(MIXTRAL))
    policies = [replace(policy, micro_batch_size=size) for size in (1, policy.micro_batch_size, 999)]
    rows = SimpleNamespace(
        **{name: getattr(policy, name) for name in HrmPolicy.__dataclass_fields__}
        | {
            "micro_batch_size": np.array([float(p.micro_batch_size) for p in policies]),
            "batch_size": np.array([float(p.batch_size) for p in policies]),
        }
    )

    def figures(choice: Any) -> dict[str, Any]:
        static = static_batch_cost(spec, profile, workload, choice)
        steady = steady_state_cost(spec, profile, workload, choice)
        assert static.prefill is not None
        peak = prefill_load(workload, choice)
        sweeps = {"prefill": static.prefill, "decode": static.decode, "steady": steady.decode}
        return {f"{name} {r}": s for name, sweep in sweeps.items() for r, s in sweep.busy_s.items()} | {
            "gpu": gpu_memory(spec, profile, workload, choice, peak).total_bytes,
            "host": host_memory(spec, profile, workload, choice, peak).total_bytes,
            "sweeps": static.num_prefill_sweeps,
        }

    together = figures(rows)
    for index, single in enumerate(figures(choice) for choice in policies):
        for name, value in single.items():
            assert np.broadcast_to(together[name], 3)[index] == pytest.approx(value, rel=1e-9), name


def test_resident_layers_move_from_host_to_gpu_and_off_the_link() -> None:
    terms = sweep_terms(MIXTRAL, ideal(L4), HrmPolicy(36, 14), decode_load(MTBENCH, HrmPolicy(36, 14)))
    layer = MIXTRAL.expert_layer_bytes
    assert terms[HrmResource.H2D].per_resident_layer == pytest.approx(-layer / 12.3e9)
    assert terms[HrmResource.GPU].per_resident_layer == 0
    gpu, host = memory_terms(MIXTRAL, L4, MTBENCH, HrmPolicy(36, 14), prefill_load(MTBENCH, HrmPolicy(36, 14)))
    assert (gpu.per_resident_layer, host.per_resident_layer) == (layer, -layer)


# More of anything never hurts

FIGURES = [
    ("gpu", "bandwidth_bytes_per_s"),
    ("gpu", "flops_per_s"),
    ("cpu", "bandwidth_bytes_per_s"),
    ("cpu", "flops_per_s"),
    ("link", "h2d_bytes_per_s"),
    ("link", "d2h_bytes_per_s"),
]


@NO_DEADLINE
@given(specs, profiles, workloads, policies(), st.sampled_from(FIGURES), st.floats(1.01, 10))
def test_more_of_any_resource_never_slows_a_job(
    spec: object,
    profile: HardwareProfile,
    workload: Workload,
    policy: HrmPolicy,
    figure: tuple[str, str],
    factor: float,
) -> None:
    assert isinstance(spec, type(MIXTRAL))
    level, field = figure
    old = getattr(profile, level)
    better = msgspec.structs.replace(old, **{field: getattr(old, field) * factor})
    faster = msgspec.structs.replace(profile, **{level: better})

    def both(machine: HardwareProfile) -> tuple[JobCost, JobCost]:
        inputs = (spec, machine, workload, policy)
        return static_batch_cost(*inputs), steady_state_cost(*inputs)

    for slow, fast in zip(both(profile), both(faster), strict=True):
        assert fast.time_s <= slow.time_s * (1 + 1e-9)
        assert 0 < fast.tokens_per_s < float("inf")


# The simulator's tasks are the same formula


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_tasks_add_up_to_the_sweep(on_gpu: bool, share: float) -> None:
    """Busy time of each resource over all tasks of a schedule equals the cost model's, contention apart."""
    link = msgspec.structs.replace(L4.link, bidirectional_share=share)
    profile = msgspec.structs.replace(L4, link=link)
    policy = HrmPolicy(64, 6, attention_on_gpu=on_gpu)
    load = decode_load(MTBENCH, policy)
    shape = SweepShape(MIXTRAL.num_layers, 6, (pages_per_layer(MIXTRAL, policy),) * MIXTRAL.num_layers)
    tasks = task_costs(MIXTRAL, profile, policy, load)
    sweep = simulate(make_schedule("s4" if on_gpu else "cgopipe", shape), tasks.duration_s, num_sweeps=2)
    busy = sweep_cost(MIXTRAL, profile, policy, load).busy_s
    simulated = {resource.value: seconds for resource, seconds in sweep.busy_s.items()}
    head = head_s(MIXTRAL, Machine(profile), load)
    assert simulated["gpu"] == pytest.approx(busy[HrmResource.GPU] - head)
    assert simulated["cpu"] == pytest.approx(busy[HrmResource.CPU])
    longer, shorter = (HrmResource.H2D, HrmResource.D2H)
    assert simulated[longer.value] == pytest.approx(busy[longer])
    assert simulated[shorter.value] <= busy[longer] * (1 + 1e-9)
    # Bubbles make a sweep longer than its busiest resource, never shorter.
    assert sweep.duration_s >= max(simulated.values()) * (1 - 1e-9)
    if not on_gpu:
        assert sweep.duration_s <= 1.15 * max(simulated.values())


# Memory


@NO_DEADLINE
@given(specs, profiles, workloads, policies())
def test_memory_items_are_finite_and_not_negative(
    spec: object, profile: HardwareProfile, workload: Workload, policy: HrmPolicy
) -> None:
    assert isinstance(spec, type(MIXTRAL))
    for peak in (prefill_load(workload, policy), steady_load(workload, policy)):
        for need in (
            gpu_memory(spec, profile, workload, policy, peak),
            host_memory(spec, profile, workload, policy, peak),
        ):
            assert all(0 <= num_bytes < float("inf") for num_bytes in need.items.values())
