"""The JSON of answers: log-probabilities of tokens that are parts of characters, or that look alike."""

from __future__ import annotations

import json
from math import inf, nan

from tests.data.test_token_bytes import sentence_pieces
from weft.generate.backend import TokenEvent
from weft.serve.protocol import ChatRequest, CompletionRequest
from weft.serve.replies import IMPOSSIBLE, Replies

PIECES = sentence_pieces()
LETTER, BYTE, PART = PIECES.model.token_to_id("a"), 2 + ord("a"), 2 + 0xE6  # type: ignore[union-attr]
EVENTS = [
    TokenEvent(0, BYTE, (-2.0, {LETTER: -0.5, BYTE: -2.0, PART: -3.0}), ""),
    TokenEvent(0, PART, (-4.0, {LETTER: -0.5}), "length"),
]


def test_log_probabilities_of_completions_keep_tokens_apart() -> None:
    replies = Replies(
        CompletionRequest.model_validate({"prompt": "x", "logprobs": 3}), "tiny", PIECES
    )
    logs = replies._logs(0, EVENTS)
    assert logs is not None
    name = f"token_id:{BYTE}"
    assert logs["top_logprobs"] == [
        {"a": -0.5, name: -2.0, "bytes:\\xe6": -3.0},
        {"a": -0.5},
    ]
    assert logs["tokens"] == [name, "bytes:\\xe6"] and logs["token_logprobs"] == [
        -2.0,
        -4.0,
    ]


def test_log_probabilities_of_chats_have_the_bytes_of_tokens() -> None:
    asked = {
        "messages": [{"role": "user", "content": "x"}],
        "logprobs": True,
        "top_logprobs": 3,
    }
    logs = Replies(ChatRequest.model_validate(asked), "tiny", PIECES)._logs(0, EVENTS)
    assert logs is not None
    first, last = logs["content"]
    assert [(top["token"], top["bytes"]) for top in first["top_logprobs"]] == [
        ("a", [97]), ("a", [97]), ("bytes:\\xe6", [0xE6])
    ]  # fmt: skip
    assert (last["token"], last["bytes"], last["logprob"]) == (
        "bytes:\\xe6",
        [0xE6],
        -4.0,
    )


def test_what_json_cannot_say_is_left_out() -> None:
    """Of an impossible token, and of one whose log-probability is NaN."""
    asked = CompletionRequest.model_validate({"prompt": "x", "logprobs": 2})
    events = [
        TokenEvent(0, LETTER, (-inf, {LETTER: -inf}), ""),
        TokenEvent(0, LETTER, (nan, {LETTER: nan, PART: -1.0}), "length"),
    ]
    logs = Replies(asked, "tiny", PIECES)._logs(0, events)
    assert json.loads(json.dumps(logs, allow_nan=False)) == logs
    assert logs is not None and logs["token_logprobs"] == [IMPOSSIBLE, None]
    assert logs["top_logprobs"] == [{"a": IMPOSSIBLE}, {"bytes:\\xe6": -1.0}]
