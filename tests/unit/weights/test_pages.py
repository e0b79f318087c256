# SPDX-License-Identifier: Apache-2.0
"""A layer's tensors packed into a frame, and the frame cut into pages."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.weights.pages import TENSOR_ALIGNMENT_BYTES, is_dense, layout_of, pages_of

TENSORS = {
    "w13": torch.randn(3, 5, 7).bfloat16(),
    "w2_transposed": torch.randn(3, 5, 7).transpose(1, 2),
    "scale": torch.randn(3),
    "packed": torch.randint(0, 255, (11, 13), dtype=torch.uint8).t(),
}


def test_a_tensor_comes_back_from_the_frame_with_its_shape_strides_and_bytes() -> None:
    layout = layout_of("layer0", TENSORS)
    frame = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for place in layout.places:
        place.view_in(frame).copy_(TENSORS[place.name])
    for place in layout.places:
        view, original = place.view_in(frame), TENSORS[place.name]
        assert (view.shape, view.stride(), view.dtype) == (original.shape, original.stride(), original.dtype)
        assert torch.equal(view, original)


def test_tensors_are_aligned_and_do_not_overlap() -> None:
    layout, end = layout_of("layer0", TENSORS), 0
    for place in layout.places:
        assert place.offset_bytes % TENSOR_ALIGNMENT_BYTES == 0
        assert place.offset_bytes >= end
        end = place.offset_bytes + place.num_bytes
    assert end <= layout.num_bytes < end + TENSOR_ALIGNMENT_BYTES


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(4, 6), True),
        (torch.zeros(4, 6).t(), True),
        (torch.zeros(2, 3, 4).permute(2, 0, 1), True),
        (torch.zeros(1, 6, 1), True),
        (torch.zeros(1, 6)[:, :4], True),  # one row: no hole inside
        (torch.zeros(4, 6)[:, :4], False),
        (torch.zeros(4, 6)[::2], False),
        (torch.zeros(6).expand(4, 6), False),
        (torch.zeros(9).as_strided((3, 3), (2, 1)), False),
        (torch.zeros(0, 6), False),
    ],
)
def test_dense_means_neither_holes_nor_overlaps(tensor: torch.Tensor, expected: bool) -> None:
    assert is_dense(tensor) == expected


def test_a_tensor_with_holes_is_refused_by_name_with_the_cure() -> None:
    with pytest.raises(
        UnsupportedError, match=r"layers\.3\.w2: .*not dense .*stride \(6, 1\)\); run this model without"
    ):
        layout_of("layers.3", {"w2": torch.zeros(4, 6)[:, :4]})


@given(st.integers(0, 10_000), st.integers(1, 3000))
def test_pages_cover_the_frame_once_and_only_the_last_is_shorter(num_bytes: int, page_bytes: int) -> None:
    pages = pages_of(num_bytes, page_bytes)
    assert [page.offset_bytes for page in pages] == [index * page_bytes for index in range(len(pages))]
    assert sum(page.num_bytes for page in pages) == num_bytes
    assert all(page.num_bytes == page_bytes for page in pages[:-1])
    assert all(page.num_bytes > 0 for page in pages)
