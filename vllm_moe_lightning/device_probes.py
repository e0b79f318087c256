"""Measurements of the device and its link: the emulated device's copies, or a GPU's through torch.cuda.

Not measured: traffic between GPUs, and links other than the first GPU's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from vllm_moe_lightning.device import EmulatedDevice
from vllm_moe_lightning.device.base import CopyStream
from vllm_moe_lightning.hardware import MIB
from vllm_moe_lightning.host_probes import Effort, not_run, rate_of, timed_s
from vllm_moe_lightning.machine_readings import BYTES_PER_S, FLOPS_PER_S, SECONDS, SHARE, Reading

NO_CUDA = "torch.cuda sees no GPU"
CUDA_READINGS = {
    "cuda_h2d": BYTES_PER_S,
    "cuda_d2h": BYTES_PER_S,
    "cuda_both_ways_share": SHARE,
    "cuda_copy_latency": SECONDS,
    "cuda_memory": BYTES_PER_S,
    "cuda_gemm": FLOPS_PER_S,
}
SMALL_COPY_BYTES = 4096
# bfloat16 matrix units came with compute capability 8; before it only float16 has them.
BFLOAT16_CAPABILITY = 8


def both_ways_share(name: str, up_s: list[float], down_s: list[float], both_s: list[float]) -> Reading:
    """Share of its speed that each direction keeps while both run: 1 if the two overlap, 0.5 if they take turns."""
    solo_s = (min(up_s) + min(down_s)) / 2
    best, median = (max(0.5, min(1.0, solo_s / each)) for each in (min(both_s), statistics.median(both_s)))
    return Reading(name=name, unit=SHARE, best=best, median=median, note="0.5: they only take turns")


def seconds_of(name: str, seconds: list[float], note: str) -> Reading:
    return Reading(name=name, unit=SECONDS, best=min(seconds), median=statistics.median(seconds), note=note)


def emulated_link(effort: Effort) -> list[Reading]:
    """The emulated device's streams without pacing: memcpy by a thread for each direction."""
    num_bytes = effort.buffer_bytes // 2
    device = EmulatedDevice()
    try:
        frames = [device.allocate(num_bytes, f"frame {index}").tensor for index in range(2)]
        pages = [device.allocate_host(num_bytes, f"page {index}").tensor for index in range(2)]

        def copy(stream: CopyStream, dst: torch.Tensor, src: torch.Tensor) -> None:
            stream.copy([dst], [src], "probe", reads=["probe source"], writes=["probe target"])

        def up(size: int = num_bytes) -> None:
            copy(device.h2d, frames[0][:size], pages[0][:size])

        def down() -> None:
            copy(device.d2h, pages[1], frames[1])

        def complete(*launches: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                for launch in launches:
                    launch()
                device.synchronize()

            return run

        up_s = timed_s(complete(up), effort.repeats)
        down_s = timed_s(complete(down), effort.repeats)
        both_s = timed_s(complete(up, down), effort.repeats)
        small_s = timed_s(complete(lambda: up(SMALL_COPY_BYTES)), effort.repeats)
    finally:
        device.close()
    note = f"{num_bytes // MIB} MiB by the emulated device's stream, unpaced"
    return [
        rate_of("emulated_h2d", BYTES_PER_S, num_bytes, up_s, note),
        rate_of("emulated_d2h", BYTES_PER_S, num_bytes, down_s, note),
        both_ways_share("emulated_both_ways_share", up_s, down_s, both_s),
        seconds_of("emulated_copy_latency", small_s, f"{SMALL_COPY_BYTES} bytes, from launch to completion"),
    ]


def cuda_device(effort: Effort) -> list[Reading]:
    """Link with pinned memory, device memory and GEMM of the current GPU; without one, the names and why."""
    if not torch.cuda.is_available():
        return [not_run(name, unit, NO_CUDA) for name, unit in CUDA_READINGS.items()]
    return [*_cuda_link(effort), _cuda_memory(effort), _cuda_gemm(effort)]


def _completed(launch: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        launch()
        torch.cuda.synchronize()

    return run


def _cuda_link(effort: Effort) -> list[Reading]:
    num_bytes = effort.buffer_bytes // 4
    frames = [torch.zeros(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    pages = [torch.zeros(num_bytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
    up_stream, down_stream = torch.cuda.Stream(), torch.cuda.Stream()

    def up(size: int = num_bytes) -> None:
        with torch.cuda.stream(up_stream):
            frames[0][:size].copy_(pages[0][:size], non_blocking=True)

    def down() -> None:
        with torch.cuda.stream(down_stream):
            pages[1].copy_(frames[1], non_blocking=True)

    def both() -> None:
        up()
        down()

    up_s = timed_s(_completed(up), effort.repeats)
    down_s = timed_s(_completed(down), effort.repeats)
    both_s = timed_s(_completed(both), effort.repeats)
    small_s = timed_s(_completed(lambda: up(SMALL_COPY_BYTES)), effort.repeats)
    note = f"{num_bytes // MIB} MiB, pinned"
    return [
        rate_of("cuda_h2d", BYTES_PER_S, num_bytes, up_s, note),
        rate_of("cuda_d2h", BYTES_PER_S, num_bytes, down_s, note),
        both_ways_share("cuda_both_ways_share", up_s, down_s, both_s),
        seconds_of("cuda_copy_latency", small_s, f"{SMALL_COPY_BYTES} bytes, launch and synchronise included"),
    ]


def _cuda_memory(effort: Effort) -> Reading:
    source = torch.zeros(2 * effort.buffer_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = timed_s(_completed(lambda: target.copy_(source)), effort.repeats)
    return rate_of("cuda_memory", BYTES_PER_S, 2 * source.nbytes, seconds, "a copy on the device, read + written")


def _cuda_gemm(effort: Effort) -> Reading:
    size = 4 * effort.gemm_size
    capability, _ = torch.cuda.get_device_capability()
    dtype = torch.bfloat16 if capability >= BFLOAT16_CAPABILITY else torch.float16
    left, right = torch.randn(2, size, size, device="cuda", dtype=dtype).unbind()
    product = torch.empty_like(left)
    seconds = timed_s(_completed(lambda: torch.mm(left, right, out=product)), effort.repeats)
    return rate_of("cuda_gemm", FLOPS_PER_S, 2.0 * size**3, seconds, f"{size} x {size} matrices of {dtype}")
