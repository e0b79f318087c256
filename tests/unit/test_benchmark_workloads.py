"""Prompts of benchmarks/throughput.py: exactly the paper's lengths, other text in each round, padding counted apart."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from benchmarks.workloads import (
    PADDING_ID,
    WORKLOADS,
    PaperWorkload,
    encoded_passages,
    make_prompts,
    prompt_lengths,
    text_passages,
)

EVERY = pytest.mark.parametrize("workload", WORKLOADS.values(), ids=lambda workload: workload.name)
REQUESTS = 24


@pytest.fixture(scope="module")
def passages() -> list[list[int]]:
    return encoded_passages()


def test_the_workloads_are_the_papers() -> None:
    lengths = {name: (work.prompt_mean, work.prompt_max, work.gen_len) for name, work in WORKLOADS.items()}
    assert lengths == {
        **{f"mtbench-{gen}": (77, 418, gen) for gen in (32, 64, 128, 256)},
        "synthetic-reasoning": (242, 256, 50),
        "summarisation": (1693, 1984, 64),
    }


@EVERY
@pytest.mark.parametrize("num_requests", [10, 24, 80, 301])
def test_lengths_have_exactly_the_mean_and_the_longest(workload: PaperWorkload, num_requests: int) -> None:
    lengths = prompt_lengths(workload, num_requests, seed=3)
    assert len(lengths) == num_requests
    assert sum(lengths) == num_requests * workload.prompt_mean
    assert max(lengths) == workload.prompt_max
    assert min(lengths) >= workload.prompt_min


def test_too_few_requests_for_the_mean_are_refused() -> None:
    with pytest.raises(ValueError, match="take more requests"):
        prompt_lengths(WORKLOADS["mtbench-32"], 4, seed=0)


def test_rounds_have_the_same_lengths_in_another_order_and_other_text(passages: list[list[int]]) -> None:
    work = WORKLOADS["mtbench-32"]
    first, second = (make_prompts(work, REQUESTS, passages, seed) for seed in (0, 1))
    assert sorted(map(len, first.token_ids)) == sorted(map(len, second.token_ids))
    assert not set(first.token_ids) & set(second.token_ids)
    assert len(set(first.token_ids)) == REQUESTS
    assert make_prompts(work, REQUESTS, passages, 0) == first


@EVERY
def test_text_and_padding_are_counted_apart(workload: PaperWorkload, passages: list[list[int]]) -> None:
    plain = make_prompts(workload, REQUESTS, passages, seed=0)
    padded = make_prompts(workload, REQUESTS, passages, seed=0, padded=True)
    assert (plain.text_tokens, plain.padding_tokens) == (REQUESTS * workload.prompt_mean, 0)
    assert padded.text_tokens == plain.text_tokens
    assert padded.padding_tokens == REQUESTS * (workload.prompt_max - workload.prompt_mean)
    assert {len(prompt) for prompt in padded.token_ids} == {workload.prompt_max}
    for whole, text in zip(padded.token_ids, plain.token_ids, strict=True):
        assert whole[-len(text) :] == text
        assert set(whole[: -len(text)]) <= {PADDING_ID}


def test_the_text_is_the_examples_prompts(passages: list[list[int]]) -> None:
    assert len(passages) == len(text_passages()) == 80
    assert PADDING_ID not in {token for passage in passages for token in passage}
