"""`plan` and `explain`: what a model would do on a machine, from its config.json alone. Needs no GPU, torch or vLLM."""

from __future__ import annotations

import json
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_moe_lightning.cli.usage import checked

if TYPE_CHECKING:
    from vllm_moe_lightning.hardware import HardwareProfile
    from vllm_moe_lightning.model_spec import MoeModelSpec
    from vllm_moe_lightning.policy.limits import PlanLimits
    from vllm_moe_lightning.policy.search import PlannedPolicy
    from vllm_moe_lightning.prompt_place import PromptPlaces
    from vllm_moe_lightning.workload import Workload


class BatchingName(StrEnum):
    continuous = "continuous"
    static = "static"


class Place(StrEnum):
    auto = "auto"
    cpu = "cpu"
    gpu = "gpu"


class KvCacheType(StrEnum):
    auto = "auto"
    int8_per_token_head = "int8_per_token_head"
    fp8_per_token_head = "fp8_per_token_head"


ModelOption = Annotated[Path, typer.Option(help="Folder with a Hugging Face config.json; no weights are read.")]
GpuOption = Annotated[
    str | None, typer.Option(help="GPU preset: t4, l4, a10, a100-40, a100-80, h100, h200, rtx4090 ...")
]
HostOption = Annotated[str | None, typer.Option(help="Host preset. Default: a usual one for the GPU.")]
HardwareOption = Annotated[Path | None, typer.Option(help="Hardware profile (JSON), in place of presets.")]
NumGpusOption = Annotated[int, typer.Option(min=1, help="GPUs of the preset in the host.")]
LinkOption = Annotated[float | None, typer.Option(min=0.001, help="Host-device link, if not the preset's.")]
HostMemoryOption = Annotated[float | None, typer.Option(min=0.001, help="Host memory in GB, if not the preset's.")]
PromptLenOption = Annotated[float, typer.Option(min=1, help="Mean prompt length in tokens.")]
GenLenOption = Annotated[int, typer.Option(min=1, help="Tokens to generate per prompt.")]
KvCacheTypeOption = Annotated[KvCacheType, typer.Option(help="As for vllm serve; auto: the model's own type.")]
BatchingOption = Annotated[BatchingName, typer.Option(help="Steady state of serving, or the paper's static batch.")]
PromptAttentionOption = Annotated[
    Place,
    typer.Option(help="Where prompts are attended to, if decode attention is on the CPU; auto: as the engine does."),
]
GanttOption = Annotated[Path | None, typer.Option(help="Where a simulated sweep is drawn, as PNG, SVG or PDF.")]
TraceOption = Annotated[Path | None, typer.Option(help="Where the simulated sweep goes as a chrome trace.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON only.")]


def plan(
    model: ModelOption,
    gpu: GpuOption = None,
    host: HostOption = None,
    hardware: HardwareOption = None,
    num_gpus: NumGpusOption = 1,
    link_gb_per_s: LinkOption = None,
    host_memory_gb: HostMemoryOption = None,
    prompt_len: PromptLenOption = 512,
    gen_len: GenLenOption = 128,
    kv_cache_dtype: KvCacheTypeOption = KvCacheType.auto,
    batching: BatchingOption = BatchingName.continuous,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Most sequences at a time.")] = None,
    attention: Annotated[Place, typer.Option(help="Where decode attention runs.")] = Place.auto,
    prompt_attention: PromptAttentionOption = Place.auto,
    prefill_tokens: Annotated[int | None, typer.Option(min=1, help="Most prompt tokens of a prefill sweep.")] = None,
    time_limit_s: Annotated[float, typer.Option(min=0.01, help="Of the solver.")] = 10.0,
    compare: Annotated[str | None, typer.Option(help="GPU presets, comma-separated: one row for each.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Where the roofline goes, as PNG, SVG or PDF.")] = None,
    gantt: GanttOption = None,
    trace: TraceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the policy with most tokens per second, and what would raise it."""
    from vllm_moe_lightning.policy.limits import Batching, PlanLimits

    limits = checked(
        lambda: PlanLimits(
            batching=Batching(batching.value),
            max_num_seqs=max_num_seqs,
            attention_on_gpu=None if attention is Place.auto else attention is Place.gpu,
            prefill_tokens_per_sweep=prefill_tokens,
            time_limit_s=time_limit_s,
        )
    )
    spec, workload = checked(lambda: _model_and_workload(model, prompt_len, gen_len, kv_cache_dtype))

    def machine(preset: str | None) -> HardwareProfile:
        return _machine(preset, host, None if compare else hardware, num_gpus, link_gb_per_s, host_memory_gb)

    if compare is not None:
        if any(option is not None for option in (gpu, hardware, plot, gantt, trace)):
            raise typer.BadParameter("--compare names the GPUs; drop --gpu, --hardware, --plot, --gantt and --trace")
        names = [name.strip() for name in compare.split(",") if name.strip()]
        boxes = {name: checked(partial(machine, name)) for name in names}
        _compare(spec, boxes, workload, limits, prompt_attention, as_json)
        return
    profile = checked(lambda: machine(gpu))
    limits = replace(limits, **_prompt_places(prompt_attention, spec, profile))
    planned = _find(spec, profile, workload, limits)
    if plot is not None:
        _plot(spec, profile, workload, planned, plot)
    simulated_s = _simulate(spec, profile, workload, planned, gantt, trace)
    from vllm_moe_lightning.policy.sensitivity import marginal_values

    values = marginal_values(spec, profile, workload, limits, planned)
    if as_json:
        marginal = {v.change: {"tokens_per_s": v.tokens_per_s, "gain": v.gain} for v in values}
        head = {**_head(spec, profile, workload), **planned.to_dict(), "simulated_sweep_s": simulated_s}
        _print_json({**head, "marginal_values": marginal})
        return
    from vllm_moe_lightning.cli import plan_report

    plan_report.show_plan(spec, profile, workload, planned, simulated_s)
    plan_report.show_marginal_values(values)


def explain(
    model: ModelOption,
    micro_batch_size: Annotated[int, typer.Option(min=1, help="Sequences of a micro-batch.")],
    num_micro_batches: Annotated[int, typer.Option(min=1)],
    gpu: GpuOption = None,
    host: HostOption = None,
    hardware: HardwareOption = None,
    num_gpus: NumGpusOption = 1,
    link_gb_per_s: LinkOption = None,
    host_memory_gb: HostMemoryOption = None,
    prompt_len: PromptLenOption = 512,
    gen_len: GenLenOption = 128,
    kv_cache_dtype: KvCacheTypeOption = KvCacheType.auto,
    batching: BatchingOption = BatchingName.continuous,
    num_resident_layers: Annotated[int, typer.Option(min=0)] = 0,
    num_disk_layers: Annotated[int, typer.Option(min=0)] = 0,
    attention: Annotated[Place, typer.Option(help="Where decode attention runs; auto: CPU.")] = Place.auto,
    prompt_attention: PromptAttentionOption = Place.auto,
    ffn: Annotated[Place, typer.Option(help="Where the experts of streamed layers run; auto: GPU.")] = Place.auto,
    kv_gpu_ratio: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.0,
    prefill_tokens: Annotated[int | None, typer.Option(min=1, help="Most prompt tokens of a prefill sweep.")] = None,
    gantt: GanttOption = None,
    trace: TraceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time and memory of a policy that you choose, whether it fits or not."""
    from vllm_moe_lightning.policy import search
    from vllm_moe_lightning.policy.limits import Batching
    from vllm_moe_lightning.workload import HrmPolicy

    spec, workload = checked(lambda: _model_and_workload(model, prompt_len, gen_len, kv_cache_dtype))
    profile = checked(lambda: _machine(gpu, host, hardware, num_gpus, link_gb_per_s, host_memory_gb))

    def explained() -> PlannedPolicy:
        places = _prompt_places(prompt_attention, spec, profile)
        if attention is Place.gpu and prompt_attention is not Place.cpu:
            places["prompts_on_gpu"] = True  # with decode attention, whatever the model has
        policy = HrmPolicy(
            micro_batch_size=micro_batch_size,
            num_micro_batches=num_micro_batches,
            attention_on_gpu=attention is Place.gpu,
            ffn_on_gpu=ffn is not Place.cpu,
            num_resident_layers=num_resident_layers,
            kv_gpu_ratio=kv_gpu_ratio,
            num_disk_layers=num_disk_layers,
            prefill_tokens_per_sweep=prefill_tokens,
            **places,
        )
        return search.explain(spec, profile, workload, Batching(batching.value), policy)

    planned = checked(explained)
    simulated_s = _simulate(spec, profile, workload, planned, gantt, trace)
    if as_json:
        _print_json({**_head(spec, profile, workload), **planned.to_dict(), "simulated_sweep_s": simulated_s})
        return
    from vllm_moe_lightning.cli import plan_report

    plan_report.show_plan(spec, profile, workload, planned, simulated_s)


def _model_and_workload(
    model: Path, prompt_len: float, gen_len: int, kv_cache_dtype: KvCacheType
) -> tuple[MoeModelSpec, Workload]:
    from vllm_moe_lightning.model_config import read_model_spec
    from vllm_moe_lightning.workload import Workload

    spec = read_model_spec(model).with_kv_cache_dtype(kv_cache_dtype.value)
    if spec.max_context is not None and prompt_len + gen_len > spec.max_context:
        raise ValueError(
            f"--prompt-len {prompt_len:g} and --gen-len {gen_len} are over the {spec.max_context} tokens of {spec.name}"
        )
    return spec, Workload(prompt_len=prompt_len, gen_len=gen_len)


def _prompt_places(place: Place, spec: MoeModelSpec, profile: HardwareProfile) -> PromptPlaces:
    from vllm_moe_lightning.config import MoeLightningConfig
    from vllm_moe_lightning.prompt_place import prompt_places

    options = {
        Place.auto: MoeLightningConfig(),
        Place.cpu: MoeLightningConfig(prefill_attention="cpu", prefill_context="cpu"),
        Place.gpu: MoeLightningConfig(prefill_attention="device", prefill_context="link"),
    }[place]
    return prompt_places(options, spec, profile)


def _machine(
    gpu: str | None,
    host: str | None,
    hardware: Path | None,
    num_gpus: int,
    link_gb_per_s: float | None,
    host_memory_gb: float | None,
) -> HardwareProfile:
    from msgspec.structs import replace as replace_struct

    from vllm_moe_lightning.hardware import read_profile
    from vllm_moe_lightning.hardware_presets import GPU_PRESETS, preset_profile

    if hardware is not None:
        if gpu is not None or host is not None:
            raise ValueError("--hardware is a whole machine; drop --gpu and --host, or drop --hardware")
        profile = read_profile(hardware)
    elif gpu is None:
        raise ValueError(f"name a GPU (--gpu {', '.join(GPU_PRESETS)}) or a profile (--hardware FILE)")
    else:
        profile = preset_profile(gpu, host, num_gpus)
    if link_gb_per_s is not None:
        speed = link_gb_per_s * 1e9
        link = replace_struct(profile.link, h2d_bytes_per_s=speed, d2h_bytes_per_s=speed)
        profile = replace_struct(profile, link=link)
    if host_memory_gb is not None:
        cpu = replace_struct(profile.cpu, memory_bytes=int(host_memory_gb * 1e9))
        profile = replace_struct(profile, cpu=cpu)
    return profile


def _find(spec: MoeModelSpec, profile: HardwareProfile, workload: Workload, limits: PlanLimits) -> PlannedPolicy:
    """The plan; without one the reason on stderr and exit status 1."""
    from vllm_moe_lightning.errors import MoeLightningError
    from vllm_moe_lightning.policy.search import find_policy

    try:
        return find_policy(spec, profile, workload, limits)
    except MoeLightningError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


def _compare(
    spec: MoeModelSpec,
    boxes: dict[str, HardwareProfile],
    workload: Workload,
    limits: PlanLimits,
    prompt_attention: Place,
    as_json: bool,
) -> None:
    """A row for each machine; one that nothing fits gets its reason, and spoils nothing for the others."""
    from vllm_moe_lightning.errors import PolicyInfeasibleError
    from vllm_moe_lightning.policy.search import find_policy

    plans: dict[str, PlannedPolicy | str] = {}
    for name, profile in boxes.items():
        try:
            placed = replace(limits, **_prompt_places(prompt_attention, spec, profile))
            plans[name] = find_policy(spec, profile, workload, placed)
        except PolicyInfeasibleError as error:
            plans[name] = str(error)
    if as_json:
        rows = {name: {"error": p} if isinstance(p, str) else p.to_dict() for name, p in plans.items()}
        machines = {name: profile.name for name, profile in boxes.items()}
        _print_json({"model": spec.name, "machines": machines, "plans": rows})
        return
    from vllm_moe_lightning.cli import plan_report

    plan_report.show_comparison(spec, boxes, workload, plans)


def _plot(spec: MoeModelSpec, profile: HardwareProfile, workload: Workload, planned: PlannedPolicy, path: Path) -> None:
    try:
        from vllm_moe_lightning.roofline_plot import plot_roofline

        plot_roofline(spec, profile, workload, planned.policy, path)
    except ImportError as error:
        typer.echo(f"--plot needs matplotlib ({error}): pip install matplotlib", err=True)
        raise typer.Exit(1) from error


def _simulate(
    spec: MoeModelSpec,
    profile: HardwareProfile,
    workload: Workload,
    planned: PlannedPolicy,
    gantt: Path | None,
    trace: Path | None,
) -> float:
    """Seconds of a simulated decode (or mixed) sweep; draws it and writes its trace where asked."""
    from vllm_moe_lightning.pipeline.gantt import plot_gantt, simulated_spans, simulated_trace
    from vllm_moe_lightning.pipeline.trace import write_chrome_trace
    from vllm_moe_lightning.planned_sweep import simulate_policy
    from vllm_moe_lightning.policy.limits import Batching
    from vllm_moe_lightning.workload import decode_load, steady_load

    load_of = decode_load if planned.batching is Batching.STATIC else steady_load
    sweep = simulate_policy(spec, profile, planned.policy, load_of(workload, planned.policy))
    if trace is not None:
        write_chrome_trace(trace, simulated_trace(sweep))
    if gantt is not None:
        try:
            plot_gantt([(f"{spec.name} on {profile.name}, simulated", simulated_spans(sweep))], gantt)
        except ImportError as error:
            typer.echo(f"--gantt needs matplotlib ({error}): pip install matplotlib", err=True)
            raise typer.Exit(1) from error
    return sweep.duration_s


def _head(spec: MoeModelSpec, profile: HardwareProfile, workload: Workload) -> dict[str, object]:
    return {
        "model": spec.name,
        "hardware": profile.name,
        "workload": {"prompt_len": workload.prompt_len, "gen_len": workload.gen_len},
        "kv_bytes_per_token": spec.kv_bytes_per_token,
    }


def _print_json(value: dict[str, object]) -> None:
    typer.echo(json.dumps(value, indent=2, allow_nan=False))
