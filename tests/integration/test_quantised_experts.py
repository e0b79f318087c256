# SPDX-License-Identifier: Apache-2.0
"""Quantised experts on vLLM's own kernels, paged: stock vLLM's answers where it has a kernel, a refusal where not.

vLLM 0.32 offers these kernels on CPUs with AMX only, though they compute the same without it: tests/helpers/amx_gate.py
opens that gate for both engines. What a user sees on a machine without AMX is the refusal.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.helpers.amx_gate import OPEN, SHUT
from tests.helpers.engine import EngineFailedError, Job
from tests.helpers.gpt_oss_checkpoint import write_gpt_oss
from tests.helpers.paging import assert_micro_batches, assert_pages_are_exact, reconfigured, run_paged, run_stock
from tests.helpers.prompts import standard_prompts
from tests.helpers.quantised_checkpoints import (
    GROUP,
    HIDDEN,
    INTERMEDIATE,
    NUM_EXPERTS,
    write_quantised_checkpoint,
)
from tests.helpers.start_probes import findings, probe
from vllm_moe_lightning.model_config import spec_from_config
from vllm_moe_lightning.weight_quantisation import cpu_build_bytes, expert_format

pytestmark = pytest.mark.integration

# What is paged: the weights, and beside them what is at least a 64th of the layer. Of fp8 and int8 no scales, but a
# 32-bit sum for each row of int8; of int4 a float32 scale and a sum for each group, and the first matrix's zero points.
_IN_MATRICES = 3 * INTERMEDIATE * HIDDEN
_INT4_BYTES = NUM_EXPERTS * (_IN_MATRICES // 2 + _IN_MATRICES // GROUP * 8 + 2 * INTERMEDIATE * HIDDEN // GROUP)
EXPERT_BYTES = {
    "fp8_block": NUM_EXPERTS * _IN_MATRICES,
    "int8": NUM_EXPERTS * (_IN_MATRICES + (2 * INTERMEDIATE + HIDDEN) * 4),
    "int4": _INT4_BYTES,
    "gptq": _INT4_BYTES,
    "awq": _INT4_BYTES,
    # mxfp4: a scale byte for 32 weights; and float32 biases.
    "gpt_oss": NUM_EXPERTS * (_IN_MATRICES * 17 // 32 + (2 * INTERMEDIATE + HIDDEN) * 4),
}
SEEDS = {"fp8_block": 2}  # keeps its answers clear of near ties; the others are by the default
NEEDS = {
    "fp8_per_tensor": ("fp8 with a scale per tensor", "no kernel"),
    "fp8_per_channel": ("compressed-tensors fp8 with a scale per channel", "no kernel"),
    "fp8_block": ("fp8 in blocks of 128 x 128", "needs AMX"),
    "int8": ("compressed-tensors int8", "needs AMX"),
    "int4": ("compressed-tensors int4", "needs AMX"),
    "gptq": ("GPTQ int4", "needs AMX"),
    "awq": ("AWQ int4", "needs AMX"),
    "gpt_oss": ("mxfp4", "needs AMX"),
}
NUM_LAYERS, NUM_PROMPTS = 3, 6
SAMPLING = {"max_tokens": 8}
BFLOAT16 = {"dtype": "bfloat16"}
RACE_SWITCHES = {"poison": True, "check_hazards": True, "copy_timing": "lazy"}
# Attention on the CPU is our kernel and rounds otherwise than stock vLLM's: at most 0.10 seen in these answers.
LOGPROB_TOLERANCE = 0.2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folders = {}

    def get(form, **options):
        key = (form, *options)
        if key not in folders:
            seed = {"seed": SEEDS[form]} if form in SEEDS else {}
            folder, options = tmp_path_factory.mktemp(form), {"num_layers": NUM_LAYERS, **seed, **options}
            is_gpt_oss = form == "gpt_oss"
            folders[key] = (
                write_gpt_oss(folder, **options) if is_gpt_oss else write_quantised_checkpoint(folder, form, **options)
            )
        return folders[key]

    return get


@pytest.fixture(scope="module")
def stock(model):
    answers = {}

    def get(form, **options):
        key = (form, *options)
        if key not in answers:
            jobs = [Job(standard_prompts(NUM_PROMPTS), SAMPLING)]
            result = run_stock(model(form, **options), jobs, engine_args=BFLOAT16, open_gate=not options)
            answers[key] = result.jobs[0]
        return answers[key]

    return get


@pytest.fixture(scope="module")
def ours(model):
    """Of one engine per format: 1 and 3 micro-batches."""
    results = {}

    def get(form):
        if form not in results:
            prompts = standard_prompts(NUM_PROMPTS)
            jobs = [Job(prompts, SAMPLING, before=reconfigured(num_micro_batches=n)) for n in (1, 3)]
            results[form] = run_paged(model(form), jobs, debug=RACE_SWITCHES, engine_args=BFLOAT16, preload=[OPEN])
        return results[form]

    return get


@pytest.mark.parametrize("form", EXPERT_BYTES)
def test_with_stock_attention_the_answers_are_stock_vllm_s_bit_for_bit(form, model, stock):
    result = run_paged(
        model(form),
        [Job(standard_prompts(NUM_PROMPTS), SAMPLING)],
        options={"attention": "device", "num_resident_layers": 1},
        debug=RACE_SWITCHES,
        engine_args=BFLOAT16,
        preload=[OPEN],
    )
    (job,) = result.jobs
    assert (job.token_ids, job.logprobs) == (stock(form).token_ids, stock(form).logprobs)
    assert_pages_are_exact(job, model(form), resident=(1,), layer_bytes=[EXPERT_BYTES[form]] * NUM_LAYERS)


@pytest.mark.parametrize("form", EXPERT_BYTES)
def test_micro_batches_and_attention_on_the_cpu_give_stock_vllm_s_tokens(form, model, ours, stock):
    for job, count in zip(ours(form).jobs, (1, 3), strict=True):
        assert job.token_ids == stock(form).token_ids
        for mine, theirs in zip(job.logprobs, stock(form).logprobs, strict=True):
            assert mine == pytest.approx(theirs, abs=LOGPROB_TOLERANCE)
        assert_micro_batches(job, count, NUM_PROMPTS)
        assert_pages_are_exact(job, model(form), layer_bytes=[EXPERT_BYTES[form]] * NUM_LAYERS)


@pytest.mark.parametrize("form", EXPERT_BYTES)
def test_the_planner_counts_the_bytes_that_are_loaded(form, model):
    """The worker warns from 5 % on."""
    config = json.loads((model(form) / "config.json").read_text())
    spec = spec_from_config(config, form)
    width = cpu_build_bytes(expert_format(config)) or spec.widths.expert_bytes
    assert spec.routed_params_per_layer * width == pytest.approx(EXPERT_BYTES[form], rel=0.05)


@pytest.mark.parametrize("form", ["int4", "gpt_oss"])
def test_a_planned_engine_finds_the_experts_as_large_as_planned(form, model):
    """In 4 bits of the CPU build's own packing, and under the name that vLLM gives to gpt-oss's quantisation."""
    nothing_given = dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "block_size"))
    result = run_paged(
        model(form),
        [Job(standard_prompts(2), {"max_tokens": 2})],
        options={"planner": "auto", "hardware": "t4", "device_memory_mib": 5, "page_mib": None},
        engine_args={**BFLOAT16, **nothing_given},
        preload=[OPEN],
    )
    assert "moe_lightning: plan for" in result.log
    assert "the experts of a layer take" not in result.log


def test_three_ways_to_store_the_same_four_bits_answer_alike(stock):
    """The test checkpoints are what they are meant to be, down to zero points and the order of nibbles."""
    assert stock("int4").token_ids == stock("gptq").token_ids == stock("awq").token_ids
    assert stock("int4").token_ids != stock("int8").token_ids


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_quantised_projections_beside_plain_experts_need_nothing_special(form, model, stock):
    """What the CPU build runs on any machine: no gate is opened here."""
    prompts = standard_prompts(NUM_PROMPTS)
    result = run_paged(
        model(form, plain_experts=True),
        [Job(prompts, SAMPLING)],
        options={"attention": "device"},
        debug=RACE_SWITCHES,
        engine_args=BFLOAT16,
    )
    expected = stock(form, plain_experts=True)
    assert (result.jobs[0].token_ids, result.jobs[0].logprobs) == (expected.token_ids, expected.logprobs)
    assert_pages_are_exact(result.jobs[0], model(form, plain_experts=True))


def test_model_runner_v2_gives_the_same_tokens(model):
    prompts, sampling = standard_prompts(2, max_tokens=70), {"max_tokens": 3, "logprobs": None}
    stock = run_stock(model("int8"), [Job(prompts, sampling)], runner="v2", engine_args=BFLOAT16, open_gate=True)
    jobs = [Job(prompts, sampling, before=reconfigured(num_micro_batches=2))]
    result = run_paged(model("int8"), jobs, runner="v2", debug=RACE_SWITCHES, engine_args=BFLOAT16, preload=[OPEN])
    assert result.token_ids == stock.token_ids
    assert_pages_are_exact(result.jobs[0], model("int8"), layer_bytes=[EXPERT_BYTES["int8"]] * NUM_LAYERS)


def refusal(model, *, is_loaded: bool = False, **options) -> str:
    """The one line that says why; no page was made, and no weight was read unless `is_loaded`."""
    options["preload"] = [probe("report_host_allocations"), *options["preload"]]
    with pytest.raises(EngineFailedError) as failure:
        run_paged(model, [Job([])], **options)
    log = failure.value.log
    assert not findings(log, "ALLOCATION")
    assert ("Starting to load model" in log) == is_loaded
    (message,) = [line for line in log.splitlines() if "UnsupportedError: " in line]
    return message


@pytest.mark.parametrize("form", NEEDS)
def test_experts_without_a_kernel_here_are_refused_by_name_before_loading(form, model):
    """The gate is shut whatever machine this runs on."""
    name, reason = NEEDS[form]
    message = refusal(model(form), engine_args=BFLOAT16, preload=[SHUT])
    assert f"the experts of {model(form)} are {name};" in message
    assert reason in message
    assert "run it on a GPU" in message


def test_our_own_cpu_kernel_for_experts_refuses_quantised_ones_before_loading(model):
    message = refusal(model("int4"), engine_args=BFLOAT16, preload=[OPEN], options={"experts": "cpu"})
    assert "quantised experts with moe_lightning.experts 'cpu'" in message
    assert "drop those options" in message


def test_float32_is_refused_where_the_kernels_do_not_know_it(model):
    message = refusal(model("int8"), preload=[OPEN])
    assert "not in torch.float32: pass --dtype bfloat16" in message


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("keep_a_view", "w2_weight cannot be paged: .* keeps a view of it"),
        (
            "move_weights_away",
            r"experts cannot be paged: it was built with \d+ bytes, of which .* left \d+ in parameters",
        ),
    ],
)
def test_a_method_that_keeps_weights_where_paging_cannot_reach_them_is_refused_by_name(method, message, model):
    preload = [OPEN, f"tests.helpers.hiding_methods:{method}"]
    found = refusal(model("int8"), is_loaded=True, engine_args=BFLOAT16, preload=preload)
    assert re.search(message, found)
