# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with the flag, asked by the official client: answers, streams, and what clients do wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.server import Server, serving

pytestmark = pytest.mark.integration
MODEL = "shakespeare"
PROMPT = "ROMEO:\nO, she doth"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log_file = tmp_path_factory.mktemp("serve") / "serve.log"
    # A machine to plan for that is not measured; in float32 the weights are twice those of the example.
    machine = {"device_memory_mib": 12, "num_resident_layers": 0, "hardware": "t4"}
    options = {"moe_lightning": {**machine, "metrics_window_s": 1.0}}
    arguments = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "16"]
    with serving(log_file, *arguments, "--additional-config", json.dumps(options)) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url + "/v1", api_key="none", max_retries=0)


def complete(client: openai.OpenAI, prompt: object = PROMPT, **options: object) -> openai.types.Completion:
    options = {"max_tokens": 16, "temperature": 0.0, **options}
    return client.completions.create(model=MODEL, prompt=prompt, **options)  # type: ignore[call-overload,no-any-return]


def status_of(client: openai.OpenAI, prompt: object) -> int:
    try:
        complete(client, prompt)
    except openai.APIStatusError as error:
        return error.status_code
    return 200


def wait_until_idle(server: Server, timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if server.gauge("vllm:num_requests_running") == 0 and server.gauge("vllm:kv_cache_usage_perc") == 0:
            return
        time.sleep(0.2)
    raise AssertionError("requests are still running, or hold KV blocks")


def test_completions_stream_the_text_that_they_return_whole(client: openai.OpenAI) -> None:
    whole = complete(client)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 16
    streamed = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, temperature=0.0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text


def test_chat_streams_the_text_that_it_returns_whole(client: openai.OpenAI) -> None:
    ask = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What news from Verona?"}],
        "max_tokens": 16,
        "temperature": 0.0,
    }
    whole = client.chat.completions.create(**ask)  # type: ignore[call-overload]
    assert whole.choices[0].message.content
    streamed = client.chat.completions.create(**ask, stream=True)  # type: ignore[call-overload]
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == whole.choices[0].message.content


def test_the_log_says_that_the_experts_are_paged(server: Server, client: openai.OpenAI) -> None:
    complete(client)
    log = server.log_file.read_text(errors="replace")
    assert "8 layers streamed" in log
    assert "device: emulated" in log


def metrics_of(server: Server) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """Our samples by name and by labels, those aside that vLLM's own metrics have."""
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in text_string_to_metric_families(server.get("/metrics")[1]):
        for sample in family.samples if family.name.startswith("moe_lightning:") else ():
            assert (sample.labels.pop("model_name"), sample.labels.pop("engine")) == (MODEL, "0")
            found.setdefault(sample.name.removeprefix("moe_lightning:"), {})[frozenset(sample.labels.items())] = (
                sample.value
            )
    return found


def total(metrics: dict[str, dict[frozenset[tuple[str, str]], float]], name: str) -> float:
    return sum(metrics[name].values())


def test_metrics_show_what_was_paged_and_gauges_go_back_to_zero(server: Server, client: openai.OpenAI) -> None:
    """B36: idle, busy, idle. Beside vLLM's own metrics, in the same answer."""
    before = metrics_of(server)
    generated = 8 * 32
    complete(client, [PROMPT] * 8, max_tokens=32, extra_body={"ignore_eos": True})
    busy = metrics_of(server)
    sweeps = total(busy, "sweeps_total") - total(before, "sweeps_total")
    assert sweeps >= 32
    assert total(busy, "generated_tokens_total") - total(before, "generated_tokens_total") == generated
    pages = total(busy, "pages_moved_total")
    # Eight layers of two pages each sweep, and the first layer's once more for each refill.
    assert pages == 16 * total(busy, "sweeps_total") + 2 * total(busy, "refills_total")
    host_bytes = busy["expert_bytes"][frozenset({("place", "host"), ("rank", "0")})]
    assert total(busy, "bytes_paged_total") == pages / 16 * host_bytes
    assert total(busy, "requests_admitted_total") - total(before, "requests_admitted_total") == 8
    assert total(busy, "preemptions_total") == total(busy, "requests_kept_waiting_for_kv_total") == 0
    decoded = [found["scheduled_tokens_total"][frozenset({("kind", "decode")})] for found in (before, busy)]
    assert decoded[1] - decoded[0] == generated - 8  # a prompt's last sweep makes the first token
    assert total(busy, "scheduled_tokens_total") == total(busy, "computed_tokens_total")
    for name in ("achieved_tokens_per_second", "num_micro_batches", "compute_busy_ratio", "link_busy_ratio"):
        assert total(busy, name) > 0, name
    assert total(busy, "bottleneck") == 1

    gauges = ["achieved_tokens_per_second", "num_micro_batches", "bottleneck", "wait_ratio", "link_busy_ratio"]
    gauges += ["compute_busy_ratio", "cpu_attention_busy_ratio", "kv_reserved_ratio", "step_tokens"]
    deadline_s = time.monotonic() + 30
    while any(total(metrics_of(server), name) for name in gauges):
        assert time.monotonic() < deadline_s, metrics_of(server)
        time.sleep(0.1)
    idle = metrics_of(server)
    assert {name for name in idle if name.endswith("_total") and total(idle, name) < total(busy, name)} == set()
    assert server.gauge("vllm:num_requests_running") == 0


def test_a_client_that_leaves_mid_stream_frees_its_blocks(server: Server, client: openai.OpenAI) -> None:
    """Also B21: one after three chunks, then several at once; the next answer is as before."""
    before = complete(client).choices[0].text
    for _ in range(6):
        stream = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=480, stream=True, extra_body={"ignore_eos": True}
        )
        for number, _chunk in enumerate(stream):
            if number == 2:
                break
        stream.close()
    wait_until_idle(server)
    assert complete(client).choices[0].text == before


def test_a_token_outside_the_vocabulary_is_refused(client: openai.OpenAI) -> None:
    """B17."""
    assert status_of(client, [10**6]) == 400


@pytest.mark.parametrize("prompt", ["", [], [[]], ["ROMEO:", ""]], ids=repr)
def test_a_bad_prompt_is_refused_and_harms_nobody(client: openai.OpenAI, prompt: object) -> None:
    """B17. An empty text may also be answered, where the tokenizer adds a token; it must not end the server."""
    before = complete(client).choices[0].text
    assert status_of(client, prompt) in (200, 400, 404, 422)
    assert complete(client).choices[0].text == before


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_the_smallest_answers_do_not_end_the_server(client: openai.OpenAI, max_tokens: int) -> None:
    """B17."""
    try:
        answer = complete(client, max_tokens=max_tokens)
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= max(1, max_tokens)
    except openai.BadRequestError:
        assert max_tokens == 0
    assert complete(client).choices[0].text


def test_stop_strings_cut_streamed_and_plain_text_alike(client: openai.OpenAI) -> None:
    """B24: the stop string begins and ends inside tokens."""
    text = complete(client, max_tokens=48).choices[0].text
    stop = text[20:26]
    expected = text[: text.index(stop)]
    for include in (False, True):
        extra = {"include_stop_str_in_output": include}
        plain = complete(client, max_tokens=48, stop=[stop], extra_body=extra).choices[0]
        stream = complete(client, max_tokens=48, stop=[stop], extra_body=extra, stream=True)
        assert plain.text == expected + (stop if include else "")
        assert plain.finish_reason == "stop"
        assert "".join(chunk.choices[0].text for chunk in stream) == plain.text  # type: ignore[attr-defined]


def test_many_clients_at_once_get_what_each_gets_alone(client: openai.OpenAI) -> None:
    prompts = [f"{name}:\nI" for name in ("HAMLET", "OPHELIA", "KING LEAR", "PORTIA", "IAGO", "FALSTAFF")]
    alone = [complete(client, prompt).choices[0].text for prompt in prompts]
    together = complete(client, prompts)
    assert [choice.text for choice in together.choices] == alone
