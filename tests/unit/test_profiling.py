"""What a measurement is made into, what is refused, and the cache. The probes themselves run once, very small."""

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from vllm_moe_lightning import device_probes, host_probes, machine_readings, profile_cache, profiling
from vllm_moe_lightning.hardware import (
    GIB,
    MIB,
    HardwareProfile,
    HostLimits,
    KernelEfficiencies,
    profile_from_json,
    profile_to_json,
)
from vllm_moe_lightning.kernel_costs import Machine
from vllm_moe_lightning.machine_readings import (
    BYTES_PER_S,
    FLOPS_PER_S,
    READINGS_VERSION,
    SECONDS,
    SHARE,
    MeasuredMachine,
    Reading,
    by_name,
    refuse_unbelievable,
)

TINY = host_probes.Effort(repeats=1, buffer_bytes=MIB, kv_bytes=4 * MIB, gemm_size=64, disk_bytes=8 * MIB)
FIGURES = {
    "host_read.1": (BYTES_PER_S, 20e9),
    "host_read.4": (BYTES_PER_S, 60e9),
    "gemm_float32.4": (FLOPS_PER_S, 0.4e12),
    "gemm_bfloat16.1": (FLOPS_PER_S, 0.3e12),
    "rows_gemm.1": (FLOPS_PER_S, 0.2e12),
    "weights_gemm.1": (BYTES_PER_S, 8e9),
    "gemm_bfloat16.4": (FLOPS_PER_S, 0.8e12),
    "causal_attention.1": (FLOPS_PER_S, 0.06e12),
    "attention_read.3": (BYTES_PER_S, 45e9),
    "attention_cached.3": (FLOPS_PER_S, 0.3e12),
    "attention_task.3": (SECONDS, 8e-6),
    "prompt_attention_128.3": (FLOPS_PER_S, 0.5e12),
    "prompt_attention_64.3": (FLOPS_PER_S, 0.3e12),
    "expert_ffn_read.3": (BYTES_PER_S, 48e9),
    "expert_ffn_gemm.3": (FLOPS_PER_S, 0.6e12),
    "emulated_h2d": (BYTES_PER_S, 9e9),
    "emulated_d2h": (BYTES_PER_S, 8e9),
    "emulated_both_ways_share": (SHARE, 0.8),
    "emulated_copy_latency": (SECONDS, 2e-5),
    "disk_read": (BYTES_PER_S, 2e9),
}


def readings(**changed: float) -> list[Reading]:
    """Fake ones; `host_read_4=...` changes `host_read.4`."""
    values = {name: changed.get(name.replace(".", "_"), value) for name, (_, value) in FIGURES.items()}
    return [
        *(Reading(name=name, unit=FIGURES[name][0], best=value, median=value) for name, value in values.items()),
        host_probes.not_run("cuda_h2d", BYTES_PER_S, device_probes.NO_CUDA),
    ]


def fake_profile(limits: HostLimits | None = None, **changed: float) -> HardwareProfile:
    return profiling.profile_of(readings(**changed), 4, limits or HostLimits(), 32 * GIB, 500 * GIB)


def measured(*, quick: bool = False, fingerprint: str = "abc") -> MeasuredMachine:
    return MeasuredMachine(
        fingerprint=fingerprint,
        quick=quick,
        load_average=0.5,
        duration_s=3.0,
        readings=tuple(readings()),
        profile=fake_profile(),
        version=READINGS_VERSION,
    )


@pytest.mark.parametrize("absurd", [0.0, -1.0, math.nan, math.inf, 1e30])
@pytest.mark.parametrize("name", ["host_read.4", "emulated_copy_latency"])
def test_a_reading_that_cannot_be_is_refused_by_name(name: str, absurd: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} = .*best.* is not between"):
        refuse_unbelievable(readings(**{name.replace(".", "_"): absurd}))


def test_all_absurd_readings_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"host_read\.1 .*emulated_h2d .*disk_read "):
        refuse_unbelievable(readings(host_read_1=0.0, emulated_h2d=math.nan, disk_read=math.inf))


def test_readings_that_were_not_taken_are_no_fault() -> None:
    refuse_unbelievable(readings())
    assert "cuda_h2d" not in by_name(readings())


def test_a_clock_that_stands_still_is_refused_by_the_readings_name() -> None:
    stuck = host_probes.rate_of("memcpy.1", BYTES_PER_S, 1e9, [0.0, 0.0])
    with pytest.raises(ValueError, match=r"memcpy\.1 = inf"):
        refuse_unbelievable([stuck])


def test_a_rate_is_the_best_and_the_median_of_the_repeats() -> None:
    rate = host_probes.rate_of("memcpy.1", BYTES_PER_S, 100.0, [1.0, 2.0, 4.0])
    assert (rate.best, rate.median) == (100.0, 50.0)


def test_the_profile_takes_peaks_from_readings_and_efficiencies_from_their_ratios() -> None:
    profile = fake_profile()
    assert profile.cpu.bandwidth_bytes_per_s == 60e9
    assert profile.gpu.flops_per_s == 0.3e12
    assert profile.efficiencies.cpu_attention_bandwidth == pytest.approx(45 / 60)
    assert profile.efficiencies.cpu_attention_flops == pytest.approx(0.3 / 0.4)
    assert profile.efficiencies.cpu_experts_bandwidth == pytest.approx(48 / 60)
    assert profile.efficiencies.gpu_attention == pytest.approx(0.06 / 0.3)
    assert profile.link.bidirectional_share == 0.8
    assert profile.overheads.cpu_task_s == 8e-6
    assert profile.disk is not None
    assert profile.disk.read_bytes_per_s == 2e9
    # Device and host share one memory, which must not be planned with twice.
    assert profile.gpu.memory_bytes + profile.cpu.memory_bytes == 32 * GIB
    assert profile_from_json(profile_to_json(profile)) == profile


def test_attention_of_prompts_takes_what_was_measured_at_either_head_size() -> None:
    """At half the size a logit's softmax weighs twice as much."""
    profile = fake_profile()
    reached = profile.efficiencies
    assert reached.cpu_prompt_attention == pytest.approx(1.5e12 / 0.4e12)  # 1 / (2 / 0.5 - 1 / 0.3)
    assert reached.cpu_logit_flops == pytest.approx(1024)
    logits = 1e9
    for head_dim, flops_per_s in ((128, 0.5e12), (64, 0.3e12)):
        seconds = Machine(profile).cpu_prompt_attention_s(logits * (4 * head_dim + reached.cpu_logit_flops), 0.0)
        assert seconds == pytest.approx(logits * 4 * head_dim / flops_per_s)
    assert "prompt_attention_128.3" in profile.sources["efficiencies.cpu_logit_flops"]
    assert profile_from_json(profile_to_json(profile)) == profile


@pytest.mark.parametrize(
    ("half_size", "flops_per_s", "logit_flops"),
    [(2.0, 1.0, 0.0), (0.4, 20.0, 19 * 512.0)],
    ids=["faster at half the size", "more than twice as slow"],
)
def test_a_disturbed_reading_of_prompts_gives_figures_that_can_be(
    half_size: float, flops_per_s: float, logit_flops: float
) -> None:
    assert profiling.flops_and_logit_flops(1.0, half_size) == pytest.approx((flops_per_s, logit_flops))


def test_every_measured_figure_has_its_source() -> None:
    profile = fake_profile()
    for path in ("gpu.flops_per_s", "cpu.bandwidth_bytes_per_s", "link.h2d_bytes_per_s", "disk.read_bytes_per_s"):
        assert profile.sources[path].startswith("measured: ")


def test_experts_in_bfloat16_may_go_beyond_the_peak_of_fp32() -> None:
    profile = fake_profile()
    assert profile.efficiencies.cpu_gemm == pytest.approx(0.6 / 0.4)
    assert profile.sources["efficiencies.cpu_gemm"] == "measured: expert_ffn_gemm.3, 1.50 of the peak"


def test_what_goes_beyond_a_peak_that_it_cannot_is_held_to_it_and_said_so() -> None:
    profile = fake_profile(attention_cached_3=0.8e12)
    assert profile.efficiencies.cpu_attention_flops == 1.0
    assert "2.00 of the peak, held to 1" in profile.sources["efficiencies.cpu_attention_flops"]


def test_a_kernel_that_beats_the_read_pattern_raises_the_bandwidth() -> None:
    profile = fake_profile(attention_read_3=90e9)
    assert profile.cpu.bandwidth_bytes_per_s == 90e9
    assert profile.efficiencies.cpu_attention_bandwidth == 1.0
    profile = fake_profile(expert_ffn_read_3=80e9)
    assert profile.cpu.bandwidth_bytes_per_s == 80e9
    assert profile.efficiencies.cpu_experts_bandwidth == 1.0


def test_fewer_threads_that_read_faster_on_a_busy_machine_count() -> None:
    assert fake_profile(host_read_1=70e9).cpu.bandwidth_bytes_per_s == 70e9


def test_a_cgroup_limit_bounds_device_and_host_together() -> None:
    profile = fake_profile(HostLimits(cgroup_memory_bytes=8 * GIB))
    assert profile.gpu.memory_bytes + profile.host_memory_bytes == 8 * GIB


def test_without_a_disk_reading_there_is_no_disk() -> None:
    assert profiling.profile_of(readings(), 4, HostLimits(), 32 * GIB, None).disk is None


@pytest.mark.parametrize(("num_threads", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_thread_counts_double_up_to_all(num_threads: int, counts: list[int]) -> None:
    assert host_probes.thread_counts(num_threads) == counts


@pytest.mark.parametrize(("both_s", "share"), [(1.0, 1.0), (1.25, 0.8), (2.0, 0.5), (3.0, 0.5), (0.5, 1.0)])
def test_the_share_of_two_directions_goes_from_taking_turns_to_overlapping(both_s: float, share: float) -> None:
    assert device_probes.both_ways_share("link", [1.0], [1.0], [both_s]).best == pytest.approx(share)


def test_a_disk_that_is_memory_or_read_only_is_not_measured_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = host_probes.disk_read(tmp_path / "missing", TINY)
    assert missing.best is None
    assert "missing" in missing.note
    monkeypatch.setattr(host_probes, "file_system_of", lambda folder: "tmpfs")
    in_memory = host_probes.disk_read(tmp_path, TINY)
    assert in_memory.best is None
    assert "tmpfs" in in_memory.note


def test_a_busy_machine_and_an_unread_disk_are_warned_of() -> None:
    unread = [host_probes.not_run("disk_read", BYTES_PER_S, "/x: read-only")]
    warnings = profiling._warnings(unread, load_average=7.0, num_threads=2)
    assert [("read-only" in text, "load 7.0" in text) for text in warnings] == [(True, False), (False, True)]
    assert profiling._warnings(readings(), load_average=0.2, num_threads=2) == []


def test_a_very_small_measurement_of_this_machine_gives_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "QUICK", TINY)
    steps: list[tuple[str, int, int]] = []
    machine = profiling.measure_machine(
        "abc", quick=True, disk_folder=tmp_path, progress=lambda *step: steps.append(step)
    )
    assert machine.profile.measured_at is not None
    assert machine.profile.gpu.flops_per_s > 0
    assert {
        "attention_read",
        "prompt_attention_128",
        "memcpy",
        "gemm_float32",
        "expert_ffn_read",
        "expert_ffn_gemm",
    } <= {r.name.partition(".")[0] for r in machine.readings}
    assert steps[-1][1] == steps[-1][2] == len(steps) - 1
    assert not list(tmp_path.iterdir())  # the disk probe's file is gone


@pytest.fixture
def counted_measure(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Stands in for the measurement; says how often it was taken."""
    taken: list[bool] = []

    def measure(machine: str, *, quick: bool, **_: Any) -> MeasuredMachine:
        taken.append(quick)
        return measured(quick=quick, fingerprint=machine)

    monkeypatch.setattr(profiling, "measure_machine", measure)
    return lambda: len(taken)


def test_a_measurement_is_taken_once_and_again_on_request(tmp_path: Path, counted_measure: Callable[[], int]) -> None:
    first, _ = profiling.machine_profile(cache=tmp_path)
    again, warnings = profiling.machine_profile(cache=tmp_path)
    assert (again, warnings, counted_measure()) == (first, [], 1)
    profiling.machine_profile(cache=tmp_path, refresh=True)
    assert counted_measure() == 2


def test_a_quick_measurement_does_not_stand_for_a_full_one(tmp_path: Path, counted_measure: Callable[[], int]) -> None:
    profiling.machine_profile(cache=tmp_path, quick=True)
    full, _ = profiling.machine_profile(cache=tmp_path)
    assert not full.quick
    assert counted_measure() == 2
    assert profiling.machine_profile(cache=tmp_path, quick=True)[0] == full  # but the other way round
    assert counted_measure() == 2


@pytest.mark.parametrize("content", [b"", b"{}", b'{"version": 1}', b"\xff\x00"])
def test_a_broken_cache_is_warned_of_and_replaced(
    content: bytes, tmp_path: Path, counted_measure: Callable[[], int]
) -> None:
    file = profile_cache.cache_file(tmp_path, profile_cache.fingerprint(), quick=False)
    file.write_bytes(content)
    _, [warning] = profiling.machine_profile(cache=tmp_path)
    assert str(file) in warning
    assert profiling.machine_profile(cache=tmp_path)[1] == []
    assert counted_measure() == 1


def test_a_measurement_of_an_older_version_is_taken_again_and_said_so(
    tmp_path: Path, counted_measure: Callable[[], int]
) -> None:
    machine = profile_cache.fingerprint()
    profile_cache.store_cached(tmp_path, measured(fingerprint=machine))
    file = profile_cache.cache_file(tmp_path, machine, quick=False)
    raw = msgspec.json.decode(file.read_bytes())
    del raw["version"], raw["profile"]["efficiencies"]["cpu_experts_bandwidth"]
    file.write_bytes(msgspec.json.encode(raw))
    again, [warning] = profiling.machine_profile(cache=tmp_path)
    version = machine_readings.READINGS_VERSION
    assert warning.endswith(
        f"is of version 1 of the readings, this is version {version}: the machine is measured again"
    )
    assert (again.version, counted_measure()) == (machine_readings.READINGS_VERSION, 1)
    assert profiling.machine_profile(cache=tmp_path)[1] == []


def test_a_profile_without_the_efficiencies_of_cpu_experts_still_loads_with_the_defaults() -> None:
    raw = msgspec.json.decode(profile_to_json(fake_profile()))
    del raw["efficiencies"]["cpu_experts_bandwidth"]
    loaded = profile_from_json(msgspec.json.encode(raw))
    assert loaded.efficiencies.cpu_experts_bandwidth == KernelEfficiencies().cpu_experts_bandwidth


def test_a_profile_from_before_prompts_were_measured_on_the_cpu_has_them_run_like_decode_attention() -> None:
    raw = msgspec.json.decode(profile_to_json(fake_profile()))
    del raw["efficiencies"]["cpu_prompt_attention"], raw["efficiencies"]["cpu_logit_flops"]
    loaded = profile_from_json(msgspec.json.encode(raw))
    assert (loaded.efficiencies.cpu_prompt_attention, loaded.efficiencies.cpu_logit_flops) == (None, 0.0)
    machine = Machine(loaded)
    assert machine.cpu_prompt_attention_s(1e12, 0.0) == machine.cpu_attention_s(1e12, 0.0)


def test_an_absurd_figure_in_the_cache_is_not_used(tmp_path: Path) -> None:
    profile_cache.store_cached(tmp_path, measured())
    file = profile_cache.cache_file(tmp_path, "abc", quick=False)
    raw = msgspec.json.decode(file.read_bytes())
    raw["profile"]["link"]["h2d_bytes_per_s"] = 0.0
    file.write_bytes(msgspec.json.encode(raw))
    cached, [warning] = profile_cache.load_cached(tmp_path, "abc", quick=False)
    assert cached is None
    assert "link.h2d_bytes_per_s" in warning


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path, counted_measure: Callable[[], int]) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    machine, warnings = profiling.machine_profile(cache=blocked / "cache")
    assert machine.profile.cpu.bandwidth_bytes_per_s == 60e9
    assert any("XDG_CACHE_HOME" in warning for warning in warnings)


def test_the_cache_lies_under_xdg_cache_home_if_that_is_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert profile_cache.cache_folder() == Path("/var/cache/me/vllm-moe-lightning")
    for ignored in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert profile_cache.cache_folder() == Path.home() / ".cache/vllm-moe-lightning"


def test_other_limits_are_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    before = profile_cache.fingerprint()
    assert profile_cache.fingerprint() == before
    monkeypatch.setattr(profile_cache, "cgroup_memory_bytes", lambda root: 3 * GIB)
    assert profile_cache.fingerprint() != before


def test_age_is_counted_from_the_measurement_and_never_negative() -> None:
    machine = measured()
    assert machine.profile.measured_at is not None
    then = datetime.fromisoformat(machine.profile.measured_at)
    assert machine.age_s(then + timedelta(hours=2)) == 7200
    assert machine.age_s(then - timedelta(hours=2)) == 0
    assert then.tzinfo == UTC


def test_efforts_read_more_than_the_caches_hold() -> None:
    assert host_probes.QUICK.kv_bytes >= 128 * MIB
    assert host_probes.FULL.kv_bytes >= host_probes.QUICK.kv_bytes


def test_a_core_s_gemm_takes_the_time_of_its_rows_and_of_its_weights_one_after_the_other() -> None:
    """The emulated device computes on one core; a GPU's two times overlap."""
    profile = fake_profile()
    flops, num_bytes = 2e9, 8e6
    rows_s, weights_s = flops / 0.2e12, num_bytes / 8e9
    assert Machine(profile).gpu_gemm_s(flops, num_bytes) == pytest.approx(rows_s + weights_s)
    roofline = replace(profile, efficiencies=replace(profile.efficiencies, gpu_overlap=1.0))
    assert Machine(roofline).gpu_gemm_s(flops, num_bytes) == pytest.approx(max(rows_s, weights_s))
