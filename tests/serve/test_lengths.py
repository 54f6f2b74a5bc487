"""A model's context is a limit, known before a long text is tokenized; long requests hold nobody up."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.test_token_bytes import TOKENIZERS, byte_level
from tests.serve.inprocess import InProcess, serving
from tests.serve.test_call_finder import DEAF
from weft.serve.lengths import (
    LARGEST_TREE,
    TextLengths,
    TokenLimit,
    TooManyTokens,
    check_tree,
    outside_strings,
)
from weft.serve.prompts import Prompts
from weft.serve.protocol import Refusal

CONTEXT = 64
ASKED = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def served() -> Iterator[InProcess]:
    with serving(DEAF, context=CONTEXT) as served:
        yield served


@pytest.mark.parametrize(("path", "asked", "field", "said"), [
    ("completions", {"prompt": "x" * 65, "max_tokens": 1}, "prompt", "65 tokens are more than the model's context of"),
    ("completions", {"prompt": [1] * 60, "max_tokens": 5}, "prompt", "60 tokens and 5 more are more than"),
    ("completions", {"prompt": ["x", [1] * 64]}, "prompt", "64 tokens and 16 more"),
    ("completions", {"prompt": "x" * 8_000_000}, "prompt", "tokens are more than the model's context of 64"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x" * 99}]}, "messages", "context of 64"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x" * 10**6}]}, "messages", "context of 64"),
    ("chat/completions", {"messages": ASKED, "max_tokens": 64}, "messages", "and 64 more"),
    ("responses", {"input": "x" * 99}, "input", "context of 64"),
    ("embeddings", {"input": ["y", "x" * 65]}, "input", "65 tokens are more than the model's context of 64"),
    ("embeddings", {"input": [1] * 65}, "input", "65 tokens are more"),
])  # fmt: skip
def test_what_is_beyond_the_context_is_refused(
    served: InProcess, path: str, asked: dict[str, Any], field: str, said: str
) -> None:
    answer = served.client.post(f"/v1/{path}", json=asked)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded", (
        answer.text
    )
    assert (
        error["param"] == field
        and error["message"].startswith(f"{field}: ")
        and said in error["message"]
    )


def test_up_to_the_context_all_is_answered(served: InProcess) -> None:
    def usage(**asked: Any) -> int:
        answer = served.client.post(
            "/v1/completions", json=asked | {"ignore_eos": True}
        )
        return int(answer.json()["usage"]["completion_tokens"])

    # of 16 that it could have been
    assert usage(prompt=[1] * 60, max_tokens=4) == 4 and usage(prompt=[1] * 60) == 4
    chat = served.client.post(
        "/v1/chat/completions", json={"messages": ASKED, "ignore_eos": True}
    ).json()
    assert chat["usage"]["total_tokens"] <= CONTEXT
    assert served.client.get("/v1/models/tiny").json()["max_model_len"] == CONTEXT
    # to see how long it is
    assert (
        served.client.post("/tokenize", json={"prompt": "x" * 99}).json()["count"] == 99
    )


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_lower_bound_is_never_above_the_tokens(data: Any) -> None:
    """Whatever the tokenizer, and wherever the pieces begin."""
    tokenizer = data.draw(st.sampled_from(TOKENIZERS))
    words = data.draw(
        st.lists(
            st.sampled_from(
                ["the cat ", "naïve ", "日本", "\U0001f600", "  ", "<|end|>", "x"]
            ),
            max_size=60,
        )
    )
    text, lengths = "".join(words), TextLengths(tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.serve.lengths.PIECE", data.draw(st.integers(1, 50)))
        most = len(tokenizer.encode(text, special=data.draw(st.booleans())))
        assert lengths.at_least(text, 10**9) <= most
        lengths.check(text, TokenLimit(most, "it"))


def test_of_a_long_text_only_so_much_is_tokenized_as_is_needed() -> None:
    tokenizer, read = byte_level(), list[int]()
    lengths = TextLengths(tokenizer)
    encode = tokenizer.encode
    tokenizer.__dict__["encode"] = lambda text, special: (
        read.append(len(text)),
        encode(text, special),
    )[1]
    with pytest.raises(
        TooManyTokens, match=r"tokens are more than it of 9,000; shorten the text$"
    ):
        lengths.check("the cat sat on a mat. " * 300_000, TokenLimit(9000, "it"))
    assert sum(read) < 100_000


def test_long_texts_are_encoded_as_short_ones_are() -> None:
    tokenizer = byte_level()
    prompts, text = (
        Prompts(tokenizer, tokenizer.vocab, "tiny"),
        "the cat <|end|> sat on a mat. " * 2000,
    )
    assert asyncio.run(prompts.texts([text])) == [
        [int(i) for i in tokenizer.encode(text)]
    ]
    assert asyncio.run(prompts.texts(["the cat", text, [1]]))[::2] == [
        tokenizer.prompt_ids("the cat"),
        [1],
    ]
    prompts.close()


@settings(max_examples=60)
@given(
    st.recursive(
        st.text(max_size=6) | st.integers(),
        lambda x: st.lists(x) | st.dictionaries(st.text(max_size=6), x),
    )
)
def test_only_what_is_no_text_counts(tree: Any) -> None:
    def parts(value: Any) -> int:
        if isinstance(value, dict):
            return 1 + len(value) + sum(map(parts, value.values()))
        return 1 + sum(map(parts, value)) if isinstance(value, list) else 0

    for ascii_only in (True, False):
        signs = outside_strings(json.dumps(tree, ensure_ascii=ascii_only).encode())
        assert int(np.isin(signs, list(b"{[:")).sum()) == parts(tree)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("body", [
    b'{"prompt": [' + b"[1]," * 2_000_000 + b"[1]]}",
    b'{"messages": [], "tools": [' + b"{}," * 2_000_000 + b"{}]}",
    b"{" + b",".join(b'"x%d": 1' % i for i in range(600_000)) + b"}",
    b'{"prompt": [' + b"1," * 4_000_000 + b"1]}",
    b"[" * 8_000_000,
], ids=["lists", "objects", "keys", "values", "open"])  # fmt: skip
def test_requests_of_many_parts_are_refused_at_once(body: bytes) -> None:
    began = time.monotonic()
    with pytest.raises(Refusal, match="objects, lists and keys and"):
        check_tree(body)
    assert time.monotonic() - began < 3


def test_texts_full_of_signs_are_no_parts() -> None:
    random = Random(0)
    text = "".join(random.choices('{}[]:,"\\ a\n', k=500_000))
    check_tree(json.dumps({"prompt": text, "n": 1}).encode())
    check_tree(json.dumps({"prompt": [1] * 1_000_000}).encode())
    with pytest.raises(Refusal):
        check_tree(json.dumps({"prompt": text, "tools": [{}] * LARGEST_TREE}).encode())
