# SPDX-License-Identifier: Apache-2.0
"""Schedules as data: what each order guarantees, for any shape, and the paper's order letter by letter."""

from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_moe_lightning.pipeline.expert_places import ALL_STREAMED, ExpertPlaces
from vllm_moe_lightning.pipeline.schedule import SWEEP_START, Schedule, SweepShape, make_schedule
from vllm_moe_lightning.pipeline.tasks import Task, TaskKey, TaskName
from vllm_moe_lightning.resources import Resource

NAMES = ("cgopipe", "serial", "s2", "s3", "s4")
PREFETCHING = ("cgopipe", "s2", "s3", "s4")
ON_CPU = (
    TaskName.PRE_ATTENTION,
    TaskName.QKV_OFFLOAD,
    TaskName.ATTENTION,
    TaskName.HIDDEN_LOAD,
    TaskName.POST_ATTENTION,
)
CHAINS = {
    **dict.fromkeys(("cgopipe", "serial", "s2", "s3"), (ON_CPU,)),
    "s4": (
        (TaskName.PRE_ATTENTION, TaskName.DEVICE_ATTENTION, TaskName.POST_ATTENTION),
        (TaskName.KV_LOAD, TaskName.DEVICE_ATTENTION),
        (TaskName.PRE_ATTENTION, TaskName.QKV_OFFLOAD, TaskName.KV_APPEND),
    ),
}
WITH_EXPERTS = {
    "cpu": (TaskName.POST_ATTENTION, TaskName.EXPERTS_OFFLOAD, TaskName.EXPERTS, TaskName.EXPERTS_LOAD),
    "fetched": (TaskName.POST_ATTENTION, TaskName.ROUTING_OFFLOAD, TaskName.EXPERTS_FETCH),
}
# The paper's names: D1 and D2 carry Q, K, V down and the result up, PinToG a page.
PAPER_NAMES = {
    TaskName.PRE_ATTENTION: "Pre",
    TaskName.QKV_OFFLOAD: "D1",
    TaskName.ATTENTION: "CpuAttn",
    TaskName.HIDDEN_LOAD: "D2",
    TaskName.WEIGHT_PAGE: "PinToG",
    TaskName.POST_ATTENTION: "Post",
}


@st.composite
def _shapes(draw: st.DrawFn) -> SweepShape:
    num_layers = draw(st.integers(1, 6))
    places = draw(st.lists(st.sampled_from(["streamed", "cpu", "fetched"]), min_size=num_layers, max_size=num_layers))
    experts = ExpertPlaces(
        on_cpu=frozenset(layer for layer, place in enumerate(places) if place == "cpu"),
        fetched=frozenset(layer for layer, place in enumerate(places) if place == "fetched"),
    )
    pages = tuple(draw(st.lists(st.integers(0, 9), min_size=num_layers, max_size=num_layers)))
    return SweepShape(
        num_layers=num_layers,
        num_micro_batches=draw(st.integers(1, 7)),
        pages_per_layer=experts.pages(pages),
        lookahead=draw(st.integers(1, 9)),
        with_attention=draw(st.booleans()),
        experts=draw(st.sampled_from([ALL_STREAMED, experts])) if experts.pages(pages) == pages else experts,
    )


SHAPES = _shapes()
SCHEDULES = st.builds(make_schedule, st.sampled_from(NAMES), SHAPES)


def keys_of(plan: Schedule, *names: TaskName) -> list[TaskKey]:
    return [task.key for task in plan.tasks if task.key.name in names]


def pages_of(plan: Schedule) -> list[tuple[int, int]]:
    return [(key.layer, key.index) for key in keys_of(plan, TaskName.WEIGHT_PAGE)]


@given(SCHEDULES)
def test_no_task_is_listed_twice(plan: Schedule) -> None:
    assert max(Counter(task.key for task in plan.tasks).values()) == 1


@given(SCHEDULES)
def test_a_task_waits_for_other_resources_only(plan: Schedule) -> None:
    resource_of = {task.key: task.resource for task in plan.tasks}
    for task in plan.tasks:
        assert all(resource_of.get(key) is not task.resource for key in task.after)


@given(SCHEDULES)
def test_every_task_comes_after_what_it_waits_for(plan: Schedule) -> None:
    for order in (plan.tasks, plan.launch_order):
        launched: set[TaskKey] = set()
        for task in order:
            for key in task.after:
                first_of_next_sweep = key.name is TaskName.WEIGHT_PAGE and key.layer == plan.shape.streamed[0]
                assert key in launched or (plan.prefetches_first_layer and first_of_next_sweep), f"{task} misses {key}"
            launched.add(task.key)


@given(SCHEDULES)
def test_launching_early_changes_neither_the_order_on_a_resource_nor_what_a_wait_means(plan: Schedule) -> None:
    def awaited_in_this_sweep(order: tuple[Task, ...]) -> dict[TaskKey, set[TaskKey]]:
        launched: set[TaskKey] = set()
        awaited = {}
        for task in order:
            awaited[task.key] = launched.intersection(task.after)
            launched.add(task.key)
        return awaited

    for resource in Resource:
        assert [t for t in plan.launch_order if t.resource is resource] == [
            t for t in plan.tasks if t.resource is resource
        ]
    assert awaited_in_this_sweep(plan.launch_order) == awaited_in_this_sweep(plan.tasks)


def test_cgopipe_fills_the_link_before_it_computes() -> None:
    plan = make_schedule("cgopipe", SweepShape(num_layers=2, num_micro_batches=4, pages_per_layer=(4, 4)))
    order = [str(task.key) for task in plan.launch_order]
    assert order.index("hidden_load(1,2)") < order.index("post_attention(1,1)")
    assert order.index("weight_page(0,2)") < order.index("post_attention(1,1)")


@given(SCHEDULES)
def test_every_micro_batch_passes_every_layer_in_order(plan: Schedule) -> None:
    shape, position = plan.shape, {task.key: index for index, task in enumerate(plan.tasks)}
    attention = CHAINS[plan.name] if shape.with_attention else ((TaskName.POST_ATTENTION,),)
    names = set()
    last = TaskName.POST_ATTENTION
    for layer in range(shape.num_layers):
        place = "cpu" if layer in shape.experts.on_cpu else "fetched" if layer in shape.experts.fetched else None
        chains = attention if place is None else (*attention, (*WITH_EXPERTS[place], TaskName.POST_EXPERTS))
        names |= {name for chain in chains for name in chain}
        for index in range(shape.num_micro_batches):
            for chain in chains:
                places = [position[TaskKey(name, layer, index)] for name in chain]
                assert places == sorted(places)
            if layer:
                first = TaskKey(TaskName.PRE_ATTENTION if shape.with_attention else chains[0][-1], layer, index)
                assert position[TaskKey(last, layer - 1, index)] < position[first]
        last = TaskName.POST_ATTENTION if place is None else TaskName.POST_EXPERTS
    others = {TaskName.WEIGHT_PAGE, TaskName.SWEEP_START}
    assert {task.key.name for task in plan.tasks} - others == names


@given(SCHEDULES)
def test_a_micro_batch_s_experts_are_fetched_after_the_one_before_has_used_its_own(plan: Schedule) -> None:
    """So that the frames of at most one are held back from eviction."""
    for order in (plan.tasks, plan.launch_order):
        is_held = False
        for task in order:
            if task.key.name is TaskName.EXPERTS_FETCH:
                assert not is_held
                is_held = True
            elif task.key.name is TaskName.POST_EXPERTS and task.key.layer in plan.shape.experts.fetched:
                is_held = False


@given(SCHEDULES)
def test_every_page_moves_once_per_sweep_and_in_order_within_its_layer(plan: Schedule) -> None:
    for layer, num_pages in enumerate(plan.shape.pages_per_layer):
        assert [page for of, page in pages_of(plan) if of == layer] == list(range(num_pages))


@given(SCHEDULES)
def test_streamed_layers_come_up_in_turn(plan: Schedule) -> None:
    streamed = plan.shape.streamed
    expected = streamed[1:] + streamed[:1] if plan.prefetches_first_layer else streamed
    assert list(dict.fromkeys(layer for layer, _ in pages_of(plan))) == list(expected)


@given(SCHEDULES)
def test_at_most_two_layers_are_on_their_way_or_waiting_to_be_used(plan: Schedule) -> None:
    """The ring's rule, over three sweeps and in the order of launches."""
    waiting: deque[int] = deque(plan.shape.streamed[:1] if plan.prefetches_first_layer else ())
    for task in plan.launch_order * 3:
        key = task.key
        if key.name is TaskName.WEIGHT_PAGE and key.index == 0:
            waiting.append(key.layer)
            assert len(waiting) <= 2
        if key.name is TaskName.POST_ATTENTION and key.index == 0 and plan.shape.pages_per_layer[key.layer]:
            assert waiting.popleft() == key.layer


@given(SCHEDULES)
def test_the_first_page_of_a_layer_waits_for_the_last_use_of_its_slot(plan: Schedule) -> None:
    streamed, last = plan.shape.streamed, plan.shape.num_micro_batches - 1
    for task in plan.tasks:
        key = task.key
        if key.name is not TaskName.WEIGHT_PAGE or key.index:
            continue
        [awaited] = task.after
        ordinal = streamed.index(key.layer)
        if plan.prefetches_first_layer:
            before = (ordinal or len(streamed)) - 2
            expected = TaskKey(TaskName.POST_ATTENTION, streamed[before], last) if before >= 0 else SWEEP_START
        else:  # serial: nothing may overlap, so it waits for the layer just before
            expected = TaskKey(TaskName.POST_ATTENTION, key.layer - 1, last) if key.layer else SWEEP_START
        assert awaited == expected


@given(st.builds(make_schedule, st.just("cgopipe"), SHAPES))
def test_no_more_micro_batches_than_the_look_ahead_are_between_pre_and_post(plan: Schedule) -> None:
    open_micro_batches = 0
    for key in keys_of(plan, TaskName.PRE_ATTENTION, TaskName.POST_ATTENTION):
        open_micro_batches += 1 if key.name is TaskName.PRE_ATTENTION else -1
        assert open_micro_batches <= min(plan.shape.lookahead, plan.shape.num_micro_batches)


def test_cgopipe_is_the_paper_s_algorithm_1_for_four_micro_batches_and_two_ahead() -> None:
    plan = make_schedule("cgopipe", SweepShape(num_layers=3, num_micro_batches=4, pages_per_layer=(4, 4, 4)))
    got = [
        f"{PAPER_NAMES[key.name]}({key.layer + 1},{key.index + 1})"
        for key in (task.key for task in plan.tasks)
        if key.name in PAPER_NAMES
    ]
    # Layers and micro-batches count from 1, as in the paper. Pages of layer 1 are those of the next sweep.
    expected = """
        Pre(1,1) D1(1,1) CpuAttn(1,1)
        Pre(1,2) D1(1,2) CpuAttn(1,2)

        D2(1,1) PinToG(2,1) Post(1,1)   Pre(1,3) D1(1,3) CpuAttn(1,3)
        D2(1,2) PinToG(2,2) Post(1,2)   Pre(1,4) D1(1,4) CpuAttn(1,4)
        D2(1,3) PinToG(2,3) Post(1,3)   Pre(2,1) D1(2,1) CpuAttn(2,1)
        D2(1,4) PinToG(2,4) Post(1,4)   Pre(2,2) D1(2,2) CpuAttn(2,2)

        D2(2,1) PinToG(3,1) Post(2,1)   Pre(2,3) D1(2,3) CpuAttn(2,3)
        D2(2,2) PinToG(3,2) Post(2,2)   Pre(2,4) D1(2,4) CpuAttn(2,4)
        D2(2,3) PinToG(3,3) Post(2,3)   Pre(3,1) D1(3,1) CpuAttn(3,1)
        D2(2,4) PinToG(3,4) Post(2,4)   Pre(3,2) D1(3,2) CpuAttn(3,2)

        D2(3,1) PinToG(1,1) Post(3,1)   Pre(3,3) D1(3,3) CpuAttn(3,3)
        D2(3,2) PinToG(1,2) Post(3,2)   Pre(3,4) D1(3,4) CpuAttn(3,4)
        D2(3,3) PinToG(1,3) Post(3,3)
        D2(3,4) PinToG(1,4) Post(3,4)
    """
    assert got == expected.split()


def test_the_pages_of_the_layer_after_dense_and_resident_ones_are_spread_over_all_of_them() -> None:
    plan = make_schedule("cgopipe", SweepShape(num_layers=4, num_micro_batches=2, pages_per_layer=(3, 0, 0, 6)))
    before = [
        (key.layer, key.index)
        for key in keys_of(plan, TaskName.WEIGHT_PAGE, TaskName.POST_ATTENTION)
        if key.name is TaskName.POST_ATTENTION or key.layer == 3
    ]
    # A page of layer 3 before each of the six posts of layers 0 to 2.
    expected = [(3, 0), (0, 0), (3, 1), (0, 1), (3, 2), (1, 0), (3, 3), (1, 1), (3, 4), (2, 0), (3, 5), (2, 1)]
    assert before == [*expected, (3, 0), (3, 1)]


def test_a_model_without_streamed_layers_moves_no_page() -> None:
    for name in NAMES:
        plan = make_schedule(name, SweepShape(num_layers=3, num_micro_batches=2, pages_per_layer=(0, 0, 0)))
        assert pages_of(plan) == []


@pytest.mark.parametrize("name", PREFETCHING)
def test_a_single_streamed_layer_comes_up_for_the_next_sweep_while_it_is_used(name: str) -> None:
    plan = make_schedule(name, SweepShape(num_layers=3, num_micro_batches=2, pages_per_layer=(0, 4, 0)))
    assert pages_of(plan) == [(1, 0), (1, 1), (1, 2), (1, 3)]
    first = plan.tasks.index(next(task for task in plan.tasks if task.key.name is TaskName.WEIGHT_PAGE))
    assert TaskKey(TaskName.POST_ATTENTION, 1, 0) not in [task.key for task in plan.tasks[:first]]


@pytest.mark.parametrize("name", NAMES)
def test_only_serial_starts_each_sweep_with_its_own_first_layer(name: str) -> None:
    plan = make_schedule(name, SweepShape(num_layers=2, num_micro_batches=2, pages_per_layer=(2, 2)))
    assert plan.prefetches_first_layer == (name != "serial")
    assert pages_of(plan) == (
        [(0, 0), (0, 1), (1, 0), (1, 1)] if name == "serial" else [(1, 0), (1, 1), (0, 0), (0, 1)]
    )


def h2d_order(name: str) -> list[str]:
    plan = make_schedule(name, SweepShape(num_layers=2, num_micro_batches=2, pages_per_layer=(2, 2)))
    return [str(task.key) for task in plan.tasks if task.resource is Resource.H2D]


def test_s2_sends_a_layer_as_one_block_in_front_of_the_hidden_states() -> None:
    assert h2d_order("s2")[:4] == ["weight_page(1,0)", "weight_page(1,1)", "hidden_load(0,0)", "hidden_load(0,1)"]


def test_s3_sends_it_behind_the_first_hidden_state() -> None:
    assert h2d_order("s3")[:4] == ["hidden_load(0,0)", "weight_page(1,0)", "weight_page(1,1)", "hidden_load(0,1)"]


def test_s4_brings_up_the_next_micro_batch_s_context_between_pages() -> None:
    assert h2d_order("s4") == [
        "kv_load(0,0)", "kv_load(0,1)", "weight_page(1,0)", "kv_load(1,0)", "weight_page(1,1)",
        "kv_load(1,1)", "weight_page(0,0)", "weight_page(0,1)",
    ]  # fmt: skip


def test_s3_overlaps_no_attention_with_the_gpu() -> None:
    plan = make_schedule("s3", SweepShape(num_layers=2, num_micro_batches=3, pages_per_layer=(2, 2)))
    gpu = [key.name for key in keys_of(plan, TaskName.PRE_ATTENTION, TaskName.POST_ATTENTION)]
    assert gpu == [TaskName.PRE_ATTENTION, TaskName.POST_ATTENTION] * 6


def test_a_dummy_sweep_has_neither_attention_nor_its_copies() -> None:
    for name in NAMES:
        shape = SweepShape(num_layers=2, num_micro_batches=1, pages_per_layer=(2, 2), with_attention=False)
        names = {task.key.name for task in make_schedule(name, shape).tasks}
        assert names == {TaskName.SWEEP_START, TaskName.WEIGHT_PAGE, TaskName.POST_ATTENTION}


@pytest.mark.parametrize(
    "shape",
    [
        {"num_layers": 3, "pages_per_layer": (1, 1)},
        {"experts": ExpertPlaces(on_cpu=frozenset((1,)))},
        {"experts": ExpertPlaces(fetched=frozenset((0,)))},
        {"num_micro_batches": 0},
        {"lookahead": 0},
    ],
)
def test_an_impossible_shape_is_refused_with_its_values(shape: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"\d"):
        SweepShape(**{"num_layers": 2, "num_micro_batches": 2, "pages_per_layer": (1, 1), **shape})  # type: ignore[arg-type]


def test_experts_are_in_one_place() -> None:
    with pytest.raises(ValueError, match=r"layers \[2\] cannot be computed by the CPU and fetched"):
        ExpertPlaces(on_cpu=frozenset((1, 2)), fetched=frozenset((2, 3)))


def test_a_shape_s_schedule_is_made_once() -> None:
    shapes = [SweepShape(num_layers=2, num_micro_batches=2, pages_per_layer=(1, 1)) for _ in range(2)]
    assert make_schedule("cgopipe", shapes[0]) is make_schedule("cgopipe", shapes[1])


def test_waits_are_named_waiter_and_awaited() -> None:
    plan = make_schedule("cgopipe", SweepShape(num_layers=2, num_micro_batches=2, pages_per_layer=(2, 2)))
    assert plan.wait_names() == (
        "attention<-qkv_offload",
        "hidden_load<-attention",
        "post_attention<-hidden_load",
        "post_attention<-weight_page",
        "qkv_offload<-pre_attention",
        "weight_page<-post_attention",
        "weight_page<-sweep_start",
    )
