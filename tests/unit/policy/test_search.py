"""Whole searches: plans fit, more never hurts, and what is said when nothing fits."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.helpers.plan_draws import GIB, Draw, draw, with_memory
from vllm_moe_lightning.errors import PolicyInfeasibleError
from vllm_moe_lightning.hardware import HardwareProfile
from vllm_moe_lightning.hardware_presets import GPU_PRESETS, preset_profile
from vllm_moe_lightning.policy.grid import micro_batch_sizes, tabulate
from vllm_moe_lightning.policy.limits import Batching, PlanLimits
from vllm_moe_lightning.policy.screening import screen
from vllm_moe_lightning.policy.search import PlannedPolicy, explain, find_policy
from vllm_moe_lightning.policy.sensitivity import CHANGES, marginal_values
from vllm_moe_lightning.policy.shortage import find_shortage
from vllm_moe_lightning.workload import Workload

SEEDS = st.integers(0, 10_000)
# Each example plans at least once, which takes a tenth of a second and more on a busy machine.
SEARCHES = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
# Ties of 2e-4 go to the simpler plan.
TOLERANCE = 5e-4


def plan_or_none(drawn: Draw) -> PlannedPolicy | None:
    try:
        return find_policy(*drawn.all)
    except PolicyInfeasibleError:
        return None


@SEARCHES
@given(seed=SEEDS)
def test_every_plan_fits(seed: int) -> None:
    drawn = draw(seed, small=True)
    planned = plan_or_none(drawn)
    if planned is None:
        return
    policy, model, hardware = planned.policy, drawn.model, drawn.hardware
    assert sum(planned.gpu_memory.items.values()) <= 0.9 * hardware.gpu.memory_bytes
    assert sum(planned.host_memory.items.values()) <= 0.9 * hardware.cpu.memory_bytes
    assert policy.num_resident_layers + policy.num_disk_layers <= model.num_moe_layers
    assert float(policy.num_resident_layers).is_integer()
    assert policy.batch_size <= drawn.limits.max_num_seqs
    assert 0.0 <= policy.kv_gpu_ratio <= (1.0 if policy.attention_on_gpu else 0.0)
    if policy.num_disk_layers:
        assert policy.num_disk_layers * model.expert_layer_bytes <= hardware.disk.capacity_bytes
    assert math.isfinite(planned.tokens_per_s)
    assert planned.tokens_per_s > 0.0


@SEARCHES
@given(seed=SEEDS, change=st.sampled_from(sorted(CHANGES)), times=st.sampled_from([1, 8]))
def test_more_of_any_resource_never_lowers_the_planned_throughput(seed: int, change: str, times: int) -> None:
    drawn = draw(seed, small=True)
    before = plan_or_none(drawn)
    if before is None:
        return
    hardware = drawn.hardware
    for _ in range(times):
        hardware = CHANGES[change](hardware)
    after = find_policy(drawn.model, hardware, drawn.workload, drawn.limits)
    assert after.tokens_per_s >= before.tokens_per_s * (1 - TOLERANCE)


@SEARCHES
@given(seed=SEEDS)
def test_more_allowed_sequences_never_lower_the_planned_throughput(seed: int) -> None:
    drawn = draw(seed, small=True)
    # Below this the only micro-batches are ones that nothing overlaps with.
    drawn = replace(drawn, limits=replace(drawn.limits, max_num_seqs=max(drawn.limits.max_num_seqs, 8)))
    before = plan_or_none(drawn)
    if before is None:
        return
    limits = replace(drawn.limits, max_num_seqs=2 * drawn.limits.max_num_seqs)
    after = find_policy(drawn.model, drawn.hardware, drawn.workload, limits)
    assert after.tokens_per_s >= before.tokens_per_s * (1 - TOLERANCE)


def shrunk(drawn: Draw, share: float) -> Draw:
    hardware = with_memory(
        drawn.hardware,
        gpu_bytes=max(1 << 20, int(share * drawn.hardware.gpu.memory_bytes)),
        host_bytes=max(1 << 20, int(share * drawn.hardware.cpu.memory_bytes)),
    )
    return replace(drawn, hardware=hardware)


@SEARCHES
@given(seed=SEEDS, share=st.sampled_from([0.02, 0.2, 0.4]))
def test_the_smallest_change_is_enough_and_no_more_than_needed(seed: int, share: float) -> None:
    drawn = shrunk(draw(seed, small=True), share)
    table = tabulate(*drawn.all)
    if screen(table).incumbent is not None:
        return
    shortage = find_shortage(table)

    def plan_with(extra_gpu_gb: float, extra_host_gb: float) -> PlannedPolicy | None:
        hardware = with_memory(
            drawn.hardware,
            gpu_bytes=drawn.hardware.gpu.memory_bytes + math.ceil(extra_gpu_gb / 0.9 * 1e9),
            host_bytes=drawn.hardware.cpu.memory_bytes + math.ceil(extra_host_gb / 0.9 * 1e9),
        )
        return plan_or_none(replace(drawn, hardware=hardware))

    assert plan_with(*shortage.extra_both_gb) is not None
    if shortage.extra_gpu_gb is not None:
        assert plan_with(shortage.extra_gpu_gb, 0.0) is not None
        assert plan_with(shortage.extra_gpu_gb * 0.99, 0.0) is None
    if shortage.extra_host_gb is not None:
        assert plan_with(0.0, shortage.extra_host_gb) is not None
        assert plan_with(0.0, shortage.extra_host_gb * 0.99) is None


def test_no_plan_means_a_table_of_need_and_have_and_a_cure() -> None:
    drawn = draw(3, small=True)
    hardware = with_memory(drawn.hardware, gpu_bytes=1 * GIB, host_bytes=1 * GIB)
    with pytest.raises(PolicyInfeasibleError) as caught:
        find_policy(drawn.model, hardware, drawn.workload, drawn.limits)
    text = str(caught.value)
    for word in ("drawn", "need", "have", "short of", "GPU", "host", "GB", "smallest change that fits"):
        assert word in text


# B30: absurd readings, and user values beyond what there is


@pytest.mark.parametrize("reading", [0.0, -1.0, float("nan"), 1e30])
@pytest.mark.parametrize(
    "figure", ["gpu.bandwidth_bytes_per_s", "gpu.flops_per_s", "cpu.flops_per_s", "link.h2d_bytes_per_s"]
)
def test_b30_an_absurd_reading_is_named_before_any_plan(figure: str, reading: float) -> None:
    hardware = draw(0).hardware
    level, name = figure.split(".")
    with pytest.raises(ValueError, match=figure):
        structs.replace(hardware, **{level: structs.replace(getattr(hardware, level), **{name: reading})})


def machine_with_host_bytes(host_bytes: int) -> tuple[HardwareProfile, Draw]:
    drawn = draw(7, small=True)
    limits = replace(drawn.limits, batching=Batching.CONTINUOUS)
    drawn = replace(drawn, limits=limits)
    gpu_bytes = int((1.3 * drawn.model.always_resident_bytes + 3 * drawn.model.expert_layer_bytes) / 0.9) + 2 * GIB
    return with_memory(drawn.hardware, gpu_bytes=gpu_bytes, host_bytes=host_bytes), drawn


def test_b30_64_mib_of_ram_are_refused_with_need_and_have() -> None:
    hardware, drawn = machine_with_host_bytes(64 << 20)
    with pytest.raises(PolicyInfeasibleError, match=r"host +[0-9.]+ GB +0\.060 GB"):
        find_policy(drawn.model, hardware, drawn.workload, drawn.limits)


@pytest.mark.parametrize("spare_bytes", [1, 1 << 20])
def test_b30_ram_for_the_weights_and_a_byte_is_refused_or_fits(spare_bytes: int) -> None:
    hardware, drawn = machine_with_host_bytes(
        0 or int(draw(7, small=True).model.expert_bytes_total / 0.9) + spare_bytes
    )
    planned = plan_or_none(replace(drawn, hardware=hardware))
    assert planned is None or planned.fits


def test_b30_16_tib_of_ram_give_a_finite_plan() -> None:
    hardware, drawn = machine_with_host_bytes(16 << 40)
    planned = find_policy(drawn.model, hardware, drawn.workload, drawn.limits)
    assert planned.fits
    assert 1 <= planned.policy.batch_size <= drawn.limits.max_num_seqs


@pytest.mark.parametrize("name", ["max_num_seqs", "micro_batch_size", "num_micro_batches", "prefill_tokens_per_sweep"])
@pytest.mark.parametrize("value", [0, -1])
def test_b30_sizes_below_one_are_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {value}"):
        PlanLimits(**{name: value})


def test_b30_a_batch_of_a_million_is_refused_with_need_and_have() -> None:
    hardware, drawn = machine_with_host_bytes(256 * GIB)
    with pytest.raises(PolicyInfeasibleError, match="micro-batches of 1000000"):
        find_policy(drawn.model, hardware, drawn.workload, PlanLimits(micro_batch_size=10**6))


def test_b30_a_micro_batch_over_the_limit_of_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 10, over max_num_seqs 4; raise the limit or lower the batch"):
        PlanLimits(max_num_seqs=4, micro_batch_size=10)


def test_b30_a_limit_of_a_million_sequences_is_no_obligation() -> None:
    hardware, drawn = machine_with_host_bytes(256 * GIB)
    planned = find_policy(drawn.model, hardware, drawn.workload, PlanLimits(max_num_seqs=10**6))
    assert planned.fits


# What a plan says


def test_given_choices_are_kept() -> None:
    drawn = draw(5, small=True)
    hardware = with_memory(drawn.hardware, gpu_bytes=300 * GIB, host_bytes=3000 * GIB)
    limits = PlanLimits(micro_batch_size=3, num_micro_batches=5, attention_on_gpu=True, ffn_on_gpu=True)
    policy = find_policy(drawn.model, hardware, drawn.workload, limits).policy
    assert (policy.micro_batch_size, policy.num_micro_batches) == (3, 5)
    assert policy.attention_on_gpu
    assert policy.ffn_on_gpu


def test_explaining_the_plan_gives_the_plan() -> None:
    drawn = draw(5, small=True)
    drawn = replace(drawn, hardware=with_memory(drawn.hardware, gpu_bytes=300 * GIB, host_bytes=3000 * GIB))
    planned = find_policy(*drawn.all)
    explained = explain(drawn.model, drawn.hardware, drawn.workload, drawn.limits.batching, planned.policy)
    assert explained.tokens_per_s == planned.tokens_per_s
    assert explained.bottleneck is planned.bottleneck
    assert not explained.tight_constraints


def test_micro_batches_that_nothing_overlaps_with_are_left_out_unless_there_is_no_other() -> None:
    drawn = draw(5, small=True)
    limits = PlanLimits(lookahead=2, attention_on_gpu=False)
    assert tabulate(drawn.model, drawn.hardware, drawn.workload, limits).num_micro_batches.min() == 3
    only_one = replace(limits, max_num_seqs=1)
    assert tabulate(drawn.model, drawn.hardware, drawn.workload, only_one).num_micro_batches.max() == 1


def test_micro_batch_sizes_rise_in_steps_of_at_most_a_thirtysecond() -> None:
    sizes = micro_batch_sizes()
    assert sizes[:128] == list(range(1, 129))
    assert all(0 < later - size <= max(1, size / 32) for size, later in itertools.pairwise(sizes))
    assert sizes[-1] == 4096


def test_marginal_values_are_sorted_and_never_losses() -> None:
    drawn = draw(5, small=True)
    drawn = replace(drawn, hardware=with_memory(drawn.hardware, gpu_bytes=30 * GIB, host_bytes=3000 * GIB))
    planned = find_policy(*drawn.all)
    values = marginal_values(*drawn.all, planned)
    assert len(values) == len(CHANGES) + (drawn.hardware.disk is not None)
    assert [v.gain for v in values] == sorted((v.gain for v in values), reverse=True)
    assert all(v.gain >= -TOLERANCE for v in values)


def test_a_plan_bound_by_the_link_gains_as_the_link_does() -> None:
    drawn = draw(5, small=True)
    hardware = preset_profile("t4")
    needed = drawn.model.always_resident_bytes + 2.5 * drawn.model.expert_layer_bytes + GIB
    hardware = with_memory(hardware, gpu_bytes=int(needed / 0.9), host_bytes=3000 * GIB)
    link = structs.replace(hardware.link, h2d_bytes_per_s=1e8, d2h_bytes_per_s=1e8)
    hardware = structs.replace(hardware, link=link)
    limits = PlanLimits(max_num_seqs=64, ffn_on_gpu=True)
    planned = find_policy(drawn.model, hardware, drawn.workload, limits)
    assert planned.bottleneck == "h2d"
    best = marginal_values(drawn.model, hardware, drawn.workload, limits, planned)[0]
    assert best.change == "+10 % link"
    assert best.gain == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("name", GPU_PRESETS)
def test_a_preset_has_a_plan(name: str) -> None:
    """A model of 14 GB, which the smallest of them can stream."""
    model = replace(draw(11).model, num_layers=16, num_dense_layers=0)
    planned = find_policy(model, preset_profile(name), Workload(512, 128))
    assert planned.fits
    assert planned.found_by == "highs"
    assert not planned.warnings
