"""The options under `additional_config["moe_lightning"]`: frozen, strict, parsed once at the edge.

Decides names, types, ranges and defaults. What a value means is decided where it is used; `Policy` (policy/policy.py)
is what the engine reads after the model's sizes are known.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

OPTIONS_KEY = "moe_lightning"

ScheduleName = Literal["cgopipe", "serial", "s2", "s3", "s4"]
CopyTiming = Literal["eager", "lazy", "jitter"]
AdmissionMode = Literal["auto", "worst_case", "expected", "vllm"]
ExpertsPlace = Literal["device", "cpu", "auto", "fetched"]
ExpertKernel = Literal["auto", "vllm", "torch"]
ContextPlace = Literal["auto", "cpu", "link"]
AttentionPlace = Literal["auto", "cpu", "device"]
HostMemoryKind = Literal["pinned", "pageable"]
FaultKind = Literal["raise", "error", "hang", "end_thread"]

PositiveFloat = Annotated[float, msgspec.Meta(gt=0.0)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]


class DebugOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Switches of the emulated device that make races visible. For tests; every one of them costs speed."""

    copy_timing: CopyTiming = "eager"
    """`lazy`: an operation runs only when somebody waits for it. `jitter`: after a random delay."""
    seed: NonNegativeInt = 0
    jitter_max_ms: PositiveFloat = 2.0
    poison: bool = False
    """Fresh and released frames, staging buffers and KV blocks hold NaN bytes."""
    check_hazards: bool = False
    """Report every conflicting access that no event orders (device/hazards.py)."""
    remove_wait: str | None = None
    """Skip one kind of wait, named `waiter<-awaited`, for example `hidden_load<-attention`."""
    zero_page: tuple[NonNegativeInt, NonNegativeInt] | None = None
    """(decoder layer, page): zeroed in host memory once the weights are loaded."""
    fail_attention_at: PositiveInt | None = None
    """The n-th attention task fails, to show that a failure unwinds cleanly."""
    pin_fail_at: PositiveInt | None = None
    """The n-th piece of host memory cannot be pinned."""
    attention_fault: FaultKind | None = None
    """How it fails: `raise` (the default) on the launching thread; on the attention stream's own thread it returns
    an `error`, hangs for ever (`hang`), or ends the thread (`end_thread`)."""

    def __post_init__(self) -> None:
        if self.attention_fault is not None and self.fail_attention_at is None:
            raise ValueError("attention_fault without fail_attention_at does nothing; give both")


class MoeLightningConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the user may set. None: the planner's choice, or with `planner: "off"` the fixed default named below."""

    planner: Literal["auto", "off"] = "auto"
    """`auto`: measure or read the machine, solve for the fastest policy that fits, and size the engine by it. `off`:
    fixed defaults and vLLM's own batch sizes; nothing is measured."""
    hardware: str | None = None
    """A GPU preset's name or the path of a profile (JSON). Default: this machine, measured at first use."""
    expected_prompt_tokens: Annotated[float, msgspec.Meta(ge=1.0)] | None = None
    """Mean prompt length that is planned for. Default: 512, or four fifths of max_model_len if that is less."""
    expected_generation_tokens: PositiveInt | None = None
    """Tokens to generate per prompt. Default: 128, or a fifth of max_model_len if that is less."""
    prefill_tokens_per_sweep: PositiveInt | None = None
    """Most prompt tokens that a sweep takes beside its decode tokens."""
    kv_cache_gib: PositiveFloat | None = None
    """Memory for keys and values, of each rank: the host's, or with attention on the device the device's."""
    num_micro_batches: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    """Without planner: 4."""
    lookahead: PositiveInt = 2
    """How many micro-batches the pre-attention work runs ahead of the post-attention work (2 in the paper)."""
    schedule: ScheduleName = "cgopipe"
    attention: AttentionPlace = "auto"
    """`cpu`: over a cache in host memory, overlapped by the schedule. `device`: by vLLM's own backend, over a cache in
    device memory, so that only weights are paged. `auto`: whichever is predicted to be faster; unplanned, the CPU."""
    prefill_attention: AttentionPlace = "auto"
    """Of prompts without cached context, where `attention` is on the CPU. `device`: from the keys and values at hand;
    only these go down to the cache. `auto`: the device on CUDA, the CPU on the emulated device."""
    prefill_context: ContextPlace = "auto"
    """Of later chunks of a prompt, and of prompts that begin with a prefix hit. `link`: their context comes up to the
    device, which attends to them. `auto`: whichever takes less time for the tokens at hand, by the plan; unplanned,
    and on the emulated device, the CPU."""
    experts: ExpertsPlace = "device"
    """Of streamed layers. `cpu`: computed from the host pages, nothing is streamed. `auto`: layer by layer and sweep by
    sweep, as many on the CPU as the plan says for the tokens at hand: reading an expert there is faster than bringing
    it up where an expert has few tokens. `fetched`: in sweeps of few tokens, each expert that the router asks for comes
    up by itself and the hottest stay on the device; in larger ones layers are streamed. Unquantised SiLU experts only;
    on the CPU build, with our own kernel."""
    expert_slots: PositiveInt | None = None
    """With experts `fetched`: how many experts have room on the device. Default: what the plan would give to resident
    layers; without planner as many as a layer has."""
    fetched_up_to_tokens: NonNegativeInt | None = None
    """With experts `fetched`: the largest sweep that fetches. Default: as long as that is predicted to be faster;
    without planner as long as half of a layer's experts are asked for, if all are asked for alike."""
    expert_kernel: ExpertKernel = "auto"
    """On the device, for layers that are streamed or resident. `torch`: matrix products expert by expert, of
    unquantised SiLU experts. `auto`: those on GPUs before sm_80, on which vLLM's kernel, written in Triton, has no
    tensor cores; elsewhere vLLM's."""
    num_resident_layers: NonNegativeInt | None = None
    """MoE layers whose experts stay on the device, spread evenly over the depth. Without planner: 0."""
    admission: AdmissionMode = "auto"
    """Which KV blocks a request must find free before it starts: those of its longest possible answer (`worst_case`),
    so that none is ever preempted; of the answers to expect by those that came before; or, as vLLM alone does, of its
    prompt. `auto`: of its longest possible answer if it says max_tokens, else of the answers to expect."""
    page_mib: PositiveFloat | None = None
    """Size of one transfer. Default: a layer divided by the number of micro-batches, within 1..64 MiB."""
    attention_threads: PositiveInt | None = None
    """Threads of the CPU attention pool. Default: the CPUs that the launching thread is not bound to."""
    device: Literal["auto", "emulated", "cuda"] = "auto"
    device_memory_mib: PositiveFloat | None = None
    """Memory budget of the device (weights that stay, frames, staging). Default: no limit; on CUDA, what is free."""
    h2d_gb_per_s: PositiveFloat | None = None
    """Speed of the emulated link, host to device. Default: as fast as memcpy goes."""
    d2h_gb_per_s: PositiveFloat | None = None
    host_memory: HostMemoryKind | None = None
    """Of a GPU's pages. `pinned` (the default): all of it, or the engine does not start. `pageable`: what is large is
    not pinned, and each of its copies goes through a small buffer that is, by the launching thread's hand: slower."""
    stall_timeout_s: PositiveFloat = 120.0
    """Once no copy or attention task has completed for so long while one is waited for, the engine ends with an error
    instead of waiting on. Far above any single task's time."""
    metrics_window_s: PositiveFloat = 10.0
    """What the ratios and rates on /metrics look back over."""
    trace_file: str | None = None
    """Where a chrome trace of the last sweeps is written: when the engine stops, when it is asked for its statistics,
    and whenever a file of this name with `.request` behind it is made (`vllm-moe-lightning trace FILE --live`)."""
    trace_operations: PositiveInt = 20_000
    """How many operations each of the four streams keeps for it."""
    debug: DebugOptions = msgspec.field(default_factory=DebugOptions)


PLANNER_ONLY = (
    "hardware",
    "expected_prompt_tokens",
    "expected_generation_tokens",
    "prefill_tokens_per_sweep",
    "kv_cache_gib",
)


FETCHED_ONLY = ("expert_slots", "fetched_up_to_tokens")


def parse_options(raw: object) -> MoeLightningConfig:
    """Options as given by the user (a dict from JSON, or nothing) -> config.

    Raises ValueError with the key, the value and the cure.
    """
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise ValueError(f"{OPTIONS_KEY}: options must be a JSON object, got {type(raw).__name__} {raw!r}")
    _refuse_unknown(raw, MoeLightningConfig, OPTIONS_KEY)
    if isinstance(raw.get("debug"), dict):
        _refuse_unknown(raw["debug"], DebugOptions, f"{OPTIONS_KEY}.debug")
    try:
        config = msgspec.convert(raw, MoeLightningConfig, strict=True)
    except msgspec.ValidationError as error:
        path = _path_of(error)
        raise ValueError(
            f"{OPTIONS_KEY}{path}: {error}; got {_value_at(raw, path)!r}; see README, 'Options'"
        ) from error
    if config.planner == "off" and config.experts == "auto":
        raise ValueError(
            f"{OPTIONS_KEY}.experts: 'auto' is the planner's choice, and planner is 'off'; give cpu, fetched or device"
        )
    ignored = [name for name in FETCHED_ONLY if getattr(config, name) is not None]
    if config.experts != "fetched" and ignored:
        raise ValueError(
            f"{OPTIONS_KEY}: with experts {config.experts!r} nobody reads {ignored}; drop them, or set experts to "
            "'fetched'"
        )
    ignored = [name for name in PLANNER_ONLY if getattr(config, name) is not None]
    if config.planner == "off" and ignored:
        raise ValueError(f"{OPTIONS_KEY}: with planner 'off' nobody reads {ignored}; drop them, or the planner option")
    if config.attention == "device":
        _refuse_what_needs_attention_on_the_cpu(config)
    return config


def _refuse_what_needs_attention_on_the_cpu(config: MoeLightningConfig) -> None:
    """With attention inside of the model's forward there is nothing to overlap with it: one micro-batch, one order."""
    if config.num_micro_batches not in (None, 1):
        raise ValueError(
            f"{OPTIONS_KEY}.num_micro_batches: {config.num_micro_batches} with attention on the device, which runs a "
            "step as one; drop one of the two"
        )
    if config.schedule != "cgopipe":
        raise ValueError(
            f"{OPTIONS_KEY}.schedule: {config.schedule!r} orders attention outside of the model, and attention is "
            "'device'; drop one of the two (s4 is attention on the device over a cache in host memory)"
        )
    if config.prefill_attention == "cpu":
        raise ValueError(f"{OPTIONS_KEY}.prefill_attention: 'cpu' with attention 'device'; drop one of the two")
    if config.prefill_context != "auto":
        raise ValueError(
            f"{OPTIONS_KEY}.prefill_context: {config.prefill_context!r} with attention 'device', where context is "
            "anyway; drop one of the two"
        )


def _refuse_unknown(raw: dict[str, Any], struct: type[msgspec.Struct], where: str) -> None:
    known = set(struct.__struct_fields__)
    unknown = sorted(str(key) for key in raw if key not in known)
    if unknown:
        raise ValueError(f"{where}: unknown option(s) {unknown}; known are {sorted(known)}; see README, 'Options'")


def _path_of(error: msgspec.ValidationError) -> str:
    _, _, path = str(error).partition(" - at `$")
    return path.rstrip("`")


def _value_at(raw: dict[str, Any], path: str) -> object:
    value: Any = raw
    for key in filter(None, path.split(".")):
        value = value.get(key) if isinstance(value, dict) else None
    return value
