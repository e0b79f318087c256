# SPDX-License-Identifier: Apache-2.0
"""Which kernels attend to prompts on a GPU, by its chip, the model's type and what vLLM's build brings."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.helpers.varlen_attention import VarlenAttention

pytestmark = pytest.mark.integration
TURING, AMPERE, HOPPER, BLACKWELL = (7, 5), (8, 0), (9, 0), (10, 0)


def layers(window: int = 0):
    from vllm_moe_lightning.pipeline.attention import AttentionOptions

    options = AttentionOptions(0.2, sliding_window=window)
    impl = SimpleNamespace(num_heads=4, num_kv_heads=2, head_size=32, options=options, sliding_window=window or None)
    return [SimpleNamespace(impl=impl, layer_name="model.layers.0.self_attn.attn")]


@pytest.mark.parametrize(
    ("capability", "dtype", "varlen", "is_there", "expected"),
    [
        (TURING, torch.float16, VarlenAttention(), True, "needs compute capability 8.0, this GPU has 7.5"),
        (AMPERE, torch.float32, VarlenAttention(), True, "16-bit elements, not torch.float32"),
        (AMPERE, torch.float16, VarlenAttention(), False, "no FlashAttention 2 for this GPU"),
        (AMPERE, torch.float16, VarlenAttention(is_causal=False), True, "FlashAttention 2 is not used, since"),
        (AMPERE, torch.float16, VarlenAttention(refuses=True), True, "this head size is not supported"),
        (AMPERE, torch.bfloat16, VarlenAttention(), True, None),
        (HOPPER, torch.bfloat16, VarlenAttention(), True, None),
        (BLACKWELL, torch.bfloat16, VarlenAttention(), True, None),
    ],
)
def test_flash_attention_is_used_where_it_is_there_and_right(
    capability, dtype, varlen, is_there, expected, monkeypatch
):
    from vllm.v1.attention.backends import fa_utils

    from vllm_moe_lightning.config import parse_options
    from vllm_moe_lightning.integration import prefill_place
    from vllm_moe_lightning.integration.flash_attention import FlashPrefill
    from vllm_moe_lightning.pipeline.device_prefill import TorchPrefill

    messages = []
    logger = SimpleNamespace(info=lambda *args: messages.append(args[0] % args[1:]))
    logger.warning = logger.info
    monkeypatch.setattr(prefill_place, "logger", logger)
    monkeypatch.setattr(prefill_place, "is_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", varlen, raising=False)
    monkeypatch.setattr(fa_utils, "is_fa_version_supported", lambda version: is_there and version == 2)
    device = SimpleNamespace(torch_device=torch.device("cpu"), to_device=torch.clone, kind="cuda")
    config = SimpleNamespace(
        additional_config={},
        model_config=SimpleNamespace(dtype=dtype),
        cache_config=SimpleNamespace(block_size=16),
    )
    kernel = prefill_place.prefill_kernel(parse_options({}), device, layers(), config)
    (message,) = messages
    if expected is None:
        assert isinstance(kernel, FlashPrefill)
        assert message.endswith("FlashAttention 2")
    else:
        assert isinstance(kernel, TorchPrefill)
        assert expected in message
    messages.clear()
    of_no_use = parse_options({"prefill_attention": "cpu", "prefill_context": "cpu"})
    assert isinstance(prefill_place.prefill_kernel(of_no_use, device, layers(), config), TorchPrefill)
    assert not messages


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize(("longest", "num_tokens"), [(4000, 4096), (2_000_000, 1 << 20)])
def test_a_frame_holds_the_longest_sequence_as_far_as_it_may(longest, num_tokens, block_size, monkeypatch):
    """256 bytes of keys and values per token, so that a frame holds 1M tokens at most; in whole blocks of the size that
    vLLM has now, and of the one that it comes to after the model was loaded."""
    from vllm_moe_lightning.attention_memory import CONTEXT_FRAME_BYTES
    from vllm_moe_lightning.config import parse_options
    from vllm_moe_lightning.integration import prefill_place

    messages = []
    monkeypatch.setattr(prefill_place, "logger", SimpleNamespace(warning=lambda *args: messages.append(args)))
    found = layers()
    found[0].impl.cache_kind = None
    config = SimpleNamespace(
        additional_config={},
        model_config=SimpleNamespace(dtype=torch.float16, max_model_len=longest),
        cache_config=SimpleNamespace(block_size=block_size),
    )
    limits = prefill_place.context_limits_of(parse_options({"prefill_context": "link"}), "cuda", found, config)
    assert limits.num_tokens == min(num_tokens, CONTEXT_FRAME_BYTES // 256)
    assert bool(messages) == (longest > limits.num_tokens)
