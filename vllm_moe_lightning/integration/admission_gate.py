"""Stands before vLLM's allocation of KV blocks, and refuses a waiting request whose blocks to come do not fit.

vLLM asks for a waiting request's first blocks at the very moment of admission, with its prefix hits in hand, and stops
admitting when the answer is None: so this is where to say so, whatever the queue's order. Whom to run beyond that
stays vLLM's business.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from vllm.v1.request import RequestStatus

from vllm_moe_lightning.config import AdmissionMode
from vllm_moe_lightning.integration.admission import (
    BlockGroup,
    blocks_to_come,
    expected_slots,
    worst_case_slots,
)
from vllm_moe_lightning.integration.request_mix import RequestMix
from vllm_moe_lightning.integration.scheduler_figures import KvWaits


class AdmissionGate:
    """One per scheduler. `begin_step` reads the pool once; after that the headroom is kept by counting.

    Blocks that running requests take within a step were reserved before, so they do not change the headroom.
    """

    def __init__(self, kv_cache_manager: Any, mode: AdmissionMode, max_model_len: int, mix: RequestMix) -> None:
        self._kv = kv_cache_manager
        self._mode = mode
        self._max_model_len = max_model_len
        self._mix = mix
        managers = kv_cache_manager.coordinator.single_type_managers
        self._groups = [BlockGroup(m.block_size, m.max_admission_blocks_per_request) for m in managers]
        self._margin = max(group.block_size for group in self._groups)
        self._headroom = 0
        self._expected: int | None = None
        self.holds_back = False
        """Whether a request was refused in this step, for blocks that running ones may still take."""
        self.waits = KvWaits()
        self.held_back_is_open = False
        """Whether the last request that was refused had left its max_tokens open."""
        self._allocate_slots = kv_cache_manager.allocate_slots
        kv_cache_manager.allocate_slots = functools.partial(_gated, self)

    def begin_step(self, running: Iterable[Any]) -> None:
        self.holds_back = False
        self._expected = self._mix.expected_generation() if self._mode in ("auto", "expected") else None
        self._headroom = self._kv.block_pool.get_num_free_blocks()
        if self._mode != "vllm":
            self._headroom -= sum(blocks_to_come(self._slots(r), self._held(r), self._groups) for r in running)

    def reserved_ratio(self) -> float:
        """Share of all blocks that are taken, or that running requests may still take: after the step's admissions."""
        pool = self._kv.block_pool
        num_blocks = pool.num_gpu_blocks - 1  # one stands for "none"
        headroom = pool.get_num_free_blocks() if self._mode == "vllm" else self._headroom
        return min(1.0, 1 - headroom / num_blocks) if num_blocks else 0.0

    def startable(self, waiting: Iterable[Any], *, is_idle: bool) -> Iterator[Any]:
        """The waiting requests, in order, that there are blocks for; prefix hits are not counted on."""
        headroom, nothing = self._headroom, [0] * len(self._groups)
        for request in waiting:
            if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                continue  # its grammar is still being compiled
            headroom -= blocks_to_come(self._slots(request), nothing, self._groups)
            if headroom < 0 and not is_idle:
                return
            is_idle = False
            yield request

    def _slots(self, request: Any) -> int:
        if self._mode == "vllm":
            return int(request.num_tokens)
        worst = worst_case_slots(request.num_prompt_tokens, request.max_tokens, self._max_model_len)
        if self._expected is None or (self._mode == "auto" and not self.is_open(request)):
            return worst
        return expected_slots(request.num_prompt_tokens, request.num_tokens, self._expected, self._margin, worst)

    def is_open(self, request: Any) -> bool:
        """Whether max_tokens was left open: vLLM sets it to all that max_model_len leaves."""
        return bool(request.num_prompt_tokens + request.max_tokens >= self._max_model_len)

    def _held(self, request: Any) -> list[int]:
        """Behind a sliding window a shared block goes without coming back to the pool, so it counts for nothing."""
        return [
            len(blocks) if group.most_blocks is None else sum(b.ref_cnt == 1 and not b.is_null for b in blocks)
            for blocks, group in zip(self._kv.get_blocks(request.request_id).blocks, self._groups, strict=True)
        ]

    def admits(self, request: Any, hits: Any, *, is_idle: bool) -> bool:
        """hits: cached blocks of its prompt, per group. Those in use by others it will share; others it takes."""
        if self._mode == "vllm":
            return True
        shared = [0] * len(self._groups)
        if hits is not None:
            shared = [
                sum(block.ref_cnt > 0 for block in blocks) if group.most_blocks is None else 0
                for blocks, group in zip(hits.blocks, self._groups, strict=True)
            ]
        needed = blocks_to_come(self._slots(request), shared, self._groups)
        # Alone, a request of any permitted length fits: vLLM refuses to start with fewer blocks than max_model_len.
        if needed > self._headroom and not is_idle:
            self.holds_back, self.held_back_is_open = True, self.is_open(request)
            return False
        self._headroom -= needed
        return True


def _gated(gate: AdmissionGate, request: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of KVCacheManager.allocate_slots."""
    if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
        return gate._allocate_slots(request, *args, **kwargs)
    blocks = None
    if gate.admits(request, kwargs.get("new_computed_blocks"), is_idle=not kwargs.get("has_scheduled_reqs", True)):
        blocks = gate._allocate_slots(request, *args, **kwargs)
    if blocks is None:
        gate.waits.refused(request.request_id)
    else:
        gate.waits.ended(request.request_id)
    return blocks
