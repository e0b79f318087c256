"""Tables and bars of `plan` and `explain` on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from vllm_moe_lightning.cost_model import SweepCost
from vllm_moe_lightning.hardware import HardwareProfile
from vllm_moe_lightning.memory_model import MemoryNeed
from vllm_moe_lightning.model_spec import MoeModelSpec
from vllm_moe_lightning.policy.search import PlannedPolicy
from vllm_moe_lightning.policy.sensitivity import MarginalValue
from vllm_moe_lightning.resources import HrmResource, label_of
from vllm_moe_lightning.workload import HrmPolicy, Workload

GB = 1e9
BAR_WIDTH = 30
# Gains below this are noise of the grid.
SMALLEST_GAIN = 5e-4


def show_plan(
    spec: MoeModelSpec, profile: HardwareProfile, workload: Workload, planned: PlannedPolicy, simulated_sweep_s: float
) -> None:
    console = Console()
    console.print(
        f"[bold]{spec.name}[/] on [bold]{profile.name}[/], prompt {workload.prompt_len:g}, generate {workload.gen_len}"
    )
    console.print(_policy_table(spec, planned))
    for phase, (sweep, num_sweeps) in planned.phases.items():
        if num_sweeps:
            console.print(_time_bars(phase, sweep, num_sweeps, planned.policy))
    console.print(
        f"simulated task by task: {simulated_sweep_s:.3f} s a sweep, "
        f"{simulated_sweep_s / planned.cost.decode.time_s:.2f} x the bound (--gantt, --trace)"
    )
    console.print(_memory_table(planned.gpu_memory, planned.host_memory))
    if planned.tight_constraints:
        console.print(f"tight: {', '.join(planned.tight_constraints)}")
    console.print(f"bottleneck: [bold]{_label(planned.bottleneck, planned.policy)}[/]")
    if planned.found_by != "given":
        console.print(
            f"{planned.num_choices} choices, {planned.solve_time_s:.2f} s, by {planned.found_by}", style="dim"
        )
    if not planned.fits:
        console.print("this policy does not fit", style="bold red")
    for warning in planned.warnings:
        console.print(f"warning: {warning}", style="yellow")


def _policy_table(spec: MoeModelSpec, planned: PlannedPolicy) -> Table:
    policy = planned.policy
    table = Table(show_header=False, box=None)
    table.add_row("predicted", f"[bold]{planned.tokens_per_s:.2f} tokens/s[/] ({planned.batching} batching)")
    batch = f"{policy.num_micro_batches} micro-batches of {policy.micro_batch_size} = {policy.batch_size} sequences"
    table.add_row("batch", batch)
    kv = f", {policy.kv_gpu_ratio:.1%} of the KV cache there" if policy.attention_on_gpu else ""
    table.add_row("attention", f"on the {'GPU' if policy.attention_on_gpu else 'CPU'}{kv}")
    table.add_row("prompts", f"attended to on the {'GPU' if policy.prompts_on_gpu else 'CPU'}{_later_chunks(policy)}")
    table.add_row("experts", f"on the {'GPU' if policy.ffn_on_gpu else 'CPU'}")
    streamed = spec.num_moe_layers - policy.num_resident_layers - policy.num_disk_layers
    disk = f", {policy.num_disk_layers:g} on disk" if policy.num_disk_layers else ""
    table.add_row("layers", f"{policy.num_resident_layers:g} resident, {streamed:g} in host memory{disk}")
    return table


def _later_chunks(policy: HrmPolicy) -> str:
    """What is said of chunks with a context where those of a prompt are not all attended to in one place."""
    least = policy.context_query_tokens
    if policy.attention_on_gpu or bool(least) == policy.prompts_on_gpu:
        return ""
    return f", later chunks of {least} tokens or more on the GPU" if least else ", later chunks on the CPU"


def _label(resource: HrmResource, policy: HrmPolicy) -> str:
    return label_of(resource, experts_on_cpu=not policy.ffn_on_gpu)


def _time_bars(phase: str, sweep: SweepCost, num_sweeps: float, policy: HrmPolicy) -> Table:
    table = Table(title=f"{phase}: {num_sweeps:g} x {sweep.time_s:.3f} s", title_justify="left", box=None)
    for column in ("resource", "busy"):
        table.add_column(column)
    table.add_column("s", justify="right")
    for resource, busy_s in sweep.busy_s.items():
        share = busy_s / sweep.time_s
        style = "bold" if resource is sweep.bottleneck else ""
        table.add_row(_label(resource, policy), "█" * round(share * BAR_WIDTH), f"{busy_s:.3f}", style=style)
    return table


def _memory_table(gpu: MemoryNeed, host: MemoryNeed) -> Table:
    table = Table(title="memory, GB", title_justify="left", box=None)
    table.add_column("")
    for column in ("GPU", "host"):
        table.add_column(column, justify="right")

    def cell(num_bytes: float) -> str:
        return f"{num_bytes / GB:.2f}" if num_bytes else ""

    for item in dict.fromkeys([*gpu.items, *host.items]):
        cells = [cell(need.items.get(item, 0.0)) for need in (gpu, host)]
        if any(cells):
            table.add_row(item, *cells)
    table.add_row("need", cell(gpu.total_bytes), cell(host.total_bytes), style="bold")
    table.add_row("have", cell(gpu.budget_bytes), cell(host.budget_bytes))
    return table


def show_marginal_values(values: list[MarginalValue]) -> None:
    table = Table(title="what would raise it", title_justify="left", box=None)
    table.add_column("with")
    for column in ("tokens/s", "gain"):
        table.add_column(column, justify="right")
    for value in values:
        gain = f"{value.gain:+.1%}" if value.gain >= SMALLEST_GAIN else "none"
        table.add_row(value.change, f"{value.tokens_per_s:.2f}", gain)
    Console().print(table)


def show_comparison(
    spec: MoeModelSpec,
    boxes: dict[str, HardwareProfile],
    workload: Workload,
    plans: dict[str, PlannedPolicy | str],
) -> None:
    title = f"{spec.name}, prompt {workload.prompt_len:g}, generate {workload.gen_len}"
    table = Table(title=title, title_justify="left", box=None)
    for column in ("GPU", "tokens/s", "batch", "attention", "resident", "bottleneck", "GPU GB", "host GB"):
        table.add_column(column, justify="left" if column in ("GPU", "attention", "bottleneck") else "right")
    for name, planned in plans.items():
        if isinstance(planned, str):
            table.add_row(name, "-", "does not fit", style="dim")
            continue
        policy = planned.policy
        table.add_row(
            name,
            f"{planned.tokens_per_s:.1f}",
            f"{policy.micro_batch_size}x{policy.num_micro_batches}",
            "GPU" if policy.attention_on_gpu else "CPU",
            f"{policy.num_resident_layers:g}/{spec.num_moe_layers}",
            _label(planned.bottleneck, policy),
            f"{planned.gpu_memory.total_bytes / GB:.1f}",
            f"{planned.host_memory.total_bytes / GB:.1f}",
        )
    console = Console()
    console.print(table)
    for name, profile in boxes.items():
        console.print(f"{name}: {profile.name}", style="dim", highlight=False)
    for name, planned in plans.items():
        if isinstance(planned, str):
            console.print(f"{name}: {planned}", highlight=False)
