"""A random walk of requests that are built from the client's own types: each is answered, or refused by its field."""

from __future__ import annotations

import collections.abc
import json
import types
import typing
from collections import Counter
from random import Random
from typing import Any

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from tests.serve.inprocess import InProcess, serving
from tests.serve.test_tools import HERMES, WEATHER

PATHS: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (
        chat_create_params.CompletionCreateParamsBase,
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    ),
    "/v1/completions": (completion_create_params.CompletionCreateParamsBase, {"prompt": "a", "max_tokens": 4}),
    "/v1/responses": (response_create_params.ResponseCreateParamsBase, {"input": "a", "max_output_tokens": 4}),
    "/v1/embeddings": (embedding_create_params.EmbeddingCreateParams, {"input": "a"}),
}

WORDS = ["", "a", "get_weather", "{}", '{"city": "Oslo"}', "hi there", "é東", "call_1", "\x00"]


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
        chosen = [name for name in hints if name in hint.__required_keys__ or random.random() < 0.3 / (1 + depth)]
        return {name: drawn(hints[name], random, depth + 1) for name in chosen}
    if origin in (list, collections.abc.Iterable, collections.abc.Sequence):
        return [drawn(inside[0], random, depth + 1) for _ in range(random.choice([0, 1, 1, 2]))]
    if origin in (dict, collections.abc.Mapping):
        return {
            random.choice(["1", "97", "a"]): drawn(inside[1], random, depth + 1) for _ in range(random.choice([0, 1]))
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
    for name in random.sample(sorted(hints.keys() - {"model"}), random.choice([0, 1, 1, 2, 3])):
        body[name] = drawn(hints[name], random)
    return path, body


def walk(served: InProcess, steps: int, seed: str) -> Counter[int]:
    """Ask so many times; returns how often each status came. What fails in the server fails here."""
    counts: Counter[int] = Counter()
    for number in range(steps):
        path, body = question(Random(f"{seed} {number}"))
        answer = served.client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        counts[answer.status_code] += 1
        assert answer.status_code in (200, 400), (path, body, answer.text)
        if answer.status_code != 200:
            error = answer.json()["error"]
            field = str(error["param"])
            assert field.split(".")[0] in body and error["message"].startswith(field), (path, body, error)
        elif body.get("stream") is True:
            assert '"server_error"' not in answer.text and "Traceback" not in answer.text, (path, body, answer.text)
    return counts


def test_a_short_walk_meets_no_failure() -> None:
    with serving(HERMES, tokens=1024) as served:
        counts = walk(served, 120, "daily")
    assert counts[200] > 30 and counts[400] > 20, counts


@pytest.mark.soak
def test_a_walk_of_two_thousand_meets_no_failure() -> None:
    with serving(HERMES, tokens=1024) as served:
        counts = walk(served, 2000, "long")
    assert counts[200] > 500 and counts[400] > 300, counts
