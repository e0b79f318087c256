"""Model sizes from config.json against the published ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.model_config import read_model_spec, spec_from_config
from vllm_moe_lightning.model_spec import MoeModelSpec

NO_DEADLINE = settings(deadline=None)  # of a busy machine
CONFIGS = Path(__file__).parent / "model_configs"

# Total parameters in billions; GB of routed experts per layer; GB of projections per layer; KV bytes per token.
PUBLISHED = {
    "mixtral-8x7b": (46.7, 2.819, 0.0839, 131072),
    "mixtral-8x22b": (140.6, 4.832, 0.1762, 229376),
    "dbrx": (131.6, 6.342, 0.1762, 163840),
    "qwen3-30b-a3b": (30.5, 1.208, 0.0377, 98304),
    "qwen3-235b-a22b": (235.0, 4.832, 0.1426, 192512),
    "gpt-oss-120b": (116.8, 1.692, 0.0531, 73728),
    "gpt-oss-20b": (20.9, 0.423, 0.0531, 49152),
    "glm-4.5": (352.7, 7.550, 0.2726, 376832),
    "glm-4.5-air": (106.8, 4.429, 0.2181, 188416),
    "phi-3.5-moe": (41.9, 2.517, 0.0839, 131072),
    "olmoe-1b-7b": (6.9, 0.805, 0.0336, 131072),
    "llama-4-scout": (107.8, 4.027, 0.1258, 196608),
    "deepseek-v3": (671.0, 11.27, None, 61 * 1152),
    "qwen1.5-moe-a2.7b": (14.3, None, None, 196608),
}
# Parameters that one token uses, in billions, as the makers state them.
ACTIVE = {
    "mixtral-8x7b": 12.9,
    "dbrx": 36,
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22,
    "qwen1.5-moe-a2.7b": 2.7,
    "olmoe-1b-7b": 1.3,
    "llama-4-scout": 17,
    "deepseek-v3": 37,
    "phi-3.5-moe": 6.6,
}


def spec(name: str) -> MoeModelSpec:
    return read_model_spec(CONFIGS / f"{name}.json")


def raw(name: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return parsed


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_configuration_as_transformers_hands_it_on_gives_the_same_sizes(name: str, tmp_path: Path) -> None:
    """An engine plans with that one, and keys have other names in it (Qwen3-MoE: num_local_experts)."""
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text((CONFIGS / f"{name}.json").read_text())
    handed_on = AutoConfig.from_pretrained(tmp_path, local_files_only=True).to_dict()
    dtype = raw(name).get("dtype") or raw(name).get("torch_dtype") or "bfloat16"
    assert spec_from_config({**handed_on, "dtype": dtype}, name) == spec(name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones_within_one_percent(name: str) -> None:
    total, expert_gb, projection_gb, kv_bytes = PUBLISHED[name]
    found = spec(name)
    assert found.total_params / 1e9 == pytest.approx(total, rel=0.01)
    assert found.kv_bytes_per_token == kv_bytes
    if expert_gb is not None:
        assert found.expert_layer_bytes / 1e9 == pytest.approx(expert_gb, rel=0.002)
    if projection_gb is not None:
        assert found.attention.params * 2 / 1e9 == pytest.approx(projection_gb, rel=0.002)


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_the_published_ones_within_three_percent(name: str) -> None:
    assert spec(name).active_params / 1e9 == pytest.approx(ACTIVE[name], rel=0.03)


def test_every_fixture_is_checked() -> None:
    assert {file.stem for file in CONFIGS.glob("*.json")} == set(PUBLISHED)


def test_heads_need_not_make_up_the_hidden_size() -> None:
    attention = spec("qwen3-30b-a3b").attention
    assert attention.q_elements_per_token == 4096
    assert spec("qwen3-30b-a3b").hidden == 2048
    assert attention.post_params == 4096 * 2048


def test_latent_attention_is_counted_in_both_of_its_forms() -> None:
    attention = spec("deepseek-v3").attention
    assert attention.is_latent
    assert attention.kv_elements_per_token == 576
    # Published: 187.1 M per layer.
    assert attention.params == pytest.approx(187.1e6, rel=0.001)
    assert attention.decode_flops_per_pair == 2 * 128 * (576 + 512)
    assert attention.prefill_flops_per_pair == 2 * 128 * (192 + 128)


def test_dense_and_shared_parts_are_counted() -> None:
    found = spec("deepseek-v3")
    assert (found.num_dense_layers, found.num_moe_layers, found.shared_intermediate) == (3, 58, 2048)
    assert spec("qwen1.5-moe-a2.7b").shared_intermediate == 5632


def test_widths_follow_the_quantisation_and_count_scales() -> None:
    assert spec("gpt-oss-120b").widths.expert_bytes == 4.25 / 8
    assert spec("gpt-oss-120b").widths.linear_bytes == 2
    assert spec("deepseek-v3").widths.expert_bytes == pytest.approx(1 + 4 / 128**2)
    awq = raw("mixtral-8x7b") | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    assert spec_from_config(awq, "m").widths.expert_bytes == pytest.approx((4 + 20 / 128) / 8)
    assert spec_from_config(awq, "m").widths.other_bytes == 2


def test_the_name_that_vllm_gives_to_mxfp4_is_known_too() -> None:
    renamed = {**raw("gpt-oss-120b")["quantization_config"], "quant_method": "gpt_oss_mxfp4"}
    config = raw("gpt-oss-120b") | {"quantization_config": renamed}
    assert spec_from_config(config, "m").widths == spec("gpt-oss-120b").widths


def test_parts_that_a_quantisation_leaves_out_are_as_wide_as_the_model() -> None:
    method = {"quant_method": "awq", "bits": 4, "group_size": 128}
    for entry, plain, quantised in (
        ("self_attn", "linear_bytes", "expert_bytes"),
        ("experts", "expert_bytes", "linear_bytes"),
    ):
        config = raw("mixtral-8x7b") | {"quantization_config": method | {"modules_to_not_convert": [entry]}}
        widths = spec_from_config(config, "m").widths
        assert getattr(widths, plain) == 2
        assert getattr(widths, quantised) < 1


def test_an_unknown_quantisation_or_family_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="spqr"):
        spec_from_config(raw("mixtral-8x7b") | {"quantization_config": {"quant_method": "spqr"}}, "m")
    with pytest.raises(UnsupportedError, match="llama'"):
        spec_from_config({"model_type": "llama"}, "m")


@pytest.mark.parametrize(
    "key", ["num_key_value_heads", "num_local_experts", "hidden_size", "vocab_size", "num_hidden_layers"]
)
def test_a_missing_figure_is_refused_by_name(key: str) -> None:
    config = raw("mixtral-8x7b")
    del config[key]
    with pytest.raises(ValueError, match=key):
        spec_from_config(config, "m")


@pytest.mark.parametrize("value", [0, -1, "8", 2.5, True])
def test_a_figure_that_is_no_count_is_refused_by_name(value: object) -> None:
    with pytest.raises(ValueError, match="num_attention_heads"):
        spec_from_config(raw("mixtral-8x7b") | {"num_attention_heads": value}, "m")


def test_a_folder_with_only_a_config_is_enough(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text((CONFIGS / "dbrx.json").read_text())
    assert read_model_spec(folder).name == "my-model"
    with pytest.raises(ValueError, match=r"no config\.json"):
        read_model_spec(tmp_path)


@NO_DEADLINE
@given(st.sampled_from(sorted(PUBLISHED)), st.floats(1, 1e4), st.floats(1, 1e4))
def test_more_tokens_touch_more_experts_but_never_more_than_there_are(name: str, few: float, more: float) -> None:
    found = spec(name)
    low, high = sorted((found.expected_experts_touched(few), found.expected_experts_touched(few + more)))
    assert found.top_k * (1 - 1e-9) <= low <= high <= found.num_experts
    assert found.expected_experts_touched(few) == low


def test_one_token_touches_exactly_top_k() -> None:
    assert spec("dbrx").expected_experts_touched(1) == pytest.approx(4)
    assert spec("dbrx").expected_experts_touched(0) == 0


def test_prefill_attention_counts_half_of_the_square() -> None:
    assert spec("mixtral-8x7b").mean_causal_pairs(100) == 5050
    # Half of the layers look back 128 tokens: 128 * 129 / 2 + 872 * 128 there.
    assert spec("gpt-oss-20b").mean_causal_pairs(1000) == (500500 + 8256 + 872 * 128) / 2


@NO_DEADLINE
@given(st.floats(1, 1e5))
def test_a_window_caps_what_decode_reads(context: float) -> None:
    read = spec("gpt-oss-120b").mean_context_read(context)
    assert math.isclose(read, (min(context, 128) + context) / 2)


def test_an_eight_bit_cache_costs_its_scales_too() -> None:
    mixtral = spec("mixtral-8x7b")
    for name in ("int8_per_token_head", "fp8_per_token_head"):
        found = mixtral.with_kv_cache_dtype(name)
        assert found.kv_bytes_per_token == 32 * 2 * 8 * (128 + 4)  # layers, K and V, heads, elements and a scale
    assert mixtral.with_kv_cache_dtype("auto") is mixtral
    assert mixtral.with_kv_cache_dtype("bfloat16") is mixtral
    with pytest.raises(UnsupportedError, match="deepseek-v3: --kv-cache-dtype int8_per_token_head"):
        spec("deepseek-v3").with_kv_cache_dtype("int8_per_token_head")
