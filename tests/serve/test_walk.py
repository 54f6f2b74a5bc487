"""A random walk of requests that are built from the client's own types: each is answered, or refused by its field."""

from __future__ import annotations

import collections.abc
import json
import types
import typing
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from random import Random
from typing import Any

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from tests.serve.inprocess import InProcess, serving
from tests.serve.test_call_finder import HERMES, WEATHER

PATHS: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (
        chat_create_params.CompletionCreateParamsBase,
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    ),
    "/v1/completions": (
        completion_create_params.CompletionCreateParamsBase,
        {"prompt": "a", "max_tokens": 4},
    ),
    "/v1/responses": (
        response_create_params.ResponseCreateParamsBase,
        {"input": "a", "max_output_tokens": 4},
    ),
    "/v1/embeddings": (embedding_create_params.EmbeddingCreateParams, {"input": "a"}),
}

WORDS = [
    "",
    "a",
    "get_weather",
    "{}",
    '{"city": "Oslo"}',
    "hi there",
    "é東",
    "call_1",
    "\x00",
]


def drawn(hint: Any, random: Random, depth: int = 0) -> Any:
    """A value of the type ``hint``, as the client could send it."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Required, typing.NotRequired, typing.Annotated):
        return drawn(inside[0], random, depth)
    if origin is typing.Literal:
        return random.choice(inside)
    if origin in (typing.Union, types.UnionType):
        return drawn(random.choice(inside), random, depth)
    if typing.is_typeddict(hint):
        hints = typing.get_type_hints(hint)
        chosen = [
            name
            for name in hints
            if name in hint.__required_keys__ or random.random() < 0.3 / (1 + depth)
        ]
        return {name: drawn(hints[name], random, depth + 1) for name in chosen}
    if origin in (list, collections.abc.Iterable, collections.abc.Sequence):
        return [
            drawn(inside[0], random, depth + 1)
            for _ in range(random.choice([0, 1, 1, 2]))
        ]
    if origin in (dict, collections.abc.Mapping):
        return {
            random.choice(["1", "97", "a"]): drawn(inside[1], random, depth + 1)
            for _ in range(random.choice([0, 1]))
        }
    if hint is types.NoneType:
        return None
    values = {
        str: WORDS, bool: [True, False], int: [-1, 0, 1, 2, 5, 300, 2**40], float: [-1.0, 0.0, 0.5, 1.0, 2.0, 1e300],
    }.get(hint, [None, {}, [], "x", 3, {"type": "object"}])  # fmt: skip
    return random.choice(values)


def question(random: Random) -> tuple[str, dict[str, Any]]:
    """A path and a request that is right, but for up to three of its fields, which are drawn from their types."""
    path = random.choice([*PATHS, "/v1/chat/completions", "/v1/responses"])
    kind, right = PATHS[path]
    hints = typing.get_type_hints(kind)
    body = {"model": "tiny"} | right
    if path != "/v1/embeddings":
        body |= {"stream": random.random() < 0.3, "seed": 1}
    if path == "/v1/chat/completions" and random.random() < 0.3:
        body |= {"tools": [WEATHER]}
    for name in random.sample(
        sorted(hints.keys() - {"model"}), random.choice([0, 1, 1, 2, 3])
    ):
        body[name] = drawn(hints[name], random)
    return path, body


def walk(served: InProcess, steps: int, seed: str) -> Counter[int]:
    """Ask so many times; returns how often each status came. What fails in the server fails here."""
    counts: Counter[int] = Counter()
    for number in range(steps):
        path, body = question(Random(f"{seed} {number}"))
        answer = served.client.post(
            path, content=json.dumps(body), headers={"content-type": "application/json"}
        )
        counts[answer.status_code] += 1
        assert answer.status_code in (200, 400), (path, body, answer.text)
        if answer.status_code != 200:
            error = answer.json()["error"]
            field = str(error["param"])
            assert field.split(".")[0] in body and error["message"].startswith(field), (
                path,
                body,
                error,
            )
        elif body.get("stream") is True:
            assert (
                '"server_error"' not in answer.text and "Traceback" not in answer.text
            ), (path, body, answer.text)
    return counts


def test_a_short_walk_meets_no_failure() -> None:
    with serving(HERMES, tokens=1024) as served:
        counts = walk(served, 80, "daily")
    assert counts[200] > 20 and counts[400] > 15, counts


@pytest.mark.soak
def test_a_walk_of_two_thousand_meets_no_failure() -> None:
    with serving(HERMES, tokens=1024) as served:
        counts = walk(served, 2000, "long")
    assert counts[200] > 500 and counts[400] > 300, counts


#: Requests that use most of what each path takes.
RICH: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "model": "tiny", "max_tokens": 4, "system": [{"type": "text", "text": "x"}], "stop_sequences": ["x"],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Oslo"}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "4"}]},
        ],
        "tools": [{"name": "get_weather", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"}, "thinking": {"type": "enabled", "budget_tokens": 5}, "temperature": 1,
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"enum": [1]}}},
    },
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
            ]},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ],
        "max_tokens": 4, "tools": [WEATHER], "stop": ["x"], "logit_bias": {"97": 1}, "logprobs": True, "n": 2,
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "top_logprobs": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1]}}},
        "stream_options": {"include_usage": True}, "chat_template_kwargs": {"a": 1}, "stop_token_ids": [3],
    },
    "/v1/completions": {
        "prompt": ["a", [1, 2]], "max_tokens": 2, "logprobs": 2, "echo": True, "best_of": 2, "n": 1, "stop": "x",
        "structured_outputs": {"regex": "a+"}, "logit_bias": {"1": 2}, "stop_token_ids": [1], "min_tokens": 1,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
        ],
        "max_output_tokens": 3, "tools": [{"type": "function", **WEATHER["function"]}], "instructions": "i",
        "tool_choice": {"type": "function", "name": "get_weather"}, "text": {"format": {"type": "text"}},
        "metadata": {"a": "b"}, "reasoning": {"effort": "low"}, "include": [],
    },
    "/v1/embeddings": {"input": ["a", [1]], "dimensions": 4, "encoding_format": "base64"},
    "/tokenize": {"messages": [{"role": "user", "content": "x"}]}, "/detokenize": {"tokens": [1, 2]},
}  # fmt: skip

JUNK = [
    None, True, 0, -1, 2**70, 1.5, 1e308, "", "x", "\x00", "y" * 300, [], [[]], {}, {"type": "x"}, {"a": None}, [None],
    "none", [1] * 3, [{}], "\u2028\ufdd3\ufde0\ufdd4",
]  # fmt: skip


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to every value inside ``value``."""
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, each in inside:
        yield (*path, key)
        yield from paths_of(each, (*path, key))


def spoilt(body: dict[str, Any], random: Random) -> dict[str, Any]:
    """``body`` with some fields left out, and up to two values replaced by others of any kind."""
    kept = {
        key: value
        for key, value in body.items()
        if key in ("messages", "input", "prompt") or random.random() < 0.7
    }
    copy: Any = json.loads(json.dumps(kept))
    for _ in range(random.choice([1, 1, 2])):
        path = random.choice([*paths_of(copy)] or [("model",)])
        at = copy
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = deepcopy(random.choice(JUNK))
    return copy | ({"stream": True} if random.random() < 0.3 else {})


def spoil(served: InProcess, steps: int, seed: str) -> Counter[int]:
    """Ask so many spoilt questions; returns how often each status came."""
    counts: Counter[int] = Counter()
    for number in range(steps):
        random = Random(f"{seed} {number}")
        path = random.choice([*RICH])
        body = spoilt(RICH[path], random)
        answer = served.client.post(
            path, content=json.dumps(body), headers={"content-type": "application/json"}
        )
        counts[answer.status_code] += 1
        assert answer.status_code in (200, 400, 404), (path, body, answer.text)
        assert (
            '"server_error"' not in answer.text and '"api_error"' not in answer.text
        ), (path, body, answer.text)
        if answer.status_code == 400:
            error = answer.json()["error"]
            field = (
                error["param"] if "param" in error else error["message"].split(":")[0]
            )
            assert field and error["message"].startswith(field) and " " not in field, (
                path,
                body,
                error,
            )
    return counts


def test_spoilt_questions_are_refused_by_their_field() -> None:
    with serving(HERMES, tokens=1024) as served:
        counts = spoil(served, 200, "daily")
    assert counts[200] > 20 and counts[400] > 80, counts


@pytest.mark.soak
def test_many_spoilt_questions_are_refused_by_their_field() -> None:
    with serving(HERMES, tokens=1024) as served:
        counts = spoil(served, 4000, "long")
    assert counts[200] > 400 and counts[400] > 1600, counts
