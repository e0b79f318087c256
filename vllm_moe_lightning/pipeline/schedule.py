"""Schedules as data: the order in which one sweep over the layers launches its tasks, and what each waits for.

CGOPipe (the paper's Algorithm 1 with its wrap-around spelt out) and the four orders it is compared with. All run on
the same executor and simulator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from vllm_moe_lightning.pipeline.expert_places import ALL_STREAMED, ExpertPlaces
from vllm_moe_lightning.pipeline.tasks import Task, TaskKey, TaskName, wait_name
from vllm_moe_lightning.resources import Resource

# Marks at the head of a sweep: what their resource was given in earlier sweeps is before them.
SWEEP_START = TaskKey(TaskName.SWEEP_START, 0, 0)
CPU_SWEEP_START = TaskKey(TaskName.SWEEP_START, 0, 1)
D2H_SWEEP_START = TaskKey(TaskName.SWEEP_START, 0, 2)


@dataclass(frozen=True)
class SweepShape:
    """What a schedule depends on. A sweep is one pass of all micro-batches over all decoder layers."""

    num_layers: int
    num_micro_batches: int
    pages_per_layer: tuple[int, ...]
    """Pages of each decoder layer; 0 for a layer that is dense or resident."""
    lookahead: int = 2
    with_attention: bool = True
    """False for dummy runs, which have no KV cache: a layer is then one GPU task."""
    context: frozenset[int] = frozenset()
    """Micro-batches with rows that the device attends to over context, which comes up for each layer. S4 brings up
    everybody's anyway."""
    experts: ExpertPlaces = ALL_STREAMED
    """Layers that have experts and no pages to stream."""

    def __post_init__(self) -> None:
        if len(self.pages_per_layer) != self.num_layers:
            raise ValueError(f"{len(self.pages_per_layer)} page counts for {self.num_layers} layers")
        if self.pages_per_layer != self.experts.pages(self.pages_per_layer):
            raise ValueError(f"layers whose experts the CPU computes or that are fetched are not streamed, got {self}")
        if self.num_micro_batches < 1 or self.lookahead < 1:
            raise ValueError(f"need at least one micro-batch and a look-ahead of 1, got {self}")

    @property
    def streamed(self) -> tuple[int, ...]:
        return tuple(layer for layer, pages in enumerate(self.pages_per_layer) if pages)


@dataclass(frozen=True)
class Schedule:
    name: str
    shape: SweepShape
    tasks: tuple[Task, ...]
    prefetches_first_layer: bool
    """Whether a sweep brings up the first streamed layer of the next one (else each sweep starts with it)."""

    @cached_property
    def launch_order(self) -> tuple[Task, ...]:
        """The tasks as they are launched: as in `tasks` on each resource, but the others' before a GPU task that they
        need not follow. The emulated device computes in the launching thread, and its link would pause until then.
        """
        position = {task.key: index for index, task in enumerate(self.tasks)}
        must_follow: list[set[int]] = [set() for _ in self.tasks]
        for index, task in enumerate(self.tasks):
            must_follow[index].update(position[key] for key in task.launched_after)
            for awaited in (position[key] for key in task.after if key in position):
                if awaited < index:
                    must_follow[index].add(awaited)
                else:  # it waits for the task of that name of the sweep before, whose event must not be replaced yet
                    must_follow[awaited].add(index)
        queues = {
            resource: deque(index for index, task in enumerate(self.tasks) if task.resource is resource)
            for resource in (Resource.D2H, Resource.CPU, Resource.H2D, Resource.GPU)
        }
        order: list[int] = []
        launched: set[int] = set()
        while len(order) < len(self.tasks):
            ready = next(queue for queue in queues.values() if queue and must_follow[queue[0]] <= launched)
            order.append(ready.popleft())
            launched.add(order[-1])
        return tuple(self.tasks[index] for index in order)

    def wait_names(self) -> tuple[str, ...]:
        """The kinds of waits in this schedule, each of which a race test removes in turn."""
        return tuple(sorted({wait_name(task.key, key) for task in self.tasks for key in task.after}))


def _key(name: TaskName, layer: int, index: int = 0) -> TaskKey:
    return TaskKey(name, layer, index)


class _Sweep:
    """Emits the tasks of one sweep; the schedules below differ in the order of the calls."""

    def __init__(self, shape: SweepShape, *, attention_on_device: bool = False) -> None:
        self.shape = shape
        self.attention_on_device = attention_on_device
        self.readers_of_context: list[TaskKey] = []
        self.users_of_fetched: tuple[TaskKey, ...] = ()
        self.tasks: list[Task] = [
            Task(Resource.GPU, SWEEP_START),
            Task(Resource.CPU, CPU_SWEEP_START),
            Task(Resource.D2H, D2H_SWEEP_START),
        ]

    def emit(self, resource: Resource, key: TaskKey, *after: TaskKey) -> None:
        self.tasks.append(Task(resource, key, after))

    def pre(self, layer: int, index: int, *after: TaskKey) -> None:
        """Pre-attention and everything up to the attention result on the host (or device, for S4)."""
        if not self.shape.with_attention:
            return
        pre = _key(TaskName.PRE_ATTENTION, layer, index)
        offload = _key(TaskName.QKV_OFFLOAD, layer, index)
        if self.attention_on_device:
            self._pre_with_attention_on_device(layer, index, pre, offload)
        else:
            if index in self.shape.context:
                after = (*after, self.context(layer, index, pre))
            self.emit(Resource.GPU, pre, *after)
            self.emit(Resource.D2H, offload, pre)
            self.emit(Resource.CPU, _key(TaskName.ATTENTION, layer, index), offload)

    def context(self, layer: int, index: int, reader: TaskKey) -> TaskKey:
        """Context to one of two device frames: free once the one before the last has been read."""
        load = _key(TaskName.KV_LOAD, layer, index)
        free = self.readers_of_context[-2] if len(self.readers_of_context) > 1 else SWEEP_START
        # It was appended in earlier sweeps, by any micro-batch: everything of theirs on the CPU.
        self.emit(Resource.H2D, load, free, CPU_SWEEP_START)
        self.readers_of_context.append(reader)
        return load

    def _pre_with_attention_on_device(self, layer: int, index: int, pre: TaskKey, offload: TaskKey) -> None:
        """The staging buffers are not freed by the result's way back, so their readers are waited for by name."""
        first = layer == 0
        packed_free = D2H_SWEEP_START if first else _key(TaskName.QKV_OFFLOAD, layer - 1, index)
        staging_free = CPU_SWEEP_START if first else _key(TaskName.KV_APPEND, layer - 1, index)
        self.emit(Resource.GPU, pre, packed_free)
        context = _key(TaskName.KV_LOAD, layer, index)
        self.emit(Resource.GPU, _key(TaskName.DEVICE_ATTENTION, layer, index), context)
        self.emit(Resource.D2H, offload, pre, staging_free)
        self.emit(Resource.CPU, _key(TaskName.KV_APPEND, layer, index), offload)

    def hidden(self, layer: int, index: int) -> None:
        if self.shape.with_attention and not self.attention_on_device:
            attention = _key(TaskName.ATTENTION, layer, index)
            self.emit(Resource.H2D, _key(TaskName.HIDDEN_LOAD, layer, index), attention)

    def kv_load(self, layer: int, index: int) -> None:
        """Context blocks to one of two device frames: free once the attention two micro-batches back has read it."""
        n = self.shape.num_micro_batches
        position = layer * n + index - 2
        reader = _key(TaskName.DEVICE_ATTENTION, *divmod(position, n)) if position >= 0 else SWEEP_START
        # The context was appended in earlier sweeps, by any micro-batch: everything of theirs on the CPU.
        self.emit(Resource.H2D, _key(TaskName.KV_LOAD, layer, index), reader, CPU_SWEEP_START)

    def post(self, layer: int, index: int) -> None:
        """Post-attention; to the router only, where the layer's experts are not streamed."""
        after = []
        if self.shape.with_attention and not self.attention_on_device:
            after.append(_key(TaskName.HIDDEN_LOAD, layer, index))
        pages = self.shape.pages_per_layer[layer]
        if pages and index == 0:  # later micro-batches follow on the same stream
            after.append(_key(TaskName.WEIGHT_PAGE, layer, pages - 1))
        post = _key(TaskName.POST_ATTENTION, layer, index)
        self.emit(Resource.GPU, post, *after)
        if layer in self.shape.experts.on_cpu:
            offload = _key(TaskName.EXPERTS_OFFLOAD, layer, index)
            self.emit(Resource.D2H, offload, post)
            self.emit(Resource.CPU, _key(TaskName.EXPERTS, layer, index), offload)
        elif layer in self.shape.experts.fetched:
            self.emit(Resource.D2H, _key(TaskName.ROUTING_OFFLOAD, layer, index), post)

    def fetch(self, layer: int, index: int) -> None:
        """Experts that the micro-batch asked for, which the launching thread must know by then.

        After the one before has launched what it fetched for: so all frames but those that are in use then are free.
        """
        if layer in self.shape.experts.fetched:
            routing = _key(TaskName.ROUTING_OFFLOAD, layer, index)
            key = _key(TaskName.EXPERTS_FETCH, layer, index)
            self.tasks.append(Task(Resource.H2D, key, (routing,), launched_after=self.users_of_fetched))

    def post_experts(self, layer: int, index: int) -> None:
        """The rest of the layer, where post-attention ended with the router. After `fetch`."""
        post = _key(TaskName.POST_EXPERTS, layer, index)
        if layer in self.shape.experts.on_cpu:
            load = _key(TaskName.EXPERTS_LOAD, layer, index)
            self.emit(Resource.H2D, load, _key(TaskName.EXPERTS, layer, index))
            self.emit(Resource.GPU, post, load)
        elif layer in self.shape.experts.fetched:
            self.emit(Resource.GPU, post, _key(TaskName.EXPERTS_FETCH, layer, index))
            self.users_of_fetched = (post,)

    def whole_post(self, layer: int, index: int) -> None:
        """Post-attention to its end, whoever has to be waited for."""
        self.post(layer, index)
        self.fetch(layer, index)
        self.post_experts(layer, index)

    def page(self, layer: int, page: int, ordinal: int) -> None:
        """Page of a streamed layer. The first waits until the layer two before it in the ring has been used."""
        after: tuple[TaskKey, ...] = ()
        if page == 0:
            streamed = self.shape.streamed
            last = self.shape.num_micro_batches - 1
            before = ordinal - 2
            after = (_key(TaskName.POST_ATTENTION, streamed[before], last),) if before >= 0 else (SWEEP_START,)
        self.emit(Resource.H2D, _key(TaskName.WEIGHT_PAGE, layer, page), *after)

    def block(self, ordinal: int) -> None:
        """All pages of a layer back to back."""
        streamed = self.shape.streamed
        layer = streamed[ordinal % len(streamed)]
        for page in range(self.shape.pages_per_layer[layer]):
            self.page(layer, page, ordinal)


def _pages_due(shape: SweepShape) -> dict[int, list[tuple[int, int, int]]]:
    """Post-attention position t = layer * n + micro-batch -> [(layer, page, ordinal)] launched just before it.

    The pages of a streamed layer are spread evenly over the posts between the streamed layer before it (whose slot
    is the other one) and itself; those of the first streamed layer, for the next sweep, over the rest of this one.
    """
    n, streamed = shape.num_micro_batches, shape.streamed
    due: dict[int, list[tuple[int, int, int]]] = {}
    for ordinal in range(1, len(streamed) + 1):
        target = streamed[ordinal % len(streamed)]
        begin = streamed[ordinal - 1] * n
        end = streamed[ordinal] * n if ordinal < len(streamed) else shape.num_layers * n
        pages = shape.pages_per_layer[target]
        for page in range(pages):
            due.setdefault(begin + page * (end - begin) // pages, []).append((target, page, ordinal))
    return due


def _cgopipe(shape: SweepShape) -> Iterator[Task]:
    """Algorithm 1: post(i, j), then pre-attention `lookahead` micro-batches on; pages between hidden states.

    Where experts are not streamed, a micro-batch that waits for its experts lets the next one's post-attention go
    first, unless the pre-attention that is due is its own.
    """
    sweep, n = _Sweep(shape), shape.num_micro_batches
    total, ahead, due = shape.num_layers * n, min(shape.lookahead, n), _pages_due(shape)
    waiting: int | None = None  # for its experts
    for t in range(min(ahead, total)):
        sweep.pre(*divmod(t, n))
    for t in range(total):
        sweep.hidden(*divmod(t, n))
        if waiting is not None:  # behind the hidden states, and before what could take the device's time
            sweep.fetch(*divmod(waiting, n))
        for layer, page, ordinal in due.get(t, ()):
            sweep.page(layer, page, ordinal)
        sweep.post(*divmod(t, n))
        if waiting is not None:
            sweep.post_experts(*divmod(waiting, n))
        waiting = t
        if ahead == n or t + 1 == total:
            sweep.fetch(*divmod(t, n))
            sweep.post_experts(*divmod(t, n))
            waiting = None
        if t + ahead < total:
            sweep.pre(*divmod(t + ahead, n))
    yield from sweep.tasks


def _s2(shape: SweepShape) -> Iterator[Task]:
    """FastDecode-like: CPU attention overlaps the GPU, but a layer's weights go as one block in front of its hidden
    states, so the first hidden state of each layer waits behind it."""
    sweep, n, streamed = _Sweep(shape), shape.num_micro_batches, shape.streamed
    blocks = {layer * n: ordinal for ordinal, layer in enumerate(streamed, start=1)}
    total = shape.num_layers * n
    for t in range(min(n, total)):
        sweep.pre(*divmod(t, n))
    for t in range(total):
        if t in blocks:
            sweep.block(blocks[t])
        sweep.hidden(*divmod(t, n))
        sweep.whole_post(*divmod(t, n))
        if t + n < total:
            sweep.pre(*divmod(t + n, n))
    yield from sweep.tasks


def _s3(shape: SweepShape) -> Iterator[Task]:
    """FlexGen(c): the next layer's weights stream while this one computes, but CPU attention overlaps nothing."""
    sweep, n, streamed = _Sweep(shape), shape.num_micro_batches, shape.streamed
    blocks = {layer * n: ordinal for ordinal, layer in enumerate(streamed, start=1)}
    for t in range(shape.num_layers * n):
        sweep.pre(*divmod(t, n))
        sweep.hidden(*divmod(t, n))
        if t in blocks:  # behind this hidden state, so that only the following ones wait for it
            sweep.block(blocks[t])
        sweep.whole_post(*divmod(t, n))
    yield from sweep.tasks


def _s4(shape: SweepShape) -> Iterator[Task]:
    """FlexGen: attention on the device; the KV of the next micro-batch and the next layer's pages share the link."""
    sweep, n = _Sweep(shape, attention_on_device=True), shape.num_micro_batches
    total, due = shape.num_layers * n, _pages_due(shape)
    if shape.with_attention:
        sweep.kv_load(0, 0)
    for t in range(total):
        if shape.with_attention and t + 1 < total:
            sweep.kv_load(*divmod(t + 1, n))
        sweep.pre(*divmod(t, n))
        for layer, page, ordinal in due.get(t, ()):
            sweep.page(layer, page, ordinal)
        sweep.whole_post(*divmod(t, n))
    yield from sweep.tasks


def _serial(shape: SweepShape) -> Iterator[Task]:
    """Nothing overlaps: a layer's pages, then each micro-batch from projection to MoE, one after the other."""
    sweep, n, streamed = _Sweep(shape), shape.num_micro_batches, shape.streamed
    ordinal_of = {layer: ordinal for ordinal, layer in enumerate(streamed)}
    for t in range(shape.num_layers * n):
        layer, index = divmod(t, n)
        wait: tuple[TaskKey, ...] = ()
        if index == 0 and layer in ordinal_of:
            previous = _key(TaskName.POST_ATTENTION, layer - 1, n - 1) if layer else SWEEP_START
            for page in range(shape.pages_per_layer[layer]):
                key = _key(TaskName.WEIGHT_PAGE, layer, page)
                sweep.emit(Resource.H2D, key, *((previous,) if page == 0 else ()))
            wait = (key,)
        sweep.pre(layer, index, *wait)
        sweep.hidden(layer, index)
        sweep.whole_post(layer, index)
    yield from sweep.tasks


_ORDERS: dict[str, tuple[Callable[[SweepShape], Iterator[Task]], bool]] = {
    "cgopipe": (_cgopipe, True),
    "serial": (_serial, False),
    "s2": (_s2, True),
    "s3": (_s3, True),
    "s4": (_s4, True),
}


SCHEDULE_NAMES = tuple(_ORDERS)


@lru_cache(maxsize=256)
def make_schedule(name: str, shape: SweepShape) -> Schedule:
    """The tasks of one sweep, cached: a decode phase asks for the same shape again and again."""
    order, prefetches = _ORDERS[name]
    return Schedule(name, shape, tuple(order(shape)), prefetches_first_layer=prefetches)
