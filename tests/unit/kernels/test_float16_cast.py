# SPDX-License-Identifier: Apache-2.0
"""bfloat16 weights become float16 only where that keeps them."""

import pytest
import torch

from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.kernels.float16_cast import cast_to_float16


def bfloat16(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bfloat16)


def test_weights_of_the_usual_sizes_are_kept_to_the_bit() -> None:
    weights = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).mul(0.02).to(torch.bfloat16)
    weights = torch.where(weights.abs() < 2**-14, 0, weights)
    cast, loss = cast_to_float16("w13", weights)
    assert torch.equal(cast.to(torch.bfloat16), weights)
    assert (loss.num_values, loss.num_made_zero, loss.num_rounded) == (64 * 64, 0, 0)


def test_what_becomes_zero_or_is_rounded_is_counted() -> None:
    tiny, small = 2.0**-30, 2.0**-20 * (1 + 2**-7)
    cast, loss = cast_to_float16("w2", bfloat16(tiny, -tiny, small, 0.0, 1.0))
    assert cast.tolist()[:2] == [0.0, 0.0]
    assert (loss.num_made_zero, loss.num_rounded) == (2, 1)


def test_the_largest_float16_is_kept_and_the_next_value_refused() -> None:
    assert cast_to_float16("w2", bfloat16(65280.0))[0].item() == 65280.0
    with pytest.raises(UnsupportedError, match=r"w2 can't be cast to float16: 1 of 2 values are over 65504.*65536"):
        cast_to_float16("w2", bfloat16(-65536.0, 1.0))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_as_damaged(value: float) -> None:
    with pytest.raises(UnsupportedError, match="w1 has 1 values that are NaN or infinite"):
        cast_to_float16("w1", bfloat16(value, 1.0))
