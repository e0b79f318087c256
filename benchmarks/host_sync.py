"""Whether a step waits for the GPU behind our back: torch's sync debug mode over steps whose kernels are loaded.

What we wait for ourselves it does not see, as those are events that are asked whether they are complete: the launching
thread for attention whose result is needed next, and, with fetched experts, for the routing of each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.check_run import CheckRun, Row
from benchmarks.gpu_device import DeviceKind, half_types, make_device
from benchmarks.result_checks import DEVICE_BYTES, PLACES, small_engine, steps_of

NO_WAIT = "no wait that torch sees"
CASES = {
    "cgopipe, prompts and context on the device": NO_WAIT,
    "cgopipe, experts on the CPU": NO_WAIT,
    "cgopipe, experts fetched": f"{NO_WAIT}; for the routing of a layer the launching thread waits by an event",
}


def launches_without_host_sync(step: Callable[[], object]) -> str:
    """`ok`, or torch's word for the first call of the step that waited. It has been taken once before."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "ok"


def host_sync_checks(kind: DeviceKind, run: CheckRun) -> list[Row]:
    """Of the small decoder: {"case", "expected", "found"}, by itself each. `found` other than `ok` is a finding about
    speed, and no failure."""
    rows = []
    for name, expected in CASES.items():
        attempt = run.attempt(lambda name=name: _found(kind, PLACES[name]))
        if attempt.value is None:
            run.fail(f"host synchronisation, {name}", attempt.why or "")
        rows.append({"case": name, "expected": expected, "found": attempt.value, **(attempt.failure or {})})
    return rows


def _found(kind: DeviceKind, options: dict[str, Any]) -> str:
    device = make_device(kind, DEVICE_BYTES)
    try:
        with small_engine(device, half_types(kind)[-1], options) as engine:
            steps = list(steps_of(engine.model.config))
            for step in steps:
                engine.step(step)
            device.synchronize()
            return launches_without_host_sync(lambda: [engine.step(step) for step in steps])
    finally:
        device.close()
