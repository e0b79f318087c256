# SPDX-License-Identifier: Apache-2.0
"""One thread for torch: on matrices this small, its pool spends a hundred times longer in meeting than in working."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
