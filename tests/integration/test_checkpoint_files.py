# SPDX-License-Identifier: Apache-2.0
"""Incomplete and damaged checkpoints through the real engine: refused by name before a page is made, or loaded fully.

The rules one by one, on files of a few bytes: tests/unit/test_checkpoint.py.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engine import EngineFailedError, Job, run_engine
from tests.helpers.oracle import assert_same_tokens
from tests.helpers.prompts import standard_prompts
from tests.helpers.start_probes import findings, probe

pytestmark = pytest.mark.integration

NUM_PROMPTS = 4
INDEX = "model.safetensors.index.json"
SHARD_SIZE = "200KB"
EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"


def run(model: Path, *, preload: str | None = None, plugin: bool = True):
    jobs = [Job(standard_prompts(NUM_PROMPTS))]
    return run_engine(model, jobs, plugin=plugin, preload=[probe(preload)] if preload else [])


def refusal(model: Path) -> str:
    """The last line of the engine's output. It ended by itself, before the model was built or a page allocated."""
    with pytest.raises(EngineFailedError) as failure:
        run(model, preload="report_host_allocations")
    assert failure.value.returncode == 1
    log = failure.value.log
    assert not findings(log, "ALLOCATION")
    assert "Starting to load model" not in log
    (message,) = [line for line in log.splitlines() if "CheckpointError: " in line]
    return message


def shards(model: Path) -> list[Path]:
    return sorted(model.glob("model-*.safetensors"))


def shard_of(model: Path, tensor: str) -> Path:
    return model / json.loads((model / INDEX).read_text())["weight_map"][tensor]


def rewrite(file: Path, change) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture
def sharded(tmp_path):
    return write_checkpoint(tmp_path, "qwen3_moe", max_shard_size=SHARD_SIZE)


@pytest.fixture
def whole(tmp_path):
    return write_checkpoint(tmp_path, "qwen3_moe")


@pytest.fixture(scope="module")
def expected(hf_result):
    return hf_result("qwen3_moe", num_prompts=NUM_PROMPTS)


def test_a_missing_shard_is_refused_by_name(sharded):
    """B07 a."""
    missing = shards(sharded)[1]
    missing.unlink()
    assert f"{missing} is missing, and {INDEX} names it" in refusal(sharded)


def test_a_missing_expert_tensor_is_refused_by_name(sharded):
    """B07 b. Stock vLLM serves this one."""
    rewrite(shard_of(sharded, EXPERT), lambda tensors: tensors.pop(EXPERT))
    assert f"lacks {EXPERT}" in refusal(sharded)


def test_a_missing_expert_tensor_is_refused_without_an_index_too(whole):
    """B07 b."""
    rewrite(whole / "model.safetensors", lambda tensors: tensors.pop(EXPERT))
    assert f"lacks {EXPERT}" in refusal(whole)


@pytest.mark.parametrize("name", ["self_attn.q_proj.weight", "mlp.gate.weight"])
def test_another_weight_that_stock_vllm_does_not_miss_is_refused_by_name(whole, name):
    """B07: the same kind beside the experts."""
    rewrite(whole / "model.safetensors", lambda tensors: tensors.pop(f"model.layers.2.{name}"))
    assert f"lacks model.layers.2.{name}" in refusal(whole)


def test_a_tensor_that_only_the_index_forgot_is_loaded(sharded, expected):
    """B07 c. As stock vLLM does."""
    index = json.loads((sharded / INDEX).read_text())
    del index["weight_map"][EXPERT]
    (sharded / INDEX).write_text(json.dumps(index))
    assert_same_tokens(run(sharded).token_ids, expected, "entry dropped from the index")


def test_a_stale_extra_shard_is_not_read(sharded, expected):
    """B07 d. As stock vLLM does."""
    rewrite_to = sharded / "model-00099-of-00099.safetensors"
    save_file({EXPERT: torch.full((128, 48), 7.0)}, rewrite_to, metadata={"format": "pt"})
    assert_same_tokens(run(sharded).token_ids, expected, "stale shard")
    assert_same_tokens(run(sharded, plugin=False).token_ids, expected, "stale shard, stock")


def test_a_stale_file_without_an_index_is_refused(whole):
    """B07 d. Which of two files counts would depend on their names."""
    stale = whole / "old.safetensors"
    save_file({EXPERT: torch.full((128, 48), 7.0)}, stale, metadata={"format": "pt"})
    message = refusal(whole)
    assert EXPERT in message
    assert str(stale) in message


def shorten(file: Path) -> str:
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1000])
    return f"{file} has {size - 1000} bytes and its tensors need {size}"


def cut_to_seven_bytes(file: Path) -> str:
    file.write_bytes(file.read_bytes()[:7])
    return f"{file} has 7 bytes and its header alone needs "


def claim_a_huge_header(file: Path) -> str:
    file.write_bytes(struct.pack("<Q", 2**40) + file.read_bytes()[8:])
    return f"{file} has {file.stat().st_size} bytes and its header alone needs {2**40 + 8}"


def make_a_directory(file: Path) -> str:
    file.unlink()
    file.mkdir()
    return f"{file} is a directory"


def append_junk(file: Path) -> str:
    size = file.stat().st_size
    file.write_bytes(file.read_bytes() + b"junk" * 4)
    return f"{file} has {size + 16} bytes and its tensors need {size}"


DAMAGES = [shorten, cut_to_seven_bytes, claim_a_huge_header, make_a_directory, append_junk]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_shard_is_refused_with_its_sizes(sharded, damage):
    """B08."""
    message = damage(shards(sharded)[1])
    assert message in refusal(sharded)


def test_a_directory_that_looks_like_a_file_is_refused_without_an_index_too(whole):
    """B08."""
    (whole / "x.safetensors").mkdir()
    assert f"{whole / 'x.safetensors'} is a directory" in refusal(whole)


def test_files_shortened_after_the_start_do_not_matter(whole, expected):
    """B08. Pages are memory, not mapped files."""
    result = run(whole, preload="shorten_files_after_start")
    assert findings(result.log, "SHORTENED") == ["model.safetensors"]
    assert_same_tokens(result.token_ids, expected, "file shortened after start")


@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen2_moe", "olmoe"])
def test_all_layouts_of_the_experts_hold_the_same_model(checkpoint, hf_result, arch):
    """B09. Bit for bit."""
    layouts = ("per_expert", "fused", "mixed")
    results = {layout: run(checkpoint(arch, experts_layout=layout)).jobs[0] for layout in layouts}
    assert_same_tokens(results["per_expert"].token_ids, hf_result(arch, num_prompts=NUM_PROMPTS), arch)
    for layout in layouts[1:]:
        assert results[layout].token_ids == results["per_expert"].token_ids, layout
        assert results[layout].logprobs == results["per_expert"].logprobs, layout


def test_gate_and_up_exchanged_give_another_answer(checkpoint, expected):
    """B09, the negative control."""
    swapped = run(checkpoint("qwen3_moe", experts_layout="fused_swapped"))
    assert swapped.token_ids != expected.token_ids


@pytest.mark.parametrize("name", ["3.extra_proj.weight", "16.down_proj.weight", "gate_proj"])
def test_an_unknown_expert_name_is_an_error(whole, name):
    """B09. Stock vLLM skips it; the last is gate and up as two 3-D tensors."""
    full = f"model.layers.1.mlp.experts.{name}"
    rewrite(whole / "model.safetensors", lambda tensors: tensors.update({full: torch.zeros(128, 48)}))
    assert f"experts that this model's loader does not know: {full}" in refusal(whole)


def test_mixtral_experts_in_3d_tensors_are_refused_by_name(tmp_path, hf_result):
    """B09. Stock vLLM takes them and answers something else."""
    model = write_checkpoint(tmp_path, "mixtral", experts_layout="fused")
    stock = run(model, plugin=False)
    assert stock.token_ids != hf_result("mixtral", num_prompts=NUM_PROMPTS).token_ids, "stock loads them now: so can we"
    assert "block_sparse_moe.experts.gate_up_proj" in refusal(model)


def test_tied_embeddings_without_a_head_load_and_count_once(checkpoint, hf_result):
    """B12."""
    options = {"tie_word_embeddings": True}
    tied, untied = run(checkpoint("qwen3_moe", **options)), run(checkpoint("qwen3_moe"))
    assert_same_tokens(tied.token_ids, hf_result("qwen3_moe", num_prompts=NUM_PROMPTS, **options), "tied")
    used = [result.jobs[0].stats[0]["device_memory_used_bytes"] for result in (tied, untied)]
    config = json.loads((checkpoint("qwen3_moe") / "config.json").read_text())
    # vLLM rounds the vocabulary up to a multiple of 64.
    head_bytes = -(-config["vocab_size"] // 64) * 64 * config["hidden_size"] * 4
    assert used[1] - used[0] == head_bytes


def test_a_head_beside_tied_embeddings_counts_as_in_stock_vllm(checkpoint, hf_result, stock_result):
    """B12. The report says that the tie wins; in vLLM 0.32 and in transformers the head in the file does."""
    options = {"tie_word_embeddings": True, "write_lm_head": True}
    answer = run(checkpoint("qwen3_moe", **options)).token_ids
    assert answer == stock_result("qwen3_moe", num_prompts=NUM_PROMPTS, **options).token_ids
    oracle = hf_result("qwen3_moe", num_prompts=NUM_PROMPTS, **options)
    assert_same_tokens(answer, oracle, "head beside tied embeddings")


def test_a_missing_head_is_refused_by_name(checkpoint):
    """B12. Stock vLLM answers with whatever the allocator handed out."""
    assert "lacks lm_head.weight" in refusal(checkpoint("qwen3_moe", write_lm_head=False))
