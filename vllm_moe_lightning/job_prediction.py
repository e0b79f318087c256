"""The time of a whole job of equal requests, all there from the start: the cost model stepped over the job's sweeps.

A planner's figure is of the steady state; a job of few requests spends much of its time filling slots and draining
them. The sum over all sweeps i of sweep_cost(load_i) holds both. What a sweep takes follows the engine's scheduler: a
token of every sequence that decodes, then prompts in their order, up to the sweep's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm_moe_lightning.cost_model import sweep_cost
from vllm_moe_lightning.hardware import HardwareProfile
from vllm_moe_lightning.model_spec import MoeModelSpec
from vllm_moe_lightning.prompt_cuts import PromptCuts
from vllm_moe_lightning.workload import HrmPolicy, SweepLoad


@dataclass(frozen=True)
class Job:
    """Requests of one kind. Lengths in tokens."""

    num_requests: int
    prompt_len: int
    gen_len: int

    def __post_init__(self) -> None:
        if min(self.num_requests, self.prompt_len, self.gen_len) < 1:
            raise ValueError(f"a job needs at least one request, one prompt and one generated token, got {self}")

    @property
    def num_generated(self) -> int:
        return self.num_requests * self.gen_len

    def batches(self, batch_size: int) -> list[Job]:
        """The same requests in static batches, each to be finished before the next begins; the last may be smaller."""
        whole, rest = divmod(self.num_requests, batch_size)
        sizes = [batch_size] * whole + [rest] * (rest > 0)
        return [replace(self, num_requests=size) for size in sizes]


@dataclass(frozen=True)
class SweepLimits:
    max_num_seqs: int
    """Slots: sequences that decode or whose prompt has begun."""
    tokens_per_sweep: int
    """Most tokens of a sweep, decoded and prompt tokens together."""

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.tokens_per_sweep < 1:
            raise ValueError(f"a sweep needs a slot and a token, got {self}")


@dataclass(frozen=True)
class JobPrediction:
    time_s: float
    num_sweeps: int
    num_full_sweeps: int
    """Those with all slots taken; the others fill or drain."""
    bottleneck_s: dict[str, float]
    """Resource -> time of the sweeps that it bounds. Sums up to time_s."""
    busy_s: dict[str, float]
    """Resource -> time that it is busy."""


def job_loads(job: Job, limits: SweepLimits) -> list[SweepLoad]:
    """What each of the job's sweeps carries, until all requests have their tokens."""
    loads: list[SweepLoad] = []
    waiting_tokens = job.num_requests * job.prompt_len
    read_tokens = 0  # of all prompts, in their order
    groups: list[list[int]] = []  # [sequences, tokens generated so far], the oldest first
    finished = 0
    while finished < job.num_requests:
        decoding = [group for group in groups if group[1] < job.gen_len]
        num_decoding = sum(count for count, _ in decoding)
        context = sum(count * (job.prompt_len + done) for count, done in decoding)
        # Prompts may begin as long as there are slots; one that has begun keeps its slot.
        may_be_read = min(waiting_tokens, (finished + limits.max_num_seqs) * job.prompt_len)
        room = max(0, limits.tokens_per_sweep - num_decoding)
        taken = min(room, may_be_read - read_tokens)
        num_read = (read_tokens + taken) // job.prompt_len - read_tokens // job.prompt_len
        read_tokens += taken
        assert num_decoding or taken, "a sweep without tokens"
        loads.append(
            SweepLoad(
                decode_seqs=num_decoding,
                decode_context=context / num_decoding if num_decoding else 0.0,
                prefill_seqs=taken / job.prompt_len,
                prefill_len=job.prompt_len if taken else 0.0,
            )
        )
        for group in decoding:
            group[1] += 1
        if num_read:
            decoding.append([num_read, 1])  # a prompt's sweep gives its first token
        finished += sum(count for count, done in decoding if done == job.gen_len)
        groups = [group for group in decoding if group[1] < job.gen_len]
    return loads


def prompt_cuts(job: Job, limits: SweepLimits, num_micro_batches: int) -> PromptCuts:
    """Long prompts share a sweep's tokens, one for each micro-batch and two at least (integration/step_limits)."""
    sharing = min(max(2, num_micro_batches), job.num_requests, limits.max_num_seqs)
    chunk = max(1.0, limits.tokens_per_sweep / sharing)
    return PromptCuts.equal(job.prompt_len, max(1.0, job.prompt_len / chunk))


def predict_job(
    spec: MoeModelSpec, profile: HardwareProfile, policy: HrmPolicy, job: Job, limits: SweepLimits
) -> JobPrediction:
    """Of `policy` its micro-batches and its resident layers count; what a sweep carries is the job's."""
    time_s, full, bounds, busy_s = 0.0, 0, dict[str, float](), dict[str, float]()
    loads, cuts = job_loads(job, limits), prompt_cuts(job, limits, policy.num_micro_batches)
    for load in loads:
        cost = sweep_cost(spec, profile, policy, replace(load, prefill_cuts=cuts))
        time_s += cost.time_s
        bounds[str(cost.bottleneck)] = bounds.get(str(cost.bottleneck), 0.0) + cost.time_s
        for resource, seconds in cost.busy_s.items():
            busy_s[str(resource)] = busy_s.get(str(resource), 0.0) + float(seconds)
        full += load.seqs >= limits.max_num_seqs
    return JobPrediction(time_s, len(loads), full, bounds, busy_s)
