# SPDX-License-Identifier: Apache-2.0
"""A page of zeros on demand: that page and no other, and one that there is."""

import pytest

from tests.helpers.decoder import make_engine
from vllm_moe_lightning.config import DebugOptions
from vllm_moe_lightning.pipeline.faults import zero_page


def test_the_named_page_is_zeroed_in_host_memory_and_no_other_byte_changes() -> None:
    with make_engine() as engine:
        streamed = engine.store.layers[1]
        before = streamed.host.tensor.clone()
        zero_page(DebugOptions(), engine.store)
        assert streamed.host.tensor.equal(before)
        zero_page(DebugOptions(zero_page=(1, 2)), engine.store)
        where = streamed.pages[2]
        before[where.offset_bytes : where.offset_bytes + where.num_bytes] = 0
        assert streamed.host.tensor.equal(before)
        # What `check` compares is what lies there.
        views, begin = engine.store.host_views(), streamed.host.tensor.data_ptr()
        for place in streamed.layout.places:
            view = views[id(streamed.source.parameters[place.name])]
            assert view.data_ptr() - begin == place.offset_bytes


@pytest.mark.parametrize("page", [(1, 99), (77, 0)])
def test_a_page_that_there_is_not_is_refused_with_those_that_there_are(page: tuple[int, int]) -> None:
    with (
        make_engine() as engine,
        pytest.raises(ValueError, match=rf"no page {page[1]} of decoder layer {page[0]}; the streamed layers have"),
    ):
        zero_page(DebugOptions(zero_page=page), engine.store)
