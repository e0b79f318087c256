# SPDX-License-Identifier: Apache-2.0
"""Of the CUDA calls of a run, each single wait for an event is taken away in turn: the proof must name the hazard, or
the other events must imply that wait. Which kinds are implied, and by what, is stated here."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from benchmarks.torch_decoder import DecoderConfig
from tests.helpers.decoder import make_engine, run
from tests.helpers.recording_cuda import RecordingCuda
from tests.helpers.stream_log import StreamLog
from vllm_moe_lightning.errors import HazardError

CONFIG = DecoderConfig(num_layers=2)
COUNT = 3
STEPS = ((5, 3, 9, 2), (1, 7, 6, 4), (6, 5, 1, 2), (1, 1, 1, 1))
PLACES: dict[str, dict[str, Any]] = {
    "streamed": {},
    "context": {"prefill_attention": "device", "prefill_context": "link"},
    "cpu": {"experts": "cpu"},
    "fetched": {"experts": "fetched", "expert_slots": 3},
}
CASES = [("streamed", name) for name in ("cgopipe", "serial", "s2", "s3", "s4")]
CASES += [(place, "cgopipe") for place in ("context", "cpu", "fetched")]

# Kinds of which each single wait is needed.
ATTENDING = {"hidden_load<-cpu", "attention<-d2h", "qkv_offload<-compute"}
ALWAYS = {
    ("streamed", "s4"): {"kv_append<-d2h", "qkv_offload<-compute"},
    ("context", "cgopipe"): ATTENDING | {"pre_attention<-h2d"},
    ("cpu", "cgopipe"): ATTENDING
    | {"experts_offload<-compute", "experts<-d2h", "experts_load<-cpu", "post_experts<-h2d"},
    ("fetched", "cgopipe"): ATTENDING | {"routing_offload<-compute", "experts_fetch<-d2h"},
}
# Kinds of which not one is needed here, since others imply them. Pages are waited for with hidden states behind them
# (in dummy sweeps there are none: test_cuda_schedules.py). What the link overwrites was used before an attention whose
# result it has brought up. A first use has nothing before it, but a page table that was written at the start.
NEVER = {
    ("streamed", "serial"): {"pre_attention<-h2d", "weight_page<-compute"},
    ("streamed", "s3"): {"weight_page<-compute"},
    ("streamed", "s4"): {"weight_page<-cpu"},
    ("context", "cgopipe"): {"kv_load<-compute", "kv_load<-cpu", "weight_page<-cpu"},
    ("fetched", "cgopipe"): {"hidden_load<-compute"},
}


def waits_of(log: StreamLog) -> dict[int, str]:
    """Place of each wait in the log -> its kind: the operation that it holds up, and the stream that it is for."""
    held_up: dict[str, list[tuple[int, str]]] = {}
    kinds = {}
    for place, (name, call) in enumerate(log.calls):
        if name == "operation":
            operation = re.split(r"[ (]", call[1])[0]
            kinds.update({waiting: f"{operation}<-{stream}" for waiting, stream in held_up.pop(call[0], [])})
        elif name == "wait_event":
            held_up.setdefault(call[0], []).append((place, call[1]))
    return kinds


def is_proven(calls: list[tuple[str, tuple[Any, ...]]]) -> bool:
    log = StreamLog()
    log.calls = calls
    try:
        log.check()
    except HazardError:
        return False
    return True


@pytest.mark.parametrize(("place", "name"), CASES, ids=lambda value: value)
def test_without_any_single_wait_the_proof_fails_or_the_others_imply_it(place: str, name: str) -> None:
    cuda = RecordingCuda()
    with make_engine(CONFIG, device=cuda.device(), schedule=name, num_micro_batches=COUNT, **PLACES[place]) as engine:
        run(engine, STEPS)
    calls = list(cuda.log.calls)
    assert is_proven(calls)
    number, needed = Counter[str](), Counter[str]()
    for index, kind in waits_of(cuda.log).items():
        number[kind] += 1
        needed[kind] += not is_proven(calls[:index] + calls[index + 1 :])
    found = {kind: f"{needed[kind]} of {number[kind]}" for kind in sorted(number)}
    always = {kind for kind in number if needed[kind] == number[kind]}
    assert always >= ALWAYS.get((place, name), ATTENDING), found
    assert {kind for kind in number if not needed[kind]} == NEVER.get((place, name), set()), found
