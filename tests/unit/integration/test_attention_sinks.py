# SPDX-License-Identifier: Apache-2.0
"""Sinks are in host memory before the first sweep, which would else wait for the GPU at each layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from vllm_moe_lightning.integration import attention
from vllm_moe_lightning.integration.attention import HostAttentionImpl


class OnGpu(torch.Tensor):
    """Notes when it is brought to the host."""

    moved: ClassVar[list[tuple[Any, ...]]] = []

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.moved.append(args)
        return self.as_subclass(torch.Tensor).to(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sinks_are_brought_when_the_model_is_attached_and_by_no_sweep(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinks = torch.tensor([0.5, -1.0], dtype=dtype).as_subclass(OnGpu)
    impl = HostAttentionImpl(num_heads=2, head_size=8, scale=0.5, sliding_window=4, sinks=sinks)
    OnGpu.moved.clear()
    impl.bring_sinks_to_host()
    assert OnGpu.moved == [("cpu", torch.float32)]
    assert type(impl.options.sinks) is torch.Tensor
    torch.testing.assert_close(impl.options.sinks, torch.tensor([0.5, -1.0]))
    assert (impl.options.scale, impl.options.sliding_window) == (0.5, 4)
    requests: list[Any] = []
    monkeypatch.setattr(attention, "yield_to_executor", requests.append)
    monkeypatch.setattr(impl, "cache_over", lambda *_: None)
    rows, output = SimpleNamespace(num_actual_tokens=1, block_size=16, rows=None), torch.zeros(1, 2, 8)
    impl.forward(None, output, output, output, output, rows, output)
    assert requests[0].options is impl.options
    assert OnGpu.moved == [("cpu", torch.float32)]


def test_without_sinks_nothing_changes() -> None:
    impl = HostAttentionImpl(num_heads=2, head_size=8, scale=0.5)
    before = impl.options
    impl.bring_sinks_to_host()
    assert impl.options is before
