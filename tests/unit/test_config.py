# SPDX-License-Identifier: Apache-2.0
"""Options are strict: what is refused says the key, the value and the cure."""

from typing import Any

import msgspec
import pytest

from vllm_moe_lightning.config import DebugOptions, MoeLightningConfig, parse_options


@pytest.mark.parametrize("raw", [None, {}])
def test_nothing_given_means_the_defaults(raw: object) -> None:
    assert parse_options(raw) == MoeLightningConfig()


def test_the_policy_is_left_to_the_planner() -> None:
    config = MoeLightningConfig()
    assert (config.planner, config.num_resident_layers, config.num_micro_batches) == ("auto", None, None)


def test_the_defaults_spelt_out_are_accepted() -> None:
    assert parse_options(msgspec.to_builtins(MoeLightningConfig())) == MoeLightningConfig()


def test_given_values_arrive() -> None:
    config = parse_options({"num_micro_batches": 7, "page_mib": 2, "debug": {"copy_timing": "lazy", "seed": 3}})
    assert (config.num_micro_batches, config.page_mib) == (7, 2)
    assert config.debug == DebugOptions(copy_timing="lazy", seed=3)


def test_a_config_cannot_be_edited() -> None:
    with pytest.raises(AttributeError):
        MoeLightningConfig().lookahead = 3  # type: ignore[misc]


@pytest.mark.parametrize("raw", [[], "cgopipe", 4, True])
def test_options_that_are_no_object_are_refused(raw: object) -> None:
    with pytest.raises(ValueError, match="options must be a JSON object") as error:
        parse_options(raw)
    assert repr(raw) in str(error.value)


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="README") as error:
        parse_options({"num_microbatches": 4})
    assert "num_microbatches" in str(error.value)
    assert "'num_micro_batches'" in str(error.value)


def test_an_unknown_debug_option_is_refused_with_its_place() -> None:
    with pytest.raises(ValueError, match=r"moe_lightning\.debug: unknown option\(s\) \['poisson'\]"):
        parse_options({"debug": {"poisson": True}})


@pytest.mark.parametrize(
    ("raw", "key", "value"),
    [
        ({"num_micro_batches": "4"}, "num_micro_batches", "'4'"),
        ({"num_micro_batches": 4.0}, "num_micro_batches", "4.0"),
        ({"num_micro_batches": True}, "num_micro_batches", "True"),
        ({"num_micro_batches": 0}, "num_micro_batches", "0"),
        ({"num_micro_batches": 65}, "num_micro_batches", "65"),
        ({"num_resident_layers": -1}, "num_resident_layers", "-1"),
        ({"lookahead": 0}, "lookahead", "0"),
        ({"schedule": "s5"}, "schedule", "'s5'"),
        ({"page_mib": 0}, "page_mib", "0"),
        ({"device": "gpu"}, "device", "'gpu'"),
        ({"h2d_gb_per_s": -1.5}, "h2d_gb_per_s", "-1.5"),
        ({"trace_file": 3}, "trace_file", "3"),
        ({"debug": {"copy_timing": "slow"}}, "debug.copy_timing", "'slow'"),
        ({"debug": {"fail_attention_at": 0}}, "debug.fail_attention_at", "0"),
        ({"debug": {"attention_fault": "hang"}}, "debug", "{'attention_fault': 'hang'}"),
        ({"stall_timeout_s": 0}, "stall_timeout_s", "0"),
        ({"debug": {"poison": 1}}, "debug.poison", "1"),
        ({"debug": 1}, "debug", "1"),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_cure(raw: dict[str, Any], key: str, value: str) -> None:
    with pytest.raises(ValueError, match="README") as error:
        parse_options(raw)
    assert f"moe_lightning.{key}: " in str(error.value)
    assert f"got {value};" in str(error.value)


@pytest.mark.parametrize(
    "options",
    [{"hardware": "t4"}, {"expected_prompt_tokens": 77}, {"expected_generation_tokens": 9}, {"kv_cache_gib": 1}],
)
def test_without_the_planner_what_only_it_reads_is_refused(options: dict[str, Any]) -> None:
    parse_options(options)
    with pytest.raises(ValueError, match=f"nobody reads .*{next(iter(options))}"):
        parse_options({"planner": "off", **options})


@pytest.mark.parametrize("option", ["expert_slots", "fetched_up_to_tokens"])
@pytest.mark.parametrize("place", ["device", "cpu", "auto"])
def test_an_option_of_fetched_experts_is_refused_with_other_places(option: str, place: str) -> None:
    with pytest.raises(ValueError, match=rf"with experts '{place}' nobody reads \['{option}'\]; drop them, or set"):
        parse_options({"experts": place, option: 4})


def test_options_of_fetched_experts_arrive() -> None:
    config = parse_options({"experts": "fetched", "expert_slots": 12, "fetched_up_to_tokens": 0})
    assert (config.expert_slots, config.fetched_up_to_tokens) == (12, 0)
    with pytest.raises(ValueError, match="expert_slots"):
        parse_options({"experts": "fetched", "expert_slots": 0})


@pytest.mark.parametrize("place", ["cpu", "link"])
def test_a_place_of_context_is_refused_where_all_of_it_is_on_the_device(place: str) -> None:
    with pytest.raises(ValueError, match=rf"prefill_context: '{place}' with attention 'device'"):
        parse_options({"attention": "device", "prefill_context": place})
