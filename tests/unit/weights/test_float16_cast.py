# SPDX-License-Identifier: Apache-2.0
"""bfloat16 weights become float16 only where that keeps them."""

import pytest
import torch

from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.weights.float16_cast import refuse_overflow


def cast(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bfloat16).to(torch.float16)


def test_the_largest_float16_is_kept_and_the_next_value_refused() -> None:
    refuse_overflow("w2", cast(65280.0, -65280.0, 2.0**-30, 0.0))
    with pytest.raises(UnsupportedError, match=r"w2 can't be held in float16: 1 of its 2 values are over 65504"):
        refuse_overflow("w2", cast(-65536.0, 1.0))


def test_nan_is_refused_and_counted_apart() -> None:
    with pytest.raises(UnsupportedError, match=r"w1 .* 1 of its 3 values are over 65504 and 1 are NaN"):
        refuse_overflow("w1", cast(float("nan"), float("inf"), 1.0))


def test_other_types_are_nobody_s_cast() -> None:
    refuse_overflow("w1", torch.tensor([float("inf")]))
    refuse_overflow("qweight", torch.tensor([1 << 30], dtype=torch.int32))
