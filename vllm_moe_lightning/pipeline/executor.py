"""Follows a schedule: launches each task on its resource, after the events it waits for.

One thread launches everything. A GPU task resumes the micro-batch's forward pass to its next yield; every other task
is an asynchronous operation of a stream. The order and the waits are the schedule's; nothing is decided here.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from vllm_moe_lightning.device.base import Device, Event, Stream
from vllm_moe_lightning.errors import DeviceStalledError, DeviceTaskError, MoeLightningError
from vllm_moe_lightning.pipeline.attention import AttentionRequest, AttentionRows
from vllm_moe_lightning.pipeline.attention_path import AttentionPath
from vllm_moe_lightning.pipeline.coroutine import (
    LAYER_ENTRY,
    LayerEntry,
    MicroBatchCoroutine,
    yield_to_executor,
)
from vllm_moe_lightning.pipeline.counters import PipelineCounters
from vllm_moe_lightning.pipeline.expert_places import ALL_STREAMED, ExpertPlaces
from vllm_moe_lightning.pipeline.experts_path import ExpertsPath, ExpertsRequest
from vllm_moe_lightning.pipeline.host_experts import HostExperts
from vllm_moe_lightning.pipeline.paged_experts import FetchedExperts
from vllm_moe_lightning.pipeline.schedule import SCHEDULE_NAMES, Schedule, SweepShape, make_schedule
from vllm_moe_lightning.pipeline.tasks import Task, TaskKey, TaskName, wait_name
from vllm_moe_lightning.pipeline.trace import SweepSpan
from vllm_moe_lightning.policy.policy import Policy
from vllm_moe_lightning.resources import Resource
from vllm_moe_lightning.weights.expert_residency import ResidencyCounters
from vllm_moe_lightning.weights.ring import WeightRing
from vllm_moe_lightning.weights.store import PagedWeightStore

Result = TypeVar("Result")

RECENT_SWEEPS = 1000


@dataclass(frozen=True)
class MicroBatch(Generic[Result]):
    """A share of the step: its forward pass, and what must be in place whenever it runs."""

    body: Callable[[], Result]
    rows: AttentionRows | None
    """None in a dummy run, which has no KV cache."""
    enter: Callable[[], None] = lambda: None
    """Called before each resume (vLLM: sets the forward context)."""
    num_tokens: int = 0
    """Needed where experts are not streamed."""


class PipelineExecutor:
    """Runs sweeps. `num_layers` counts decoder layers; `policy` may be replaced between sweeps."""

    def __init__(
        self,
        device: Device,
        store: PagedWeightStore,
        attention_path: Callable[[str], AttentionPath],
        num_layers: int,
        policy: Policy,
        remove_wait: str | None = None,
    ) -> None:
        self.device = device
        self.host_experts: HostExperts | None = None
        self.fetched_experts: FetchedExperts | None = None
        self.policy = policy
        self.counters = PipelineCounters()
        self.store = store
        self.ring = WeightRing(store, device)
        self._attention_path = attention_path
        self._num_layers = num_layers
        self.pages_per_layer = tuple(store.num_pages(layer) for layer in range(num_layers))
        if remove_wait is not None and remove_wait not in (known := self._wait_names()):
            raise ValueError(
                f"remove_wait: {remove_wait!r} is no wait of this model's schedules; they are {sorted(known)}"
            )
        self._remove_wait = remove_wait
        self._events: dict[TaskKey, Event] = {}
        self._streams: dict[Resource, Stream] = {
            Resource.GPU: device.compute,
            Resource.CPU: device.cpu,
            Resource.D2H: device.d2h,
            Resource.H2D: device.h2d,
        }
        self._coroutines: list[MicroBatchCoroutine[Any]] = []
        self._micro_batches: Sequence[MicroBatch[Any]] = []
        self._requests: dict[int, AttentionRequest] = {}
        self._experts_requests: dict[int, ExpertsRequest] = {}
        self.expert_places = ALL_STREAMED
        """Of this sweep."""
        self._last_schedule: str | None = None
        self.in_sweep = False
        self.recent_sweeps: deque[SweepSpan] = deque(maxlen=RECENT_SWEEPS)
        """The last ones that ended well; may be read by any thread."""

    def _wait_names(self) -> set[str]:
        shape = self.schedule_for(2).shape
        shapes = [replace(shape, num_micro_batches=n, with_attention=a) for n in (1, 2) for a in (True, False)]
        shapes.append(replace(shape, num_micro_batches=2, context=frozenset((0, 1))))
        if shape.streamed:
            pages, layers = tuple(0 for _ in shape.pages_per_layer), frozenset(shape.streamed)
            places = (ExpertPlaces(on_cpu=layers), ExpertPlaces(fetched=layers))
            shapes += [replace(shape, pages_per_layer=pages, experts=experts) for experts in places]
        return {name for order in SCHEDULE_NAMES for s in shapes for name in make_schedule(order, s).wait_names()}

    def schedule_for(
        self,
        num_micro_batches: int,
        *,
        with_attention: bool = True,
        context: frozenset[int] = frozenset(),
        experts: ExpertPlaces = ALL_STREAMED,
    ) -> Schedule:
        shape = SweepShape(
            num_layers=self._num_layers,
            num_micro_batches=num_micro_batches,
            pages_per_layer=experts.pages(self.pages_per_layer),
            lookahead=self.policy.lookahead,
            with_attention=with_attention,
            context=context,
            experts=experts,
        )
        return make_schedule(self.policy.schedule, shape)

    @property
    def residency_counters(self) -> ResidencyCounters:
        """Of experts that are fetched; all zero where none is."""
        return ResidencyCounters() if self.fetched_experts is None else self.fetched_experts.residency.counters

    @property
    def pages_moved(self) -> int:
        """Pages of experts brought to the device, streamed and fetched."""
        return self.ring.pages_moved + self.residency_counters.pages_moved

    @property
    def bytes_paged(self) -> int:
        """Those pages' bytes."""
        return self.ring.bytes_paged + self.residency_counters.bytes_moved

    @property
    def expert_bytes_on_device(self) -> int:
        """Slots and frames that hold experts, whichever those are."""
        fetched = self.fetched_experts
        return self.store.device_bytes + (0 if fetched is None else fetched.residency.device_bytes)

    def pages_of_first_layer(self) -> int:
        """Pages that a refill moves beyond those of the sweeps: the first streamed layer's."""
        streamed = min(self.store.layers, default=None)
        return 0 if streamed is None else self.store.num_pages(streamed)

    def bytes_of_first_layer(self) -> int:
        """Those pages in bytes."""
        streamed = min(self.store.layers, default=None)
        return 0 if streamed is None else self.store.layers[streamed].layout.num_bytes

    def run_sweep(
        self,
        micro_batches: Sequence[MicroBatch[Result]],
        *,
        is_dummy: bool = False,
        experts: ExpertPlaces = ALL_STREAMED,
    ) -> list[Result]:
        """One pass of all micro-batches over all layers. Returns their results in order. A dummy run has no KV cache.

        experts: streamed decoder layers that are not streamed this time.

        An exception unwinds every micro-batch, drains the streams and leaves the executor fit for the next sweep;
        but not DeviceStalledError, after which there is none.
        """
        if self.device.stalled:
            raise DeviceStalledError("the device has stalled before, so no sweep can run on it; start the engine anew")
        with_attention = not (is_dummy or self.policy.attention_on_device)
        context = frozenset(
            index for index, batch in enumerate(micro_batches) if batch.rows is not None and batch.rows.with_context
        )
        schedule = self.schedule_for(
            len(micro_batches), with_attention=with_attention, context=context, experts=experts
        )
        path = self._attention_path(schedule.name)
        started_s = time.monotonic()
        self._micro_batches = micro_batches
        self._coroutines = [MicroBatchCoroutine(index, batch.body) for index, batch in enumerate(micro_batches)]
        self.in_sweep, self.expert_places = True, experts
        try:
            for experts_path in {self._experts_path(layer) for layer in experts.layers}:
                experts_path.begin_sweep([batch.num_tokens for batch in micro_batches])
            if self._last_schedule not in (None, schedule.name):
                self.device.synchronize()  # a schedule's waits order it after its own earlier sweeps, not another's
            self._last_schedule = schedule.name
            path.begin_sweep([batch.rows for batch in micro_batches if batch.rows is not None])
            self._bring_up_first_layer(schedule)
            device = self.device
            for task in schedule.launch_order if device.computes_on_launching_thread else schedule.tasks:
                self._launch(task, path)
            unfinished = [c.index for c in self._coroutines if not c.finished]
            if unfinished:
                raise MoeLightningError(f"micro-batches {unfinished} did not end with the schedule {schedule.name}")
            brought_up = tuple(sorted(context))
            span = SweepSpan(started_s, time.monotonic(), len(micro_batches), is_dummy, experts, brought_up)
            self.recent_sweeps.append(span)
            return [coroutine.result for coroutine in self._coroutines]  # type: ignore[misc]  # all have finished
        except BaseException:
            self._abort()
            raise
        finally:
            self.in_sweep = False
            self.expert_places = ALL_STREAMED
            self._coroutines, self._micro_batches, self._requests, self._experts_requests = [], [], {}, {}
            self.counters.end_sweep(started_s, time.monotonic(), len(micro_batches), is_dummy=is_dummy)

    def _bring_up_first_layer(self, schedule: Schedule) -> None:
        """At the start, after an abort, or when the schedule was changed: agree with it about the first layer."""
        streamed = schedule.shape.streamed
        if not streamed:  # what the sweep before has sent ahead is for the next one that streams
            return
        expected = 1 if schedule.prefetches_first_layer else 0
        if self.ring.prefetched_layers == streamed[:expected]:
            return
        self.ring.drop_prefetched()
        self.device.h2d.wait_event(self.device.compute.record_event())
        if expected:
            self.counters.refills += 1
            for page in range(schedule.shape.pages_per_layer[streamed[0]]):
                self.ring.launch_page(streamed[0], page)
                self._events[TaskKey(TaskName.WEIGHT_PAGE, streamed[0], page)] = self.device.h2d.record_event()

    def _launch(self, task: Task, path: AttentionPath) -> None:
        key, stream = task.key, self._streams[task.resource]
        for awaited in task.after:
            name = wait_name(key, awaited)
            if name != self._remove_wait:
                before_s = stream.wait_s
                stream.wait_event(self._events[awaited])
                if stream.wait_s > before_s:  # the launching thread itself was held up
                    self.counters.wait_s[name] += stream.wait_s - before_s
                if key.name is TaskName.EXPERTS_FETCH:  # whose launch reads what was awaited
                    began_s = time.monotonic()
                    self.device.wait_on_host(self._events[awaited])
                    self.counters.wait_s[name] += time.monotonic() - began_s
        match key.name:
            case TaskName.SWEEP_START:
                pass
            case TaskName.PRE_ATTENTION:
                self._pre_attention(key, path)
            case TaskName.POST_ATTENTION:
                self._post_attention(key, path)
            case TaskName.POST_EXPERTS:
                self._post_experts(key)
            case TaskName.WEIGHT_PAGE:
                self.ring.launch_page(key.layer, key.index)
            case (
                TaskName.EXPERTS_OFFLOAD
                | TaskName.EXPERTS
                | TaskName.EXPERTS_LOAD
                | TaskName.ROUTING_OFFLOAD
                | TaskName.EXPERTS_FETCH
            ):
                self._experts_path(key.layer).launch(key, self._experts_requests[key.index])
            case _:
                path.launch(key, self._requests.get(key.index))
        self._events[key] = stream.record_event()

    def _pre_attention(self, key: TaskKey, path: AttentionPath) -> None:
        writes = [path.packed_name(key.index), path.output_name(key.index)]
        rows = self._micro_batches[key.index].rows
        reads = path.pack_reads(key, has_context=rows is not None and rows.with_context is not None)
        with self.device.compute.span(str(key), reads=reads, writes=[*writes, *reads]):
            if key.layer == 0:
                self._resume(key, LayerEntry)
            request = self._resume(key, AttentionRequest)
            assert isinstance(request, AttentionRequest)
            self._requests[key.index] = request
            path.pack(key, request)

    def _post_attention(self, key: TaskKey, path: AttentionPath) -> None:
        reads = [path.output_name(key.index)] if self._requests else []
        is_elsewhere = key.layer in self.expert_places.layers
        if self.store.num_pages(key.layer) and not is_elsewhere:
            if key.index == 0:
                self.ring.bind(key.layer)
            reads.append(self.ring.slot_name(key.layer))
        writes = self._experts_path(key.layer).pack_writes(key.index) if is_elsewhere else []
        with self.device.compute.span(str(key), reads=reads, writes=writes):
            if not self._requests and key.layer == 0:
                self._resume(key, LayerEntry)
            if not is_elsewhere:
                self._resume(key, self._end_of(key.layer))
                return
            request = self._resume(key, ExpertsRequest)
            assert isinstance(request, ExpertsRequest)
            self._experts_requests[key.index] = request
            self._experts_path(key.layer).pack(key.index, request)

    def _post_experts(self, key: TaskKey) -> None:
        experts = self._experts_path(key.layer)
        experts.finish(key, self._experts_requests[key.index])
        with self.device.compute.span(str(key), reads=experts.output_reads(key.index), writes=()):
            self._resume(key, self._end_of(key.layer))

    def _experts_path(self, layer: int) -> ExpertsPath:
        path = self.host_experts if layer in self.expert_places.on_cpu else self.fetched_experts
        assert path is not None, f"experts of layer {layer} elsewhere, for which nothing was prepared"
        return path

    def _end_of(self, layer: int) -> type:
        """What a micro-batch yields after a decoder layer."""
        return type(None) if layer == self._num_layers - 1 else LayerEntry

    def _resume(self, key: TaskKey, expected: type) -> object:
        """Run the micro-batch to its next yield, which must be of the expected kind."""
        self._micro_batches[key.index].enter()
        yielded = self._coroutines[key.index].resume()
        if not isinstance(yielded, expected):
            raise MoeLightningError(
                f"{key}: the model yielded {type(yielded).__name__} where {expected.__name__} was due; its decoder "
                "layers do not have exactly one attention each, or not one block of experts where it is not streamed"
            )
        return yielded

    def _abort(self) -> None:
        self.counters.aborted_sweeps += 1
        for index, coroutine in enumerate(self._coroutines):
            self._micro_batches[index].enter()
            coroutine.unwind()
        for experts_path in filter(None, (self.host_experts, self.fetched_experts)):
            experts_path.abort()
        for stream in self._streams.values():  # nothing in flight may outlive the buffers of this sweep
            if self.device.stalled:
                break  # it may never end
            with contextlib.suppress(DeviceTaskError):  # the failure that led here, or one in its wake
                stream.synchronize()
        self.ring.drop_prefetched()

    def layer_entry(self) -> None:
        """Called by the model at each decoder layer's entry: the micro-batch pauses there."""
        if not self.in_sweep:
            raise MoeLightningError("the model was run outside of a sweep; its forward must go through the executor")
        yield_to_executor(LAYER_ENTRY)
