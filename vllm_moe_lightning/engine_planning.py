"""From what an engine is asked to be to what it will be: batch, token budget, KV cache, micro-batches, resident layers.

Values that the user gave stand, and are refused with need and have where they do not fit; the others are solved for
(policy/search). The search is held to what the engine runs: attention on the CPU, experts on the device, no disk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from msgspec.structs import replace as replace_struct

from vllm_moe_lightning.engine_plan import EnginePlan, PredictedFigures
from vllm_moe_lightning.engine_request import EngineRequest, kv_blocks_of, machine_under_options, workload_of
from vllm_moe_lightning.errors import PolicyInfeasibleError
from vllm_moe_lightning.hardware import MIB, HardwareProfile
from vllm_moe_lightning.memory_model import MemoryNeed, gpu_memory, host_memory
from vllm_moe_lightning.model_spec import MoeModelSpec
from vllm_moe_lightning.policy.grid import PlanLimits
from vllm_moe_lightning.policy.policy import page_bytes_for
from vllm_moe_lightning.policy.search import PlannedPolicy, find_policy
from vllm_moe_lightning.stock_vllm import StockRuns, stock_runs
from vllm_moe_lightning.tensor_parallel import machine_of_rank, model_of_rank
from vllm_moe_lightning.workload import SweepLoad, Workload

WORTH_A_LARGER_BATCH = 0.02
"""A batch is not made larger for less: slots that a workload may never fill, and KV that another process could use."""
MAX_ROUNDS = 4
NOT_IN_HOST_MEMORY = "one sequence of that length does not fit host memory"

GIVEN, PLANNED = "given", "planned"


@dataclass(frozen=True)
class PlannedEngine:
    """The plan, and what it was made from: all of one rank."""

    plan: EnginePlan
    policy: PlannedPolicy
    spec: MoeModelSpec
    machine: HardwareProfile
    workload: Workload


class EnginePlanning:
    """One engine's planning, of one rank; collects reasons on its way.

    Raises PolicyInfeasibleError or ValueError with need, have and cure, UnsupportedError for what ranks cannot share.
    """

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.spec = spec = model_of_rank(request.spec, request.num_ranks)
        machine = machine_under_options(machine_of_rank(request.profile, request.num_ranks), request.options)
        self.machine = replace_struct(machine, disk=None)  # the engine's pages come from host memory only
        workload, self.reasons = workload_of(request)
        self.block_bytes = request.block_size * spec.kv_bytes_per_token
        self.max_model_len = self._longest_that_the_cache_holds(workload)
        self.workload = replace(workload, kv=kv_blocks_of(request, self.block_bytes, self.max_model_len))
        self.limits = self._limits()

    def _longest_that_the_cache_holds(self, workload: Workload) -> int:
        """max_model_len, lowered to a given cache's size if the user did not give it."""
        request, given = self.request, self.request.given
        longest = request.max_model_len
        # Windowed layers have pools of their own in vLLM, which takes less; vLLM checks those itself.
        if given.kv_bytes is None or self.spec.num_windowed_layers:
            return longest
        usable = int(given.kv_bytes // self.block_bytes) - 1
        if usable * request.block_size >= longest:
            return longest
        expected = workload.final_context
        needed = longest if given.max_model_len else math.ceil(expected)
        if usable < -(-needed // request.block_size):
            blocks = -(-needed // request.block_size) + 1
            what = f"max_model_len {needed}" if given.max_model_len else f"the expected {needed} tokens"
            raise ValueError(
                f"moe_lightning: a sequence of {what} needs {blocks} KV blocks of {request.block_size} tokens "
                f"({blocks * self.block_bytes / MIB:.1f} MiB, the block that vLLM holds back included), but "
                f"{given.kv_flag} gives {usable + 1} ({given.kv_bytes / MIB:.1f} MiB); raise {given.kv_flag}, or lower "
                f"{'--max-model-len' if given.max_model_len else 'expected_prompt_tokens'} to at most "
                f"{max(usable, 0) * request.block_size}"
            )
        self.reasons["max_model_len"] = f"lowered from {longest}: all that the given KV cache holds"
        return usable * request.block_size

    # ------------------------------------------------ the search

    def stock_runs(self) -> StockRuns:
        return stock_runs(self.spec, self.machine, self.workload, self.limits)

    def plan(self) -> PlannedEngine:
        try:
            return self._planned()
        except PolicyInfeasibleError:
            if not self._may_lower_max_model_len():
                raise
        work = self.workload
        shortest = int(work.kv.blocks_of(work.final_context))
        self.workload = replace(work, kv=replace(work.kv, least_usable_blocks=shortest))
        planned = self._planned()
        longest = (planned.plan.num_kv_blocks - work.kv.unused_blocks) * self.request.block_size
        reasons = {**planned.plan.reasons, "max_model_len": f"lowered from {self.max_model_len}: {NOT_IN_HOST_MEMORY}"}
        return replace(planned, plan=replace_struct(planned.plan, max_model_len=longest, reasons=reasons))

    def _may_lower_max_model_len(self) -> bool:
        """Only the model's own, and only where one sequence of it is more than the expected ones."""
        work, given = self.workload, self.request.given
        is_long = work.kv.least_usable_blocks > work.kv.blocks_of(work.final_context)
        return is_long and given.max_model_len is None and given.kv_bytes is None

    def _planned(self) -> PlannedEngine:
        machine = self.machine
        for _ in range(MAX_ROUNDS):
            policy = self._least_batch(machine)
            tokens = self._max_num_batched_tokens(policy)
            gpu, host = self._needs(policy, self.machine, tokens)
            if gpu.fits and host.fits:
                return self._finished(policy, tokens)
            # Buffers for given token limits come on top of the steady state that the search knows.
            machine = _smaller(machine, gpu, host)
        raise PolicyInfeasibleError(
            f"moe_lightning: buffers for sweeps of {tokens} tokens fit no plan; lower --max-num-batched-tokens or "
            f"--max-num-seqs\n{_need_and_have(gpu, host)}"
        )

    def _limits(self) -> PlanLimits:
        options, bound = self.request.options, self._batch_bound()
        given = self.request.given.max_num_seqs
        return PlanLimits(
            max_num_seqs=bound,
            fill_max_num_seqs=given is not None and given == bound,
            num_micro_batches=options.num_micro_batches,
            num_resident_layers=options.num_resident_layers,
            attention_on_gpu=False,
            ffn_on_gpu=True,
            lookahead=options.lookahead,
        )

    def _batch_bound(self) -> int | None:
        """The most sequences that the given limits let be in flight: a given batch larger than that is a limit too,
        but not one that is reached."""
        given, work = self.request.given, self.workload
        prefill = self.request.options.prefill_tokens_per_sweep
        prefill_per_seq = work.prompt_len / work.gen_len  # that a sweep takes in for each sequence in flight
        bounds = {} if given.max_num_seqs is None else {"--max-num-seqs": given.max_num_seqs}
        if work.kv.fixed_blocks is not None:
            usable = work.kv.fixed_blocks - work.kv.unused_blocks
            bounds[given.kv_flag] = int(usable // work.kv.blocks_of(work.final_context))
        if prefill is not None:
            bounds["prefill_tokens_per_sweep"] = int(prefill / prefill_per_seq)
        if given.max_num_batched_tokens is not None:
            tokens = given.max_num_batched_tokens
            bounds["--max-num-batched-tokens"] = int(tokens / (1.0 + prefill_per_seq))
            if prefill is not None:
                if prefill >= tokens:
                    raise ValueError(
                        f"moe_lightning.prefill_tokens_per_sweep: {prefill} leaves no room for a decode token in "
                        f"--max-num-batched-tokens {tokens}; give less than {tokens}"
                    )
                bounds["--max-num-batched-tokens"] = tokens - prefill
        if not bounds:
            return None
        least = min(bounds, key=lambda name: bounds[name])
        if least != "--max-num-seqs":
            self.reasons["in_flight"] = f"{bounds[least]} by {least}"
        return max(1, bounds[least])

    def _fastest(self, machine: HardwareProfile) -> PlannedPolicy:
        try:
            return find_policy(self.spec, machine, self.workload, self.limits)
        except PolicyInfeasibleError as error:
            raise PolicyInfeasibleError(f"moe_lightning: {error}{self._what_was_given()}") from error

    def _what_was_given(self) -> str:
        options, given = self.request.options, self.request.given
        values = {
            "--max-num-seqs": given.max_num_seqs,
            "--max-num-batched-tokens": given.max_num_batched_tokens,
            given.kv_flag: given.kv_bytes,
            "--max-model-len": given.max_model_len,
            "num_micro_batches": options.num_micro_batches,
            "num_resident_layers": options.num_resident_layers,
            "device_memory_mib": options.device_memory_mib,
        }
        fixed = [f"{name} {value:g}" for name, value in values.items() if value is not None]
        return f"\nfixed by you: {', '.join(fixed)}; drop one, and the planner chooses it" if fixed else ""

    def _least_batch(self, machine: HardwareProfile) -> PlannedPolicy:
        """The smallest batch that is about as fast as the fastest."""
        best, limits = self._fastest(machine), self.limits
        if limits.fill_max_num_seqs:
            return best
        enough = best.tokens_per_s * (1.0 - WORTH_A_LARGER_BATCH)
        low, high = (limits.num_micro_batches or 1) - 1, best.policy.batch_size
        while high - low > max(1, high // 64):
            middle = (low + high) // 2
            planned = find_policy(self.spec, machine, self.workload, replace(limits, max_num_seqs=middle))
            if planned.tokens_per_s >= enough:
                best, high = planned, planned.policy.batch_size
            else:
                low = middle
        return best

    # ------------------------------------------------ what comes out of it

    def _prefill_tokens(self, policy: PlannedPolicy) -> int:
        """Of a sweep in the steady state."""
        steady = self._in_flight(policy) * self.workload.prompt_len / self.workload.gen_len
        return self.request.options.prefill_tokens_per_sweep or max(1, math.ceil(steady))

    def _max_num_batched_tokens(self, policy: PlannedPolicy) -> int:
        request = self.request
        if request.given.max_num_batched_tokens is not None:
            self.reasons["max_num_batched_tokens"] = GIVEN
            return request.given.max_num_batched_tokens
        num_seqs = request.given.max_num_seqs or policy.policy.batch_size
        steady = num_seqs + self._prefill_tokens(policy)
        if not request.enable_chunked_prefill:
            self.reasons["max_num_batched_tokens"] = "a whole prompt, as chunked prefill is off"
            return max(steady, self.max_model_len)
        whole_prompt = num_seqs + math.ceil(self.workload.prompt_len)
        if whole_prompt > steady and all(need.fits for need in self._needs(policy, self.machine, whole_prompt)):
            self.reasons["max_num_batched_tokens"] = "planned: decode tokens, and room for one expected prompt"
            return whole_prompt
        self.reasons["max_num_batched_tokens"] = "planned: decode tokens and prefill_tokens_per_sweep"
        return steady

    def _needs(self, policy: PlannedPolicy, machine: HardwareProfile, tokens: int) -> tuple[MemoryNeed, MemoryNeed]:
        """With buffers for sweeps of that many tokens."""
        work, choice = self.workload, policy.policy
        seqs = min(tokens, choice.batch_size)
        peak = SweepLoad(seqs, work.mean_decode_context, (tokens - seqs) / work.prompt_len, work.prompt_len)
        host = host_memory(self.spec, machine, work, choice, peak)
        more_blocks = self._num_blocks(policy) - work.kv.num_blocks(choice.batch_size, work.final_context)
        items = {**host.items, "KV cache of what micro-batches do not divide": more_blocks * self.block_bytes}
        return gpu_memory(self.spec, machine, work, choice, peak), replace(host, items=items)

    def _in_flight(self, policy: PlannedPolicy) -> int:
        """A batch that was given need not be a multiple of the micro-batches."""
        return (self.limits.max_num_seqs if self.limits.fill_max_num_seqs else None) or policy.policy.batch_size

    def _num_blocks(self, policy: PlannedPolicy) -> int:
        return math.ceil(self.workload.kv.num_blocks(self._in_flight(policy), self.workload.final_context))

    def _finished(self, policy: PlannedPolicy, max_num_batched_tokens: int) -> PlannedEngine:
        request, work, choice = self.request, self.workload, policy.policy
        given, options = request.given, request.options
        num_seqs = given.max_num_seqs or choice.batch_size
        blocks = self._num_blocks(policy)
        sweep = policy.cost.decode
        page_bytes = page_bytes_for(
            replace_struct(options, num_micro_batches=choice.num_micro_batches), int(self.spec.expert_layer_bytes)
        )
        reasons = {
            "max_num_seqs": GIVEN if given.max_num_seqs else PLANNED,
            "num_micro_batches": GIVEN if options.num_micro_batches else PLANNED,
            "num_resident_layers": PLANNED if options.num_resident_layers is None else GIVEN,
            "prefill_tokens_per_sweep": GIVEN if options.prefill_tokens_per_sweep else PLANNED,
            "kv_bytes": given.kv_flag or f"planned: {blocks} blocks of {request.block_size} tokens",
            "page_bytes": GIVEN if options.page_mib else "a layer divided by the micro-batches, 1 to 64 MiB",
            "max_model_len": "given" if given.max_model_len else "the model's",
            **self.reasons,
        }
        rate = policy.tokens_per_s
        plan = EnginePlan(
            expected_prompt_tokens=work.prompt_len,
            expected_generation_tokens=work.gen_len,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefill_tokens_per_sweep=self._prefill_tokens(policy),
            num_micro_batches=choice.num_micro_batches,
            micro_batch_size=-(-num_seqs // choice.num_micro_batches),
            kv_bytes=given.kv_bytes or int(blocks * self.block_bytes),
            num_resident_layers=int(choice.num_resident_layers),
            block_size=request.block_size,
            num_kv_blocks=blocks,
            max_model_len=self.max_model_len,
            page_bytes=page_bytes,
            expert_layer_bytes=int(self.spec.expert_layer_bytes),
            other_weight_bytes=int(self.spec.always_resident_bytes),
            hardware=self.machine.name,
            reasons=reasons,
            predicted=PredictedFigures(
                generated_tokens_per_s=rate,
                total_tokens_per_s=rate * (1.0 + work.prompt_len / work.gen_len),
                sweep_s=sweep.time_s,
                bottleneck=str(sweep.bottleneck),
                busy={str(name): float(busy_s / sweep.time_s) for name, busy_s in sweep.busy_s.items()},
            ),
        )
        return PlannedEngine(plan, policy, self.spec, self.machine, work)


def _smaller(machine: HardwareProfile, gpu: MemoryNeed, host: MemoryNeed) -> HardwareProfile:
    """Less of the memory that was short, so that the next search leaves it free."""
    reached = machine.efficiencies
    less_gpu = max(0.0, -gpu.free_bytes) / reached.gpu_memory
    less_host = max(0.0, -host.free_bytes) / reached.host_memory
    return replace_struct(
        machine,
        gpu=replace_struct(machine.gpu, memory_bytes=int(machine.gpu.memory_bytes - less_gpu)),
        cpu=replace_struct(machine.cpu, memory_bytes=int(machine.host_memory_bytes - less_host)),
    )


def _need_and_have(gpu: MemoryNeed, host: MemoryNeed) -> str:
    return "\n".join(
        f"  {name}: need {need.total_bytes / MIB:.1f} MiB, have {need.budget_bytes / MIB:.1f} MiB"
        for name, need in (("device", gpu), ("host", host))
    )
