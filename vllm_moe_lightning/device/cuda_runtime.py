"""What CudaDevice needs of CUDA, as one small interface, and its implementation on torch.cuda and the driver.

A test puts a double in its place (tests/helpers/recording_cuda.py), so nothing else in device/ may call torch.cuda.
Decides nothing: order, budget and names are the device's.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any, Protocol

import torch

from vllm_moe_lightning.errors import DeviceMemoryError, MoeLightningError
from vllm_moe_lightning.numa import node_of_pci_device

CUDA_SUCCESS = 0
CUDA_ERROR_OUT_OF_MEMORY = 2
# Visible to every context of the process, not only to the one that registers.
REGISTER_PORTABLE = 1
# Of a host wait: short enough to be lost in any synchronisation of a whole step, long enough to cost no core.
POLL_S = 50e-6

StreamHandle = Any
EventHandle = Any


class CudaRuntime(Protocol):
    """Streams, events, copies and memory of the current GPU. Nothing blocks the host but `host_wait`."""

    torch_device: torch.device

    def current_stream(self) -> StreamHandle:
        """The stream that torch launches the calling thread's kernels on. Equal handles are one stream."""

    def new_stream(self, name: str) -> StreamHandle: ...

    def record(self, stream: StreamHandle) -> EventHandle:
        """A new event behind everything that the stream was given so far."""

    def wait(self, stream: StreamHandle, event: EventHandle) -> None:
        """What the stream is given from now on runs after the event."""

    def is_complete(self, event: EventHandle) -> bool: ...

    def host_wait(self, event: EventHandle, timeout_s: float | None) -> bool:
        """Blocks the calling thread until the event is complete; False: not within the time."""

    def seconds_between(self, start: EventHandle, end: EventHandle) -> float:
        """Of two complete events."""

    def thread_setup(self) -> tuple[object, object]:
        """(function, argument) of an int (*)(void*) that a native thread calls once before any `waiter`."""

    def waiter(self, event: EventHandle) -> tuple[object, object]:
        """(function, argument) of an int (*)(void*) that sleeps, without the GIL, until the event is complete."""

    def copy(self, stream: StreamHandle, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Both [num_bytes] uint8, one of them on the GPU and the other pinned."""

    def fill(self, stream: StreamHandle, dst: torch.Tensor, byte: int) -> None:
        """dst: [num_bytes] uint8 on the GPU."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8 on the GPU. Raises DeviceMemoryError."""

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A small host tensor's copy on the GPU, on the current stream."""

    def is_on_device(self, tensor: torch.Tensor) -> bool: ...

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether somebody else has pinned this host memory."""

    def free_bytes(self) -> int: ...

    def register(self, address: int, num_bytes: int) -> int:
        """Pin; returns a CUDA error code, and leaves no error behind for others to find."""

    def unregister(self, address: int) -> int: ...

    def error_text(self, code: int) -> str: ...

    def numa_node(self) -> int | None:
        """The memory node that the GPU hangs on, where the machine has nodes and says so."""

    def range_push(self, label: str) -> None: ...

    def range_pop(self) -> None: ...


class TorchCuda:
    """The current CUDA device of the calling thread.

    Pinning and waiting go to the driver: it keeps no "last error" that a later kernel launch of torch's would trip
    over, its calls have the plain C signatures that a native stream can run, and they never make a context on GPU 0
    for a thread that belongs to another GPU.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise MoeLightningError(
                "torch.cuda sees no GPU: check nvidia-smi, CUDA_VISIBLE_DEVICES and that torch is a CUDA build; "
                "moe_lightning.device 'emulated' runs anywhere"
            )
        self._index = torch.cuda.current_device()
        self.torch_device = torch.device("cuda", self._index)
        self._driver = ctypes.CDLL("libcuda.so.1")
        for name, arguments in _DRIVER_SIGNATURES.items():
            function = getattr(self._driver, name)
            function.restype, function.argtypes = ctypes.c_int, arguments
        torch.zeros(1, device=self.torch_device)  # the context exists, and is this thread's, from here on
        self._context = ctypes.c_void_p()
        self._require(self._driver.cuCtxGetCurrent(ctypes.byref(self._context)), "cuCtxGetCurrent")

    def current_stream(self) -> StreamHandle:
        return torch.cuda.current_stream(self.torch_device)

    def new_stream(self, name: str) -> StreamHandle:
        return torch.cuda.Stream(self.torch_device)

    def record(self, stream: StreamHandle) -> EventHandle:
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # blocking: whoever waits sleeps, and does not spin
        event.record(stream)
        return event

    def wait(self, stream: StreamHandle, event: EventHandle) -> None:
        stream.wait_event(event)

    def is_complete(self, event: EventHandle) -> bool:
        return bool(event.query())

    def host_wait(self, event: EventHandle, timeout_s: float | None) -> bool:
        if timeout_s is None:
            event.synchronize()
            return True
        end_s = time.monotonic() + timeout_s
        while not event.query():
            if time.monotonic() >= end_s:
                return False
            time.sleep(POLL_S)
        return True

    def seconds_between(self, start: EventHandle, end: EventHandle) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def thread_setup(self) -> tuple[object, object]:
        return self._driver.cuCtxSetCurrent, self._context

    def waiter(self, event: EventHandle) -> tuple[object, object]:
        return self._driver.cuEventSynchronize, ctypes.c_void_p(event.cuda_event)

    def copy(self, stream: StreamHandle, dst: torch.Tensor, src: torch.Tensor) -> None:
        with torch.inference_mode(), torch.cuda.stream(stream):  # the model's tensors may be of that mode
            dst.copy_(src, non_blocking=True)

    def fill(self, stream: StreamHandle, dst: torch.Tensor, byte: int) -> None:
        with torch.inference_mode(), torch.cuda.stream(stream):
            dst.fill_(byte)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"the budget allows {num_bytes:,} bytes, but the GPU has {self.free_bytes():,} bytes free: other "
                "processes or the model's activations hold the rest; lower the budget (device_memory_mib)"
            ) from error

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.torch_device

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return int(free)

    def register(self, address: int, num_bytes: int) -> int:
        return int(self._driver.cuMemHostRegister_v2(address, num_bytes, REGISTER_PORTABLE))

    def unregister(self, address: int) -> int:
        return int(self._driver.cuMemHostUnregister(address))

    def error_text(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._driver.cuGetErrorString(code, ctypes.byref(text))
        return (text.value or b"unknown error").decode()

    def numa_node(self) -> int | None:
        device = ctypes.c_int()
        self._require(self._driver.cuDeviceGet(ctypes.byref(device), self._index), "cuDeviceGet")
        name = ctypes.create_string_buffer(32)
        self._require(self._driver.cuDeviceGetPCIBusId(name, len(name), device), "cuDeviceGetPCIBusId")
        return node_of_pci_device(name.value.decode())

    def range_push(self, label: str) -> None:
        torch.cuda.nvtx.range_push(label)

    def range_pop(self) -> None:
        torch.cuda.nvtx.range_pop()

    def _require(self, code: int, call: str) -> None:
        if code != CUDA_SUCCESS:
            raise MoeLightningError(f"{call} failed: CUDA error {code} ({self.error_text(code)})")


_DRIVER_SIGNATURES: dict[str, list[Any]] = {
    "cuCtxGetCurrent": [ctypes.POINTER(ctypes.c_void_p)],
    "cuCtxSetCurrent": [ctypes.c_void_p],
    "cuEventSynchronize": [ctypes.c_void_p],
    "cuMemHostRegister_v2": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint],
    "cuMemHostUnregister": [ctypes.c_void_p],
    "cuGetErrorString": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
    "cuDeviceGet": [ctypes.POINTER(ctypes.c_int), ctypes.c_int],
    "cuDeviceGetPCIBusId": [ctypes.c_char_p, ctypes.c_int, ctypes.c_int],
}
