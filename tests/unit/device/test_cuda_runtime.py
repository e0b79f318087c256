# SPDX-License-Identifier: Apache-2.0
"""The glue between the device and torch.cuda with the driver, on stand-ins for both: which calls are made, with what.

What torch and the driver do with them is for a GPU to show (benchmarks/gpu_check.py).
"""

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.decoder import make_engine, plain_run, run
from vllm_moe_lightning.device import CudaDevice, cuda_runtime
from vllm_moe_lightning.device.cuda_runtime import TorchCuda
from vllm_moe_lightning.errors import DeviceMemoryError, MoeLightningError
from vllm_moe_lightning.kernels import native

CONTEXT, FIRST_EVENT = 77, 1000
Driver = SimpleNamespace


class StandInEvent:
    """Complete as soon as it is recorded: the stand-in's copies run at once."""

    made = 0

    def __init__(self, *, enable_timing: bool, blocking: bool) -> None:
        assert enable_timing
        assert blocking
        self.cuda_event = 0  # torch makes it at the first record

    def record(self, stream: Any) -> None:
        assert isinstance(stream, SimpleNamespace)
        type(self).made += 1
        self.cuda_event, self.time_s = FIRST_EVENT + self.made, time.monotonic()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Any) -> float:
        return (end.time_s - self.time_s) * 1e3


def make_driver(calls: list[tuple[Any, ...]]) -> Driver:
    """Functions as ctypes gives them; those that a native thread calls are real function pointers."""

    class Function:
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, *arguments: Any) -> int:
            match self.name, arguments:
                case "cuCtxGetCurrent", [context]:
                    context._obj.value = CONTEXT
                case "cuDeviceGetPCIBusId", [name, length, _]:
                    assert length == len(name)
                    name.value = b"0000:3B:00.0"
                case "cuGetErrorString", [_, text]:
                    text._obj.value = b"out of memory"
            calls.append((self.name, *arguments))
            return 2 if self.name == "cuMemHostRegister_v2" and arguments[1] > 1 << 30 else 0

    def pointer(name: str) -> Any:
        def call(argument: int | None) -> int:
            calls.append((name, argument))
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(call)

    names = cuda_runtime._DRIVER_SIGNATURES
    for_threads = ("cuCtxSetCurrent", "cuEventSynchronize")
    return SimpleNamespace(**{name: pointer(name) if name in for_threads else Function(name) for name in names})


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """What the driver was called with; torch.cuda and the driver are stand-ins meanwhile."""
    made: list[tuple[Any, ...]] = []
    native.library()  # by the real ctypes

    @contextmanager
    def stream(_: Any) -> Iterator[None]:
        yield

    def new_stream(_: Any = None) -> SimpleNamespace:
        return SimpleNamespace(wait_event=lambda event: made.append(("wait", event.cuda_event)))

    main = new_stream()
    cuda = SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: 0,
        current_stream=lambda _: main,
        Stream=new_stream,
        Event=StandInEvent,
        stream=stream,
        mem_get_info=lambda _: (1 << 30, 2 << 30),
        nvtx=SimpleNamespace(range_push=lambda label: made.append(("range", label)), range_pop=lambda: 0),
    )

    def empty(num_bytes: int, **options: Any) -> torch.Tensor:
        if num_bytes > 1 << 30:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.empty(num_bytes, **options)

    stand_in = SimpleNamespace(
        cuda=cuda,
        device=lambda kind, index: torch.device("cpu"),
        zeros=lambda count, device: None,
        empty=empty,
        uint8=torch.uint8,
        inference_mode=torch.inference_mode,
        OutOfMemoryError=torch.OutOfMemoryError,
    )
    monkeypatch.setattr(cuda_runtime, "torch", stand_in)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: make_driver(made))

    def is_on_device(_: TorchCuda, tensor: torch.Tensor) -> bool:
        pinned = (call[1:3] for call in made if call[0] == "cuMemHostRegister_v2")
        return not any(begin <= tensor.data_ptr() < begin + size for begin, size in pinned)

    monkeypatch.setattr(TorchCuda, "is_on_device", is_on_device)
    monkeypatch.setattr(TorchCuda, "to_device", lambda _, tensor: tensor.clone())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield made
    torch.set_num_threads(threads)


def named(calls: list[tuple[Any, ...]], name: str) -> list[tuple[Any, ...]]:
    return [call for call in calls if call[0] == name]


def test_the_engine_runs_on_it_and_calls_the_driver_as_it_should(calls: list[tuple[Any, ...]]) -> None:
    device = CudaDevice()
    assert device.memory_budget_bytes == 1 << 30
    with make_engine(device=device, num_micro_batches=3) as engine:
        for got, expected in zip(run(engine), plain_run(num_micro_batches=3), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert device.totals()["h2d"].busy_s > 0
    threads = [call for call in calls if call[0] in ("cuCtxSetCurrent", "cuEventSynchronize")]
    assert threads[0] == ("cuCtxSetCurrent", CONTEXT)  # before the native thread waits for anything
    waited = [handle for name, handle in threads[1:]]
    assert len(waited) == len(set(waited)) > 0
    assert min(waited) > FIRST_EVENT  # none before it was recorded
    registered, unregistered = named(calls, "cuMemHostRegister_v2"), named(calls, "cuMemHostUnregister")
    assert {call[1] for call in registered} == {call[1] for call in unregistered}
    assert all(call[3] == cuda_runtime.REGISTER_PORTABLE for call in registered)
    assert {label.partition("(")[0] for _, label in named(calls, "range")} >= {"pre_attention", "weight_page"}
    assert named(calls, "wait")


def test_the_gpus_memory_node_is_asked_for_by_its_address(
    calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_runtime, "node_of_pci_device", lambda address: {"0000:3B:00.0": 1}[address])
    assert TorchCuda().numa_node() == 1


def test_codes_and_texts_come_from_the_driver(calls: list[tuple[Any, ...]]) -> None:
    runtime = TorchCuda()
    assert runtime.register(4096, 2 << 30) == 2
    assert runtime.error_text(2) == "out of memory"


def test_a_full_gpu_within_the_budget_is_told_from_a_full_budget(calls: list[tuple[Any, ...]]) -> None:
    with pytest.raises(DeviceMemoryError, match=r"the budget allows 2,147,483,648 bytes.*1,073,741,824 bytes free"):
        TorchCuda().allocate(2 << 30)


def test_a_driver_that_refuses_is_named(calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = TorchCuda()
    monkeypatch.setattr(runtime._driver, "cuDeviceGet", lambda *_: 101)
    with pytest.raises(MoeLightningError, match="cuDeviceGet failed: CUDA error 101"):
        runtime.numa_node()
