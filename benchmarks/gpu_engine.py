"""The engine on the plain decoder, on a GPU or the emulated device: the schedules that gpu_check.py compares.

All arms have one model, one device and one memory budget. Ours keep keys and values in host memory, so their batch is
what the plan says; the stock-like arm keeps them on the device, as a layer prefetcher without CPU attention must, so
its batch is what the budget leaves room for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.decoder_engine import DecoderEngine, Sequences, make_caches
from benchmarks.round_figures import spread
from benchmarks.torch_decoder import CPU, DecoderConfig, MatrixDrawer, MoeDecoder
from vllm_moe_lightning.config import MoeLightningConfig, ScheduleName
from vllm_moe_lightning.device.base import Device
from vllm_moe_lightning.errors import DeviceMemoryError
from vllm_moe_lightning.pipeline.counters import PipelineCounters
from vllm_moe_lightning.pipeline.executor import MicroBatch
from vllm_moe_lightning.pipeline.schedule import SCHEDULE_NAMES

STOCK = "stock-like"
STOCK_KV = "keys and values of the stock-like arm"
# In the order of their worth, should time run out: the goals are about the first two.
ARMS = ("cgopipe", STOCK, *(name for name in SCHEDULE_NAMES if name != "cgopipe"))
BLOCK_SIZE = 16


@dataclass
class Arm:
    """What was measured of one arm; one entry per round."""

    num_seqs: int
    step_s: list[float] = field(default_factory=list)
    busy_s: list[dict[str, float]] = field(default_factory=list)
    h2d_bytes: list[float] = field(default_factory=list)
    """Of a step."""
    host_wait_s: list[float] = field(default_factory=list)
    """Of a step: the launching thread held up for attention."""

    def row(self, name: str) -> dict[str, Any]:
        resources = self.busy_s[0]
        tokens_per_s = [self.num_seqs / step_s for step_s in self.step_s]
        h2d = [num_bytes / step_s for num_bytes, step_s in zip(self.h2d_bytes, self.step_s, strict=True)]
        busiest = [step_s / max(busy.values()) for step_s, busy in zip(self.step_s, self.busy_s, strict=True)]
        return {
            "arm": name,
            "num_seqs": self.num_seqs,
            "step_s": spread(self.step_s),
            "tokens_per_s": spread(tokens_per_s),
            "busy_s": {name: spread(busy[name] for busy in self.busy_s) for name in resources},
            "h2d_bytes_per_s": spread(h2d),
            "step_over_busiest_resource": spread(busiest),
            "host_wait_s": spread(self.host_wait_s),
        }


class GpuEngine:
    """options: of the plan; num_seqs: its batch; context_len: tokens of each sequence, the new one included."""

    def __init__(
        self, config: DecoderConfig, device: Device, options: MoeLightningConfig, num_seqs: int, context_len: int
    ) -> None:
        self.config, self.device, self.context_len = config, device, context_len
        self.model = MoeDecoder(config, *_drawers(config, device))
        device.reserve(self.model.other_bytes, "other weights")
        # In order, so that S4's context goes up in few copies and not in one for each block.
        sequences = Sequences(num_seqs, context_len, BLOCK_SIZE, seed=None)
        caches = make_caches(config, sequences.num_blocks, BLOCK_SIZE, device=device)
        rng = torch.Generator().manual_seed(0)
        for cache in caches:  # context worth attending to, without the prefill
            cache.blocks.copy_(torch.randn(cache.blocks[0].shape, generator=rng))
        sequences.lens = [context_len - 1] * num_seqs
        token_ids = torch.randint(0, config.vocab_size, (num_seqs,), generator=rng)
        self.step = sequences.step([1] * num_seqs, token_ids)  # taken again and again: each then costs the same
        self.engine = DecoderEngine(self.model, device, options, max_tokens=num_seqs, caches=caches)
        self.arms: dict[str, Arm] = {name: Arm(num_seqs) for name in SCHEDULE_NAMES}
        self.null_reasons: dict[str, str] = {}

    def close(self) -> None:
        self.engine.close()

    def measure(self, name: str, num_steps: int) -> None:
        """Add a round of an arm: steps back to back, after one that fills the pipeline its way."""
        if name == STOCK:
            with self._under("cgopipe"), self._stock_step() as (num_seqs, step):
                if num_seqs:
                    arm = self.arms.setdefault(STOCK, Arm(num_seqs))
                    assert arm.num_seqs == num_seqs, "another room than in the round before"
                    self.add_round(arm, step, num_steps)
            return
        if name in self.null_reasons:
            return
        try:
            with self._under(name):
                self.add_round(self.arms[name], self.take, num_steps)
        except DeviceMemoryError as error:  # S4's frames: two micro-batches' context
            self.null_reasons[name] = str(error).splitlines()[0]

    @contextmanager
    def _under(self, schedule: ScheduleName) -> Iterator[None]:
        """S4's frames are given back after it: the stock-like arm has its KV in this room."""
        executor = self.engine.executor
        executor.policy = replace(executor.policy, schedule=schedule)
        try:
            yield
        finally:
            if schedule == "s4" and not self.device.stalled:
                self.device.synchronize()
                self.engine.release_device_context()

    def take(self) -> torch.Tensor:
        """A step under the schedule in force, and its greedy tokens."""
        return self.model.greedy(self.engine.step(self.step))

    def hidden_states(self, schedule: ScheduleName) -> torch.Tensor:
        """[T, H] on the host, of the step under a schedule: all compute the same."""
        with self._under(schedule):
            return self.engine.step(self.step).cpu()

    def add_round(self, arm: Arm, take: Callable[[], object], num_steps: int) -> None:
        """take: a step."""
        executor, device = self.engine.executor, self.device
        take()
        device.compute.synchronize()
        executor.counters = PipelineCounters()
        before, started_s = device.totals(), time.monotonic()
        for _ in range(num_steps):
            take()
        device.compute.synchronize()  # not h2d: what it brings up already is for the next step, as before the first
        elapsed_s = time.monotonic() - started_s
        after = device.totals()
        arm.step_s.append(elapsed_s / num_steps)
        arm.busy_s.append({key: (after[key].busy_s - before[key].busy_s) / num_steps for key in before})
        arm.h2d_bytes.append((after["h2d"].num_bytes - before["h2d"].num_bytes) / num_steps)
        arm.host_wait_s.append(executor.counters.total_wait_s / num_steps)

    @contextmanager
    def _stock_step(self) -> Iterator[tuple[int, Callable[[], torch.Tensor]]]:
        """(sequences, step) of a layer prefetcher: all of them as one micro-batch, attention within the forward over
        keys and values on the device, the next layer's experts on one stream beside. 0 sequences: no room."""
        config, device, context = self.config, self.device, self.context_len
        per_seq = 2 * config.num_layers * config.num_kv_heads * context * config.head_dim * config.dtype.itemsize
        budget = device.memory_budget_bytes
        assert budget is not None, "the arms are compared at one budget"
        free = budget - device.memory_used_bytes
        num_seqs = min(free // per_seq, self.step.rows.num_tokens)
        if num_seqs < 1:
            self.null_reasons[STOCK] = (
                f"a sequence's KV is {per_seq:,} bytes, and {free:,} bytes of the budget are free"
            )
        frame = device.allocate(num_seqs * per_seq, STOCK_KV).tensor.view(config.dtype)
        frame.normal_()
        kv = frame.view(config.num_layers, 2, num_seqs, config.num_kv_heads, context, config.head_dim)
        ids, positions = (device.to_device(each[:num_seqs]) for each in (self.step.token_ids, self.step.positions))
        executor = self.engine.executor

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            keys, values = kv[layer]  # each [S, Hk, context, D]
            keys[:, :, -1], values[:, :, -1] = key, value
            return F.scaled_dot_product_attention(query.unsqueeze(2), keys, values, enable_gqa=True).squeeze(2)

        def forward() -> torch.Tensor:
            return self.model.forward(ids, positions, attend, executor.layer_entry)

        def step() -> torch.Tensor:
            [hidden] = executor.run_sweep([MicroBatch(forward, None)], is_dummy=True)
            return self.model.greedy(hidden)

        try:
            yield num_seqs, step
        finally:
            if not device.stalled:
                device.synchronize()
                device.release(STOCK_KV)


def _drawers(config: DecoderConfig, device: Device) -> tuple[MatrixDrawer, MatrixDrawer]:
    """Drawn on the device, where it takes no time; experts are brought to the host, from where they are taken over."""
    rng = torch.Generator(device.torch_device).manual_seed(config.seed)
    drawn_as = torch.float32 if device.torch_device.type == "cpu" else config.dtype
    return tuple(MatrixDrawer(config, rng, where, drawn_as) for where in (device.torch_device, CPU))
