# SPDX-License-Identifier: Apache-2.0
"""What a running engine keeps for a trace: whole from some moment on, and there for whoever asks, again and again."""

from collections import Counter

from tests.helpers.decoder import STEPS, make_engine, run, run_dummy
from vllm_moe_lightning.pipeline.trace_ring import TraceRing
from vllm_moe_lightning.pipeline.trace_summary import summarise
from vllm_moe_lightning.resources import Resource


def test_all_sweeps_and_operations_are_there_as_often_as_asked() -> None:
    with make_engine(num_micro_batches=2) as engine:
        ring = TraceRing(engine.executor, 10_000)
        run_dummy(engine)
        first = ring.trace()
        run(engine)
        trace = ring.trace()
        assert ring.trace() == trace
    assert [sweep.is_dummy for sweep in trace.sweeps] == [True, *[False] * len(STEPS)]
    assert trace.spans[: len(first.spans)] == first.spans
    assert (trace.source.device, trace.source.schedule) == ("emulated", "cgopipe")
    num_layers = len(trace.source.pages_per_layer)
    kinds = Counter(span.label.partition("(")[0] for span in trace.spans)
    assert kinds["attention"] == len(STEPS) * num_layers * 2
    assert kinds["weight_page"] == engine.executor.ring.pages_moved
    assert sum(span.num_bytes for span in trace.spans if span.label.startswith("weight_page")) == (
        engine.executor.ring.bytes_paged
    )
    summary = summarise(trace)
    assert (summary.num_sweeps, summary.num_dummy_sweeps, dict(summary.micro_batches)) == (len(STEPS), 1, {2: 4})
    assert all(0 < summary.share(resource) <= 1 for resource in Resource)


def test_a_full_ring_holds_the_last_sweeps_whole() -> None:
    with make_engine(num_micro_batches=2) as engine:
        run(engine)
        per_sweep = engine.executor.ring.pages_moved // len(STEPS)
        ring = TraceRing(engine.executor, 2 * per_sweep + 1)
        for _ in range(4):
            run_dummy(engine)
        engine.device.synchronize()
        trace = ring.trace()
        again = ring.trace()
    assert again == trace
    assert len(trace.sweeps) in (1, 2)  # of the link's operations there are two sweeps' and one more
    began_s = min(span.start_s for span in trace.spans)
    assert min(sweep.start_s for sweep in trace.sweeps) >= began_s - 1e-3


def test_the_recorded_operations_are_those_of_the_schedule() -> None:
    with make_engine(num_micro_batches=2) as engine:
        ring = TraceRing(engine.executor, 1000)
        run(engine, [(3, 4, 5)])
        engine.device.synchronize()
        spans = ring.trace().spans
        scheduled = {str(task.key) for task in engine.executor.schedule_for(2).tasks}
    assert {span.resource for span in spans} == set(Resource)
    assert {span.label for span in spans} == {label for label in scheduled if not label.startswith("sweep_start")}
    assert all(span.start_s <= span.end_s for span in spans)
