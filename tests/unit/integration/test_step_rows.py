# SPDX-License-Identifier: Apache-2.0
"""A step's rows come to host memory with their values then, from a GPU in one copy that is not waited for early."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from vllm_moe_lightning.integration import step_rows
from vllm_moe_lightning.integration.step_rows import copies_on_host


def step() -> list[torch.Tensor]:
    """Slots, lengths, and a block table of which the step uses some columns."""
    table = torch.arange(40, dtype=torch.int32).view(5, 8)
    return [torch.arange(100, 107), torch.tensor([3, 4, 5, 6, 7], dtype=torch.int32), table[:, :3]]


def overwrite(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(-1)


def assert_is(copies: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for copy, tensor in zip(copies, expected, strict=True):
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)


def test_what_is_in_host_memory_is_copied_since_the_runner_writes_it_again() -> None:
    tensors = step()
    copies = copies_on_host(tensors)
    overwrite(tensors)
    assert_is(copies(), step())


def test_what_is_on_a_gpu_comes_in_one_copy_and_is_read_after_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    packed_bytes: list[int] = []
    waits = 0

    def bring_down(packed: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        landing, source = torch.full_like(packed, 0xFF), packed.clone()
        packed_bytes.append(packed.nbytes)

        def wait() -> None:
            nonlocal waits
            waits += 1
            landing.copy_(source)

        return landing, wait

    monkeypatch.setattr(step_rows, "is_in_host_memory", lambda tensor: False)
    monkeypatch.setattr(step_rows, "bring_down", bring_down)
    tensors, others = step(), step()
    first, second = copies_on_host(tensors), copies_on_host(others)
    overwrite(tensors)
    overwrite(others)
    assert packed_bytes == 2 * [7 * 8 + 5 * 4 + 15 * 4]  # no element is widened
    assert waits == 0
    assert_is(second(), step())
    assert_is(first(), step())
    assert waits == 2
