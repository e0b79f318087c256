"""From what an engine is asked to be to what it will be: batch, token budget, KV cache, micro-batches, resident layers.

Values that the user gave stand, and are refused with need and have where they do not fit; the others are solved for
(policy/search). The search is held to what the engine runs: attention on the CPU (or by schedule s4 on the device,
with the cache on the host), or attention and the cache on the device; experts on the device, no disk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from msgspec.structs import replace as replace_struct

from vllm_moe_lightning.engine_plan import GIVEN, PLANNED, EnginePlan, PredictedFigures
from vllm_moe_lightning.engine_request import (
    NULL_BLOCKS,
    EngineRequest,
    longest_sequence,
    machine_under_options,
    workload_of,
)
from vllm_moe_lightning.errors import PolicyInfeasibleError
from vllm_moe_lightning.experts_place import cpu_expert_layers, fetched_up_to_tokens
from vllm_moe_lightning.hardware import HardwareProfile
from vllm_moe_lightning.model_spec import MoeModelSpec
from vllm_moe_lightning.policy.limits import PlanLimits
from vllm_moe_lightning.policy.policy import page_bytes_for
from vllm_moe_lightning.policy.search import PlannedPolicy, find_policy
from vllm_moe_lightning.prompt_place import prompt_places, why_prompts_are_there
from vllm_moe_lightning.row_costs import query_token_cost
from vllm_moe_lightning.stock_vllm import StockRuns, stock_runs
from vllm_moe_lightning.tensor_parallel import machine_of_rank, model_of_rank
from vllm_moe_lightning.workload import HrmPolicy, KvBlocks, SweepBuffers, Workload, steady_load

WORTH_A_LARGER_BATCH = 0.02
"""A batch is not made larger for less: slots that a workload may never fill, and KV that another process could use."""
LARGEST_PROMPT_ROOM = 2048
"""Tokens of a prompt that a sweep has room for whatever the batch: in a small one, a prompt would take many sweeps."""

OVERLAPPING = ("cgopipe", "s4")
NOT_OVERLAPPING = "given; the prediction is cgopipe's, which overlaps more"


@dataclass(frozen=True)
class PlannedEngine:
    """The plan, and what it was made from: all of one rank."""

    plan: EnginePlan
    policy: PlannedPolicy
    spec: MoeModelSpec
    machine: HardwareProfile
    workload: Workload


class EnginePlanning:
    """One engine's planning, of one rank, with attention in one place; collects reasons on its way.

    Raises PolicyInfeasibleError or ValueError with need, have and cure, UnsupportedError for what ranks cannot share.
    """

    def __init__(self, request: EngineRequest, *, attention_on_device: bool = False) -> None:
        self.request = request
        self.attention_on_device = attention_on_device
        self.spec = model_of_rank(request.spec, request.num_ranks)
        machine = machine_under_options(machine_of_rank(request.profile, request.num_ranks), request.options)
        self.machine = replace_struct(machine, disk=None)  # the engine's pages come from host memory only
        shares = {"host_memory": request.given.host_memory_share, "gpu_memory": request.given.gpu_memory_share}
        given_shares = {name: share for name, share in shares.items() if share is not None}
        reached = replace_struct(machine.efficiencies, **given_shares)
        self.machine = replace_struct(self.machine, efficiencies=reached)
        lengths, self.reasons = workload_of(request)
        for name, share in given_shares.items():
            self.reasons[f"{name}_share"] = f"{share:g}, by --gpu-memory-utilization"
        self.block_bytes = request.block_size * self.spec.kv_bytes_per_token
        self.max_model_len = longest_sequence(request, self.spec, lengths.final_context)
        if self.max_model_len < request.max_model_len:
            self.reasons["max_model_len"] = f"lowered from {request.max_model_len}: all that the KV cache holds"
        self.limits = self._limits(lengths)
        kv, room = self._kv_blocks(lengths), self._prompt_room(lengths)
        slots = request.options.expert_slots or 0
        self.workload = replace(lengths, kv=kv, buffers=self._buffers(lengths, room), expert_slots=slots)

    # ------------------------------------------------ what is given

    def _limits(self, work: Workload) -> PlanLimits:
        options, given = self.request.options, self.request.given.max_num_seqs
        bound = self._batch_bound(work)
        return PlanLimits(
            max_num_seqs=bound,
            fill_max_num_seqs=given is not None and given == bound,
            num_micro_batches=1 if self.attention_on_device else options.num_micro_batches,
            num_resident_layers=options.num_resident_layers,
            attention_on_gpu=self.attention_on_device or options.schedule == "s4",
            ffn_on_gpu=True,
            kv_on_host=not self.attention_on_device,
            kv_on_device=self.attention_on_device,
            # Of no effect on the steady state, but says that no sweep parks its hidden states on the host.
            prefill_tokens_per_sweep=options.prefill_tokens_per_sweep or 1,
            lookahead=options.lookahead,
            **prompt_places(options, self.spec, self.machine),
        )

    def _batch_bound(self, work: Workload) -> int | None:
        """The most sequences that the given limits let be in flight: a given batch larger than that is a limit too,
        but not one that is reached."""
        given, prefill = self.request.given, self.request.options.prefill_tokens_per_sweep
        prefill_per_seq = work.prompt_len / work.gen_len  # that a sweep takes in for each sequence in flight
        bounds = {} if given.max_num_seqs is None else {"--max-num-seqs": given.max_num_seqs}
        if given.kv_bytes is not None:
            blocks_per_seq = -(-work.final_context // self.request.block_size)
            bounds[given.kv_flag] = int((given.kv_bytes // self.block_bytes - NULL_BLOCKS) // blocks_per_seq)
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
            self.reasons["in_flight"] = f"at most {max(1, bounds[least])}, by {least}"
        return max(1, bounds[least])

    @property
    def _whole_batch(self) -> int | None:
        """A given batch, which need not be a multiple of the micro-batches."""
        return self.limits.max_num_seqs if self.limits.fill_max_num_seqs else None

    def _kv_blocks(self, work: Workload) -> KvBlocks:
        fixed = self.request.given.kv_bytes
        kv = KvBlocks(
            tokens_per_block=self.request.block_size,
            unused_blocks=NULL_BLOCKS,
            fixed_blocks=None if fixed is None else int(fixed // self.block_bytes),
        )
        whole = (self._whole_batch or 0) * kv.blocks_of(work.final_context)
        return replace(kv, least_usable_blocks=int(max(kv.blocks_of(self.max_model_len), whole)))

    def _prompt_room(self, work: Workload) -> int:
        if not self.request.enable_chunked_prefill:
            return self.max_model_len
        return min(math.ceil(work.prompt_len), LARGEST_PROMPT_ROOM)

    def _buffers(self, work: Workload, room: int) -> SweepBuffers:
        tokens = self.request.given.max_num_batched_tokens
        least = max(room, self.request.options.prefill_tokens_per_sweep or 0)
        if tokens is None and self._whole_batch:
            tokens = self._whole_batch + max(self._prefill_tokens(work, self._whole_batch), least)
        most = self.request.options.prefill_tokens_per_sweep
        return SweepBuffers(
            least_prefill_tokens=least,
            total_tokens=tokens,
            most_prefill_tokens=most,
            longest_sequence=-(-self.max_model_len // self.request.block_size) * self.request.block_size,
        )

    def _prefill_tokens(self, work: Workload, num_seqs: int) -> int:
        """Of a sweep in the steady state."""
        steady = max(1, math.ceil(num_seqs * work.prompt_len / work.gen_len))
        return self.request.options.prefill_tokens_per_sweep or steady

    # ------------------------------------------------ the search

    def stock_runs(self) -> StockRuns:
        return stock_runs(self.spec, self.machine, self.workload, self.limits)

    def plan(self) -> PlannedEngine:
        options = self.request.options
        if options.experts != "fetched" or options.expert_slots is not None:
            return self._relieved()
        # More would be taken from resident layers, which large sweeps need and small ones do not miss.
        request = replace(self.request, options=replace_struct(options, expert_slots=self.spec.num_experts))
        fetching = EnginePlanning(request, attention_on_device=self.attention_on_device)
        fetching.reasons["expert_slots"] = "planned: as many as a layer has experts"
        try:
            planned = fetching.plan()
        except PolicyInfeasibleError:
            self.reasons["expert_slots"] = "none: the device has no room for them"
            return self._relieved()
        if not planned.plan.fetched_up_to_tokens:
            self.reasons["expert_slots"] = "none: fetching is not predicted to be faster"
            return self._relieved()
        return planned

    def _relieved(self) -> PlannedEngine:
        """The plan, of less than was asked for where nothing else fits."""
        try:
            return self._planned(self.workload, {})
        except PolicyInfeasibleError as error:
            reason = error
        for workload, reasons in self._reliefs():
            try:
                return self._planned(workload, reasons)
            except PolicyInfeasibleError:
                continue
        raise reason

    def _reliefs(self) -> Iterator[tuple[Workload, dict[str, str]]]:
        """What can be done without where nothing fits, and the reasons that it leaves: first the room for a prompt,
        then sequences as long as the model's own max_model_len."""
        work, given = self.workload, self.request.given
        if self.request.enable_chunked_prefill and given.max_num_batched_tokens is None:
            work = replace(work, buffers=self._buffers(work, 0))
            yield work, {}
        shortest = (self._whole_batch or 1) * work.kv.blocks_of(work.final_context)
        if given.max_model_len is None and given.kv_bytes is None and shortest < work.kv.least_usable_blocks:
            lowered = f"lowered from {self.max_model_len}: host memory does not hold a sequence of that length"
            kv = replace(work.kv, least_usable_blocks=int(shortest))
            yield replace(work, kv=kv), {"max_model_len": lowered}

    def _planned(self, workload: Workload, reasons: dict[str, str]) -> PlannedEngine:
        try:
            fastest = find_policy(self.spec, self.machine, workload, self.limits)
        except PolicyInfeasibleError as error:
            raise PolicyInfeasibleError(f"moe_lightning: {error}{self._what_was_given()}") from error
        policy = self._least_batch(fastest, workload)
        plan = self._engine_plan(policy, workload, {**self.reasons, **reasons})
        return PlannedEngine(plan, policy, self.spec, self.machine, workload)

    def _what_was_given(self) -> str:
        options, given = self.request.options, self.request.given
        values = {
            "--max-num-seqs": given.max_num_seqs,
            "--max-num-batched-tokens": given.max_num_batched_tokens,
            given.kv_flag: given.kv_bytes,
            "--max-model-len": given.max_model_len,
            "num_micro_batches": options.num_micro_batches,
            "num_resident_layers": options.num_resident_layers,
            "expert_slots": options.expert_slots,
            "device_memory_mib": options.device_memory_mib,
        }
        fixed = [f"{name} {value:g}" for name, value in values.items() if value is not None]
        return f"\nfixed by you: {', '.join(fixed)}; drop one, and the planner chooses it" if fixed else ""

    def _least_batch(self, best: PlannedPolicy, workload: Workload) -> PlannedPolicy:
        """The smallest batch that is about as fast as the fastest."""
        limits = self.limits
        if limits.fill_max_num_seqs:
            return best
        enough = best.tokens_per_s * (1.0 - WORTH_A_LARGER_BATCH)
        low, high = (limits.num_micro_batches or 1) - 1, best.policy.batch_size
        while high - low > max(1, high // 64):
            middle = (low + high) // 2
            planned = find_policy(self.spec, self.machine, workload, replace(limits, max_num_seqs=middle))
            if planned.tokens_per_s >= enough:
                best, high = planned, planned.policy.batch_size
            else:
                low = middle
        return best

    def _cpu_expert_layers(self, choice: HrmPolicy, work: Workload, most_tokens: int) -> list[tuple[int, int]]:
        if self.request.options.experts != "auto":
            return []
        return cpu_expert_layers(self.spec, self.machine, choice, work.final_context / 2, most_tokens)

    def _fetch_reasons(self) -> dict[str, str]:
        if self.request.options.experts != "fetched":
            return {}
        given = self.request.options.fetched_up_to_tokens is not None
        up_to = "as long as it is predicted to be faster, if all experts are asked for alike"
        return {"expert_slots": GIVEN, "fetched_up_to_tokens": GIVEN if given else up_to}

    def _fetched_up_to_tokens(self, choice: HrmPolicy, work: Workload, most_tokens: int) -> int:
        options = self.request.options
        if not work.expert_slots:
            return 0
        if options.fetched_up_to_tokens is not None:
            return options.fetched_up_to_tokens
        context = work.final_context / 2
        return fetched_up_to_tokens(self.spec, self.machine, choice, context, work.expert_slots, most_tokens)

    # ------------------------------------------------ what comes out of it

    def _engine_plan(self, policy: PlannedPolicy, work: Workload, reasons: dict[str, str]) -> EnginePlan:
        request, choice = self.request, policy.policy
        given, options = request.given, request.options
        in_flight = self._whole_batch or choice.batch_size
        num_seqs = given.max_num_seqs or in_flight
        prefill = self._prefill_tokens(work, in_flight)
        room = work.buffers.least_prefill_tokens if work.buffers else 0
        blocks = math.ceil(work.kv.num_blocks(in_flight, work.final_context))
        longest = min(self.max_model_len, (blocks - NULL_BLOCKS) * request.block_size)
        page_bytes = page_bytes_for(
            replace_struct(options, num_micro_batches=choice.num_micro_batches), int(self.spec.expert_layer_bytes)
        )
        sweep, rate = policy.cost.decode, policy.tokens_per_s
        room_reason = f"decode tokens, and {room:g} of prompts" if room > prefill else "decode and prefill tokens"
        most_tokens = given.max_num_batched_tokens or num_seqs + max(prefill, int(room))
        return EnginePlan(
            expected_prompt_tokens=work.prompt_len,
            expected_generation_tokens=work.gen_len,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=most_tokens,
            prefill_tokens_per_sweep=prefill,
            attention_on_device=self.attention_on_device,
            num_micro_batches=choice.num_micro_batches,
            micro_batch_size=-(-in_flight // choice.num_micro_batches),
            query_token_cost=query_token_cost(self.spec, self.machine, choice, steady_load(work, choice)),
            kv_bytes=given.kv_bytes or int(blocks * self.block_bytes),
            num_resident_layers=int(choice.num_resident_layers),
            prompts_on_device=choice.prompts_on_gpu,
            context_query_tokens=choice.context_query_tokens,
            cpu_expert_layers=self._cpu_expert_layers(choice, work, most_tokens),
            expert_slots=work.expert_slots,
            fetched_up_to_tokens=self._fetched_up_to_tokens(choice, work, most_tokens),
            block_size=request.block_size,
            num_kv_blocks=blocks,
            max_model_len=self.max_model_len if self.spec.num_windowed_layers else longest,
            page_bytes=page_bytes,
            expert_layer_bytes=int(self.spec.expert_layer_bytes),
            other_weight_bytes=int(self.spec.always_resident_bytes),
            hardware=self.machine.name,
            reasons={
                "max_num_seqs": GIVEN if given.max_num_seqs else PLANNED,
                "max_num_batched_tokens": GIVEN if given.max_num_batched_tokens else f"planned: {room_reason}",
                "attention": PLANNED if options.attention == "auto" else GIVEN,
                **({} if choice.attention_on_gpu else {"prefill_attention": why_prompts_are_there(options, self.spec)}),
                "num_micro_batches": GIVEN if options.num_micro_batches else PLANNED,
                "num_resident_layers": PLANNED if options.num_resident_layers is None else GIVEN,
                "prefill_tokens_per_sweep": GIVEN if options.prefill_tokens_per_sweep else PLANNED,
                "kv_bytes": given.kv_flag or f"planned: {blocks} blocks of {request.block_size} tokens",
                "page_bytes": GIVEN if options.page_mib else "a layer divided by the micro-batches, 1 to 64 MiB",
                "max_model_len": GIVEN if given.max_model_len else "the model's",
                **self._fetch_reasons(),
                **({} if options.schedule in OVERLAPPING else {"schedule": f"{options.schedule}, {NOT_OVERLAPPING}"}),
                **reasons,
            },
            predicted=PredictedFigures(
                generated_tokens_per_s=rate,
                total_tokens_per_s=rate * (1.0 + work.prompt_len / work.gen_len),
                sweep_s=sweep.time_s,
                bottleneck=str(sweep.bottleneck),
                busy={str(name): float(busy_s / sweep.time_s) for name, busy_s in sweep.busy_s.items()},
            ),
        )
