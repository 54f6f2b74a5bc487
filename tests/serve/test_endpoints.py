"""What stands beside completions: forms of text, tokens, embeddings, metrics; and an event loop that goes on."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.running import Running, build, until
from weft.data.tokenizer import load_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
)
ASKED = [{"role": "user", "content": "?"}]
POST = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    running = Running(replace(load_tokenizer("bytes"), chat_template=TEMPLATE))
    yield running
    until(running.empty)
    running.close()


def test_forms_of_text(server: Running) -> None:
    asked: dict[str, Any] = {
        "prompt": "x",
        "max_tokens": 500,
        "n": 3,
        "temperature": 1.2,
    }
    forms: list[tuple[dict[str, Any], str]] = [
        ({"regex": "[ab]{3,9}-[0-9]{2}"}, "[ab]{3,9}-[0-9]{2}"),
        ({"grammar": 'start: "yes" | "no" more\nmore: /!{1,3}/'}, "yes|no!{1,3}"),
        ({"json": {"enum": ["a", 3]}}, '"a"|3'),
    ]
    for form, pattern in forms:
        choices = server.post("completions", **asked, structured_outputs=form).json()[
            "choices"
        ]
        assert all(
            re.fullmatch(pattern, c["text"]) and c["finish_reason"] == "stop"
            for c in choices
        )
        streamed = "".join(
            c["choices"][0]["text"]
            for c in server.events(
                "completions", **asked | {"n": 1}, structured_outputs=form
            )
        )
        assert re.fullmatch(pattern, streamed)
    bias = {str(i): -9 for i in b" \n\t\r"} | {str(i): 9 for i in b'}"'}
    shaped: dict[str, Any] = {
        "response_format": {"type": "json_object"},
        "logit_bias": bias,
        "max_tokens": 500,
    }
    content = server.post("chat/completions", messages=ASKED, **shaped).json()[
        "choices"
    ][0]["message"]["content"]
    assert isinstance(json.loads(content), dict)


@pytest.mark.slow
def test_a_form_that_becomes_too_complex_ends_its_own_answer(server: Running) -> None:
    """An ambiguous grammar grows with the text; the engine goes on for everyone else."""
    form = {"grammar": "start: a\na: a a a | a a | /[ab]/"}
    asked = {
        "prompt": "x",
        "max_tokens": 2000,
        "structured_outputs": form,
        "logit_bias": {"256": -100},
    }
    answer = server.post("completions", **asked)
    assert (
        answer.status_code == 400
        and "ask for a simpler one" in answer.json()["error"]["message"]
    ), answer.text
    last = server.events("completions", **asked)[-1]
    assert "ask for a simpler one" in last["error"]["message"]
    assert server.post("completions", prompt="x", max_tokens=2).status_code == 200


@pytest.mark.parametrize(("path", "asked", "said"), [
    ("/v1/completions", {"prompt": "x", "response_format": {"type": "json_schema"}}, "json_schema belongs to the type"),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "a("}}, "the regex grammar cannot be met"),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "a", "json": {}}}, "one of json, regex"),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "a"}, "ignore_eos": True}, "leave out ignore_"),
    ("/v1/embeddings", {"input": "x" * 8193}, "8,193 tokens are more than a vector's limit of 8,192"),
    ("/v1/embeddings", {"input": []}, "input"),
    ("/v1/embeddings", {"input": [[400]]}, "of ids below the model's 257"),
    ("/v1/embeddings", {"input": ["x"] * 2049}, "input"),
    ("/v1/completions", {"prompt": "x", "stop": ["x"] * 17}, "stop"),
    ("/v1/completions", {"prompt": "x", "stop": "x" * 257}, "stop"),
    ("/v1/completions", {"prompt": ["x"] * 9, "n": 128}, "1152 answers are asked for at once; the most is 1024"),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "x" * 300_000}}, "262144 characters at most"),
    ("/tokenize", {}, "give prompt or messages"),
    ("/tokenize", {"messages": [{"role": "nobody", "content": "x"}]}, "unknown role"),
    ("/detokenize", {"tokens": [5000]}, "ids are below 257"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type 'text'"),
])  # fmt: skip
def test_mistakes(server: Running, path: str, asked: dict[str, Any], said: str) -> None:
    answer = server.client.post(path, json=asked)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"], (
        answer.text
    )


def test_tokens_there_and_back(server: Running) -> None:
    text = "Zürich — 東京"
    found = server.client.post("/tokenize", json={"prompt": text}).json()
    assert found == {"tokens": list(text.encode()), "count": len(text.encode())}
    assert server.client.post(
        "/detokenize", json={"tokens": found["tokens"]}
    ).json() == {"prompt": text}
    parts = [{"role": "user", "content": [{"type": "text", "text": "?"}]}]
    talks = [
        server.client.post("/tokenize", json={"messages": talk}).json()
        for talk in (ASKED, parts)
    ]
    assert talks[0] == talks[1] and bytes(talks[0]["tokens"]) == b"user: ?\nassistant:"


def test_embeddings_are_means_of_what_the_output_layer_reads(server: Running) -> None:
    model, ids = build(), torch.tensor([list(b"a text")])
    with torch.no_grad():
        model.norm.register_forward_hook(lambda module, given, out: kept.append(out))
        kept: list[torch.Tensor] = []
        model(ids, torch.arange(6)[None], torch.tensor([0, 6], dtype=torch.int32))
    for pooling, vector in (("mean", kept[0][0].mean(0)), ("last", kept[0][0, -1])):
        (one,) = server.post("embeddings", input="a text", pooling=pooling).json()[
            "data"
        ]
        torch.testing.assert_close(
            torch.tensor(one["embedding"]), (vector / vector.norm()).float()
        )


def test_metrics_are_what_happened() -> None:
    server = Running(load_tokenizer("bytes"), limit=2, tokens=64)

    def read() -> dict[str, float]:
        text = server.client.get("/metrics").text
        samples = (
            sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        )
        return {
            s.name
            + "".join(
                f" {v}" for k, v in sorted(s.labels.items()) if k != "le"
            ): s.value
            for s in samples
        }

    asked = {
        "prompt": "a prompt that has several blocks",
        "max_tokens": 20,
        "ignore_eos": True,
    }
    for n in (1, 1):
        assert server.post("completions", **asked, n=n).status_code == 200
    assert (
        server.post(
            "completions", **asked | {"prompt": ["a" * 30, "b" * 32]}, n=2
        ).status_code
        == 200
    )
    assert server.post("completions", prompt=[]).status_code == 400
    assert server.post("no/such/path").status_code == 404
    found = read()
    assert (
        found["weft_requests_total /v1/completions 200"] == 3
        and found["weft_requests_total other 404"] == 1
    )
    assert found["weft_requests_total /v1/completions 400"] == 1
    assert (
        found["weft_prompt_tokens_total"] == 2 * 32 + 62
        and found["weft_generation_tokens_total"] == 6 * 20
    )
    assert found["weft_prefix_hit_tokens_total"] >= 24
    assert (
        found["weft_time_to_first_token_seconds_count"]
        == found["weft_e2e_request_latency_seconds_count"]
        == 6
    )
    assert found["weft_inter_token_latency_seconds_count"] == 6 * 19
    assert (
        0
        < found["weft_time_to_first_token_seconds_sum"]
        < found["weft_e2e_request_latency_seconds_sum"]
    )
    assert (
        found["weft_requests_running"]
        == found["weft_requests_waiting"]
        == found["weft_cache_blocks_used"]
        == 0
    )
    assert (
        found["weft_cache_blocks"] == 8
        and found["weft_preemptions"] == server.engine.scheduler.preemptions > 0
    )
    step, steps, seen = server.engine.step, itertools.count(), threading.Event()

    def held() -> Any:
        """The third step of the next answer waits until the metrics have been read in the middle of it."""
        assert next(steps) < 2 or seen.wait(60)
        return step()

    server.engine.step = held  # type: ignore[method-assign]
    with server.client.stream(
        "POST", "/v1/completions", json=asked | {"max_tokens": 30, "stream": True}
    ) as answer:
        next(answer.iter_lines())
        until(lambda: read()["weft_requests_running"] == 1)
        assert read()["weft_cache_blocks_used"] > 0
        seen.set()
    server.close()


@pytest.mark.slow
def test_long_texts_hold_nobody_up(server: Running, monkeypatch: Any) -> None:
    """While one client's text is tokenized, others are answered."""
    tokenizer, going = server.server.prompts.tokenizer, threading.Event()

    def slow(text: str, special: bool = False) -> Any:
        going.set()
        time.sleep(2)
        return type(tokenizer).encode(tokenizer, text, special)

    monkeypatch.setitem(tokenizer.__dict__, "encode", slow)

    async def both() -> float:
        async with httpx.AsyncClient(
            base_url=str(server.client.base_url), timeout=60
        ) as client:
            first = asyncio.create_task(client.post("/tokenize", json={"prompt": "x"}))
            while not going.is_set():
                await asyncio.sleep(0.01)
            began = time.monotonic()
            assert (
                await client.post(
                    "/v1/completions", json={"prompt": [1, 2], "max_tokens": 1}
                )
            ).status_code == 200
            took = time.monotonic() - began
            assert (await first).status_code == 200
            return took

    assert asyncio.run(both()) < 1.5
    before = server.server.metrics.first._sum.get()
    assert server.post("completions", prompt="x", max_tokens=1).status_code == 200
    assert server.server.metrics.first._sum.get() - before >= 2, (
        "whoever asks waits for it"
    )


def test_questions_in_hand_weigh_so_much_at_most(monkeypatch: Any) -> None:
    """A long body that does not end: others are told to come back, and are taken on afterwards."""
    monkeypatch.setattr("weft.serve.api_server.ALL", 1_000_000)
    server = Running(load_tokenizer("bytes"))
    address = (server.client.base_url.host, server.client.base_url.port)
    with socket.create_connection(address) as slow:
        slow.sendall(POST % 1_200_000 + b" " * 999_000)
        until(lambda: server.server.held >= 999_000)
        refused = server.post("completions", prompt="x" * 2000, max_tokens=1)
        assert refused.status_code == 429 and "retry-after" in refused.headers
    until(lambda: server.server.held == 0)
    assert server.post("completions", prompt="x", max_tokens=1).status_code == 200
    server.close()


def test_questions_that_do_not_end_are_given_up(monkeypatch: Any) -> None:
    monkeypatch.setattr("weft.serve.api_server.PATIENCE", 0.3)
    server = Running(load_tokenizer("bytes"))
    with socket.create_connection(
        (server.client.base_url.host, server.client.base_url.port)
    ) as slow:
        slow.sendall(POST % 12 + b"{")
        slow.settimeout(30)
        assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")
    server.close()


def test_vectors_that_nobody_waits_for_are_not_computed(
    server: Running, monkeypatch: Any
) -> None:
    seen = []
    monkeypatch.setattr(
        "weft.serve.service.embed",
        lambda *asked: (seen.append(asked), time.sleep(0.05), torch.ones(2))[2],
    )
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/v1/embeddings", json={"input": ["x"] * 400}, timeout=0.5)
    count = len(seen)
    time.sleep(0.5)
    assert len(seen) <= count + 3 and count < 60
