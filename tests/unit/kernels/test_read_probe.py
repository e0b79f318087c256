"""Every pattern of the read probe reads each byte once, whatever the size, the place and the threads."""

import numpy
import pytest
import torch

from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.kernels import attention, native, read_probe
from vllm_moe_lightning.kernels.attention import ISA_BY_NAME, AttentionPool, available_isas
from vllm_moe_lightning.kernels.read_probe import READ_PATTERNS, read_once

# Nothing for a vector, a stream or a step; just not and just enough for a step of each stream; several pieces.
SIZES = (1, 7, 8, 9, 63, 255, 256, 511, 512, 1023, 1024, 4 * 1024 + 5, 300_001, 3_000_003)


def some_bytes(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes))


def sum_of_words(memory: torch.Tensor) -> int:
    data = memory.numpy().tobytes()
    words = numpy.frombuffer(data + bytes(-len(data) % 8), dtype="<u8")
    return int(words.sum(dtype=numpy.uint64))


@pytest.mark.parametrize("pattern", READ_PATTERNS)
@pytest.mark.parametrize("isa", ["auto", *(name for name in ISA_BY_NAME if name != "auto")])
def test_each_byte_is_read_once(isa: str, pattern: str) -> None:
    if isa != "auto" and isa not in available_isas():
        pytest.skip(f"this CPU has no {isa}")
    for num_bytes in SIZES:
        memory = some_bytes(num_bytes)
        assert read_once(memory, pattern, isa=isa) == sum_of_words(memory), num_bytes


@pytest.mark.parametrize("pattern", READ_PATTERNS)
def test_unaligned_memory_is_read_as_well(pattern: str) -> None:
    memory = some_bytes(10_000)[3:]
    assert read_once(memory, pattern) == sum_of_words(memory)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_threads_of_a_pool_share_the_bytes(num_threads: int) -> None:
    memory = some_bytes(5_000_001)
    with AttentionPool(num_threads) as pool:
        for pattern in READ_PATTERNS:
            assert read_once(memory, pattern, pool=pool) == sum_of_words(memory)


def test_a_tensor_of_any_dtype_is_read_as_the_bytes_it_is_made_of() -> None:
    tensor = torch.randn(33, 7, dtype=torch.bfloat16)
    assert read_once(tensor, "sequential") == sum_of_words(tensor.view(torch.uint8))


def test_an_unknown_pattern_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"pattern must be one of \['sequential', .*got 'random'"):
        read_once(some_bytes(8), "random")


@pytest.mark.parametrize("memory", [torch.zeros(4, 4)[:, 1], torch.zeros(0), torch.zeros(4, device="meta")])
def test_what_is_no_plain_piece_of_host_memory_is_refused(memory: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="memory must be contiguous on the host and not empty"):
        read_once(memory, "sequential")


def test_an_instruction_set_that_the_cpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "available_isas", lambda: ("scalar",))
    with pytest.raises(UnsupportedError, match="cannot run avx2"):
        read_once(some_bytes(8), "sequential", isa="avx2")


def test_auto_reads_with_the_plain_loop_where_there_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike attention, which is many times slower without vectors."""
    monkeypatch.setattr(attention, "available_isas", lambda: ("scalar",))
    memory = some_bytes(1000)
    assert read_once(memory, "sequential") == sum_of_words(memory)


def test_the_c_side_refuses_what_it_does_not_know() -> None:
    probe, total = native.library().mol_read_probe, read_probe.ctypes.c_uint64()
    memory = some_bytes(64)
    arguments = {"data": memory.data_ptr(), "num_bytes": 64, "pattern": 0, "isa": 0}
    for wrong in ({"data": None}, {"num_bytes": -1}, {"pattern": 4}, {"pattern": -1}, {"isa": 6}, {"isa": -1}):
        code = probe(*(arguments | wrong).values(), None, read_probe.ctypes.byref(total))
        assert code == native.ERROR_BAD_ARGUMENT, wrong
    assert probe(*arguments.values(), None, None) == native.ERROR_BAD_ARGUMENT
