"""What clients of other servers send and read: their fields, special tokens in texts, streams line by line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.data.test_bos import like_gemma
from tests.serve.inprocess import InProcess, serving
from tests.serve.test_call_finder import HERMES, TIME
from tests.serve.test_fields import TALK, TEXT, post
from weft.serve.call_form import _as_lark
from weft.serve.prompts import Prompts


@pytest.fixture(scope="module")
def served() -> Iterator[InProcess]:
    with serving(HERMES) as served:
        yield served


def events(served: InProcess, body: Any, **more: Any) -> list[Any]:
    """What a client reads that takes every end of a line that Unicode has for one, as httpx' ``iter_lines`` does."""
    asked = body | {"stream": True} | more
    answer = served.client.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_every_line_of_a_stream_is_an_event(served: InProcess) -> None:
    word = "a\u2028b\u2029c\x85d"
    form = {"structured_outputs": {"choice": [word]}}
    parts = events(served, TEXT, max_tokens=20, **form)
    assert "".join(part["choices"][0]["text"] for part in parts) == word


def test_what_other_servers_take_is_taken(served: InProcess) -> None:
    words = ["yes (1+1)", "no.", "a|b\\\n", "#^ -"]
    for _ in range(4):
        form: Any = {"structured_outputs": {"choice": words}}
        (choice,) = post(served, "completions", TEXT, max_tokens=30, **form)["choices"]
        assert choice["text"] in words and choice["finish_reason"] == "stop"
    form = {"structured_outputs": {"json": '{"enum": [17]}'}}
    (choice,) = post(served, "completions", TEXT, max_tokens=9, **form)["choices"]
    assert choice["text"] == "17"
    greedy, least = (
        post(served, "completions", TEXT, **how)["choices"][0]["text"]
        for how in ({"temperature": 0}, {"top_p": 0})
    )
    assert greedy == least
    (choice,) = post(served, "completions", TEXT, logprobs=False)["choices"]
    assert choice["logprobs"] is None
    long = post(served, "completions", {"prompt": "x"}, min_tokens=40, ignore_eos=True)
    assert long["usage"]["completion_tokens"] == 40, "more than by default"
    assert len(events(served, TEXT, best_of=1)) > 0
    beams = {"use_beam_search": True, "n": 2, "user": "u", "prompt_cache_key": "k"}
    assert len(post(served, "completions", TEXT, **beams)["choices"]) == 2


def test_counts_of_tokens_stand_in_every_chunk(served: InProcess) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    parts = events(served, TEXT, max_tokens=6, n=2, stream_options=options)
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts) and counts[0] < counts[-1] == 12
    assert parts[-1]["choices"] == [] and parts[0]["usage"]["prompt_tokens"] == 1
    parts = events(served, TEXT, stream_options={"continuous_usage_stats": True})
    assert not any("usage" in part for part in parts), "as without it"


@pytest.mark.parametrize("limits", [{"context": 24}, {"tokens": 24}])
def test_a_prompt_that_is_only_scored_fills_the_context(limits: Any) -> None:
    ids = list(range(97, 121))
    with serving(HERMES, **limits) as served:
        asked = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 1}
        (choice,) = post(served, "completions", asked)["choices"]
        assert len(choice["logprobs"]["token_logprobs"]) == 24
        answer = served.client.post(
            "/v1/completions", json=asked | {"prompt": [*ids, 9]}
        )
        assert answer.status_code == 400 and "25 tokens are more" in answer.text


def test_names_of_special_tokens_in_a_text_are_these_tokens(served: InProcess) -> None:
    """As clients write them that fill in the middle, or write a template themselves; in messages they stay words."""
    text, ids = "a<|endoftext|>b", [97, 256, 98]
    assert (
        served.client.post("/tokenize", json={"prompt": text}).json()["tokens"] == ids
    )
    usage = post(served, "completions", TEXT, prompt=text)["usage"]
    assert usage["prompt_tokens"] == 3
    talk = {"messages": [{"role": "user", "content": text}]}
    answer = served.client.post("/tokenize", json=talk).json()
    assert 256 not in answer["tokens"] and answer["count"] > len(text)
    refused = served.client.post("/tokenize", json=talk | {"add_special_tokens": True})
    assert refused.status_code == 400 and "add_special_tokens: the" in refused.text
    own = like_gemma()
    prompts = Prompts(own, own.vocab, "like Gemma")
    assert own.bos is not None and own.opening == [own.bos]

    def begins(*how: Any) -> list[bool]:
        (ids,) = asyncio.run(prompts.texts(["<bos>a b"], None, *how))
        return [i == own.bos for i in ids[:2]]

    assert begins(True, False) == begins() == [True, False]
    assert begins(True) == [True, True], "as elsewhere, if it is written, too"
    prompts.close()


def test_a_regular_expression_means_the_same_beside_tools(served: InProcess) -> None:
    assert _as_lark("a/b\\/c\\\\/\n\\\n\\n") == r"/a\/b\/c\\\/\n\n\n/"
    form = {"structured_outputs": {"regex": "a\\\nb/\\\\\n"}}
    for tools in ([], [TIME]):
        asked = {"tools": tools, "logit_bias": {str(ord("a")): 90}}
        (choice,) = post(served, "chat/completions", TALK, max_tokens=9, **asked, **form)["choices"]  # fmt: skip
        assert choice["message"]["content"] == "a\nb/\\\n"


def test_a_packed_question_is_refused_as_such(served: InProcess) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = served.client.post("/v1/completions", content=b"\x1f\x8b", headers=headers)
    assert answer.status_code == 415
    assert answer.json()["error"]["message"].endswith("not with Content-Encoding: gzip")
