# SPDX-License-Identifier: Apache-2.0
"""B16: sliding windows and attention sinks against transformers, at lengths where they matter and where they do not."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.checkpoints import EOS_TOKEN_ID, VOCAB_SIZE, write_tokenizer
from tests.helpers.engine import Job
from tests.helpers.oracle import assert_same_tokens, greedy
from tests.helpers.paging import assert_pages_are_exact, reconfigured, run_paged
from vllm_moe_lightning.kernels.attention import AttentionTask, available_isas

pytestmark = pytest.mark.integration

WINDOW = 32
LENGTHS = (20, 32, 33, 120)
NUM_STEPS = 60
SINKS = (0.0, 5.0)


def prompts(seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(256) for _ in range(length)] for length in LENGTHS]


def jobs() -> list[Job]:
    """Whole prompts in one micro-batch, then in three."""
    return [Job(prompts(), {"max_tokens": NUM_STEPS}, before=reconfigured(num_micro_batches=n)) for n in (1, 3)]


def test_a_window_is_kept_at_every_length(checkpoint):
    model = checkpoint("mixtral", sliding_window=WINDOW)
    oracle = greedy(model, prompts(), max_tokens=NUM_STEPS)
    without = greedy(checkpoint("mixtral"), prompts(), max_tokens=NUM_STEPS)
    assert all(a != b for a, b in zip(oracle.token_ids, without.token_ids, strict=True)), "the window never engaged"
    result = run_paged(model, jobs())
    for job in result.jobs:
        assert_same_tokens(job.token_ids, oracle, "window of 32")
        assert_pages_are_exact(job, model)


def test_a_window_is_kept_when_prompts_come_in_chunks(checkpoint):
    model = checkpoint("mixtral", sliding_window=WINDOW)
    oracle = greedy(model, prompts(), max_tokens=NUM_STEPS)
    result = run_paged(model, jobs(), engine_args={"max_num_batched_tokens": 24, "max_num_seqs": 8})
    for job in result.jobs:
        assert_same_tokens(job.token_ids, oracle, "window of 32, chunks of 24")


@pytest.fixture(scope="session")
def gpt_oss(tmp_path_factory):
    """`gpt_oss(sink)`: a small GPT-OSS in which every second layer has a window and all sinks have this logit."""
    from transformers import GptOssConfig, GptOssForCausalLM

    folders = {}

    def get(sink: float):
        if sink in folders:
            return folders[sink]
        config = GptOssConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=64,
            num_local_experts=8,
            num_experts_per_tok=4,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
            max_position_embeddings=512,
            initializer_range=0.2,
            tie_word_embeddings=False,
            bos_token_id=256,
            eos_token_id=EOS_TOKEN_ID,
            pad_token_id=None,
        )
        torch.manual_seed(1)
        model = GptOssForCausalLM(config).to(torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("sinks"):
                    parameter.fill_(sink)
                elif name.endswith("bias"):
                    parameter.normal_(std=0.2)
        folders[sink] = tmp_path_factory.mktemp("gpt_oss")
        model.save_pretrained(folders[sink])
        write_tokenizer(folders[sink])
        return folders[sink]

    return get


@pytest.mark.parametrize("sink", SINKS)
def test_sinks_and_windows_of_gpt_oss_are_kept_at_every_length(gpt_oss, sink):
    model = gpt_oss(sink)
    oracle = greedy(model, prompts(), max_tokens=NUM_STEPS)
    result = run_paged(model, jobs())
    for job in result.jobs:
        assert_same_tokens(job.token_ids, oracle, f"sinks of {sink}")
        assert job.stats[0]["pages_moved"] > 0


def test_sinks_change_what_gpt_oss_answers(gpt_oss):
    """Else the test above could not tell."""
    answers = [greedy(gpt_oss(sink), prompts(), max_tokens=8).token_ids for sink in SINKS]
    assert all(a != b for a, b in zip(*answers, strict=True))


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("sink", SINKS)
def test_the_kernel_s_sinks_are_those_of_transformers(sink, isa):
    """One sequence of 120 tokens, the last of them a query: a softmax with one more column, whose value is nothing."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    num_heads, num_kv_heads, head_dim, block_size, length = 8, 2, 64, 16, 120
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, num_heads, head_dim, generator=generator)
    key, value = torch.randn(2, length, num_kv_heads, head_dim, generator=generator)
    sinks = torch.full((num_heads,), sink)
    for window in (0, WINDOW):
        mask = torch.zeros(1, 1, 1, length)
        if window:
            mask[..., : length - window] = float("-inf")
        module = SimpleNamespace(num_key_value_groups=num_heads // num_kv_heads, sinks=sinks, training=False)
        expected, _ = eager_attention_forward(
            module,
            query.transpose(0, 1)[None],  # [1, heads, 1, head_dim]
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            mask,
            scaling=head_dim**-0.5,
        )
        num_blocks = -(-length // block_size)
        cache = torch.zeros(num_blocks, num_kv_heads, 2, block_size, head_dim)
        for position in range(length):
            block, slot = divmod(position, block_size)
            cache[block, :, 0, slot], cache[block, :, 1, slot] = key[position], value[position]
        output = torch.empty_like(query)
        AttentionTask(
            cache,
            query=query,
            output=output,
            block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=torch.tensor([length], dtype=torch.int32),
            scale=head_dim**-0.5,
            sliding_window=window,
            sinks=sinks,
            isa=isa,
        ).run()
        torch.testing.assert_close(output, expected[0], rtol=1e-5, atol=2e-5)
