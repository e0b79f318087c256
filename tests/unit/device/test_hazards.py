"""The hazard checker on a small CGOPipe: it accepts the right waits and finds each one that is left out."""

import pytest

from vllm_moe_lightning.device import hazards
from vllm_moe_lightning.device.hazards import HazardChecker
from vllm_moe_lightning.errors import HazardError

STREAMS = ("compute", "d2h", "h2d", "cpu")
NUM_LAYERS, NUM_MICRO_BATCHES, NUM_SLOTS = 5, 3, 2
WAITS = {
    "d2h waits for compute: qkv is ready",
    "cpu waits for d2h: qkv is on the host",
    "h2d waits for cpu: the hidden state is ready",
    "compute waits for h2d: the hidden state has arrived",
    "compute waits for h2d: the layer's pages have arrived",
    "h2d waits for compute: the slot is free",
}


def run_cgopipe(checker: HazardChecker, left_out: str | None) -> None:
    """Submits the schedule; one page a micro-batch, one staging buffer a micro-batch and direction."""
    seqs = dict.fromkeys(STREAMS, 0)

    def submit(stream: str, label: str, reads: list[str], writes: list[str]) -> tuple[str, int]:
        checker.operation(stream, label, reads, writes)
        seqs[stream] += 1
        checker.record_event(stream, seqs[stream])
        return stream, seqs[stream]

    def wait(stream: str, event: tuple[str, int] | None, why: str) -> None:
        assert why in WAITS
        if event is not None and why != left_out:
            checker.wait_event(stream, *event)

    slot_free: dict[int, tuple[str, int]] = {}

    def page(layer: int, number: int) -> tuple[str, int]:
        slot = layer % NUM_SLOTS
        wait("h2d", slot_free.get(slot), "h2d waits for compute: the slot is free")
        return submit("h2d", f"page({layer},{number})", [f"host_layer_{layer}"], [f"slot_{slot}_page_{number}"])

    pages = {0: [page(0, number) for number in range(NUM_MICRO_BATCHES)]}
    for layer in range(NUM_LAYERS):
        slot = layer % NUM_SLOTS
        pages[layer + 1] = []
        arrivals = []
        for ubatch in range(NUM_MICRO_BATCHES):
            qkv, host_qkv = f"qkv_{ubatch}", f"host_qkv_{ubatch}"
            hidden, host_hidden = f"hidden_{ubatch}", f"host_hidden_{ubatch}"
            event = submit("compute", f"pre({layer},{ubatch})", [hidden], [qkv])
            wait("d2h", event, "d2h waits for compute: qkv is ready")
            event = submit("d2h", f"qkv({layer},{ubatch})", [qkv], [host_qkv])
            wait("cpu", event, "cpu waits for d2h: qkv is on the host")
            event = submit("cpu", f"attention({layer},{ubatch})", [host_qkv, "kv_cache"], ["kv_cache", host_hidden])
            pages[layer + 1].append(page(layer + 1, ubatch))
            wait("h2d", event, "h2d waits for cpu: the hidden state is ready")
            arrivals.append(submit("h2d", f"hidden({layer},{ubatch})", [host_hidden], [hidden]))
        for event in pages[layer]:
            wait("compute", event, "compute waits for h2d: the layer's pages have arrived")
        for ubatch in range(NUM_MICRO_BATCHES):
            wait("compute", arrivals[ubatch], "compute waits for h2d: the hidden state has arrived")
            weights = [f"slot_{slot}_page_{number}" for number in range(NUM_MICRO_BATCHES)]
            label = f"post({layer},{ubatch})"
            slot_free[slot] = submit("compute", label, [f"hidden_{ubatch}", *weights], [f"hidden_{ubatch}"])


def test_a_pipeline_with_all_its_waits_is_accepted() -> None:
    run_cgopipe(HazardChecker(STREAMS), left_out=None)


# Implied here: pages go up before the hidden states of their layer, on one first-in first-out stream.
IMPLIED = {"compute waits for h2d: the layer's pages have arrived"}


@pytest.mark.parametrize("left_out", sorted(WAITS - IMPLIED))
def test_each_wait_that_is_left_out_is_found(left_out: str) -> None:
    with pytest.raises(HazardError):
        run_cgopipe(HazardChecker(STREAMS), left_out)


def test_pages_that_nobody_waits_for_are_found() -> None:
    checker = HazardChecker(STREAMS)
    checker.operation("h2d", "page(1,0)", ["host_layer_1"], ["slot_1"])
    with pytest.raises(HazardError, match=r"'slot_1'.*'post\(1,0\)'.*'compute' reads.*'page\(1,0\)'.*'h2d'"):
        checker.operation("compute", "post(1,0)", ["slot_1"], [])


def test_readers_may_share_a_buffer_but_a_writer_waits_for_all_of_them() -> None:
    checker = HazardChecker(STREAMS)
    for stream in ("cpu", "d2h", "h2d"):
        checker.operation(stream, f"read by {stream}", ["shared"], [])
        checker.record_event(stream, 1)
    checker.wait_event("compute", "cpu", 1)
    checker.wait_event("compute", "h2d", 1)
    with pytest.raises(HazardError, match="read by d2h"):
        checker.operation("compute", "write", [], ["shared"])
    checker.wait_event("compute", "d2h", 1)
    checker.operation("compute", "write", [], ["shared"])


def test_order_passes_through_a_third_stream() -> None:
    checker = HazardChecker(STREAMS)
    checker.operation("compute", "write", [], ["x"])
    checker.record_event("compute", 1)
    checker.wait_event("d2h", "compute", 1)
    checker.record_event("d2h", 1)
    checker.wait_event("cpu", "d2h", 1)
    checker.operation("cpu", "read", ["x"], [])


def test_an_event_does_not_stand_for_what_came_after_it() -> None:
    checker = HazardChecker(STREAMS)
    checker.operation("h2d", "page 0", [], ["page_0"])
    checker.record_event("h2d", 1)
    checker.operation("h2d", "page 1", [], ["page_1"])
    checker.wait_event("compute", "h2d", 1)
    checker.operation("compute", "post", ["page_0"], [])
    with pytest.raises(HazardError, match="page 1"):
        checker.operation("compute", "post", ["page_1"], [])


def test_what_the_host_synchronised_comes_before_all_that_is_submitted_later() -> None:
    checker = HazardChecker(STREAMS)
    checker.operation("h2d", "page", [], ["slot"])
    checker.operation("d2h", "qkv", ["qkv"], ["host_qkv"])
    checker.synchronize(["h2d"])
    checker.operation("compute", "post", ["slot"], [])
    with pytest.raises(HazardError, match="host_qkv"):
        checker.operation("cpu", "attention", ["host_qkv"], [])


def test_compute_is_not_ordered_with_other_streams_by_the_host() -> None:
    checker = HazardChecker(STREAMS)
    checker.operation("h2d", "page", [], ["slot"])
    checker.record_event("h2d", 1)
    checker.wait_event("compute", "h2d", 1)
    checker.operation("compute", "post", ["slot"], ["hidden"])
    with pytest.raises(HazardError, match="hidden"):
        checker.operation("d2h", "hidden", ["hidden"], [])


def test_a_released_name_starts_afresh() -> None:
    checker = HazardChecker(STREAMS)
    checker.operation("h2d", "page", [], ["slot"])
    checker.forget("slot")
    checker.operation("compute", "post", ["slot"], [])


def test_events_that_all_streams_know_are_dropped_and_still_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hazards, "NUM_EVENTS_KEPT", 16)
    checker = HazardChecker(("compute", "h2d"))
    for seq in range(1, 500):
        for stream, other in (("h2d", "compute"), ("compute", "h2d")):
            checker.operation(stream, f"{stream} {seq}", [], ["slot"])
            checker.record_event(stream, seq)
            checker.wait_event(other, stream, seq)
    assert len(checker._events) <= 32
    checker.wait_event("compute", "h2d", 1)
    checker.operation("compute", "last", [], ["slot"])
