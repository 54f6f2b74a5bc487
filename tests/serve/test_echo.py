"""Prompts that are scored: their log-probabilities are the model's, whatever the cache holds, however they are cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.serve.inprocess import InProcess, serving
from tests.serve.running import build
from tests.serve.test_call_finder import DEAF
from weft.generate.lookup import Lookup

PROMPT = "a prompt — of several blocks"


@pytest.fixture(
    scope="module",
    params=[{}, {"budget": 5, "tokens": 56, "drafter": Lookup(1000, 1, 2)}],
    ids=["", "cut"],
)
def served(request: Any) -> Iterator[InProcess]:
    """Once with prompts in pieces, in a cache so small that requests lose their blocks to others."""
    with serving(DEAF, **request.param) as served:
        yield served


def expected(ids: list[int]) -> torch.Tensor:
    """Log-probabilities ``[tokens, vocab]`` of what follows each token."""
    with torch.no_grad():
        logits = build()(
            torch.tensor([ids]),
            torch.arange(len(ids))[None],
            torch.tensor([0, len(ids)]).int(),
        )[0]
    return logits.log_softmax(-1)


def post(served: InProcess, **asked: Any) -> Any:
    answer = served.client.post("/v1/completions", json={"temperature": 0} | asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_an_echo_scores_the_prompt_and_what_follows(served: InProcess) -> None:
    """Twice, so that the prompt is known, beside another prompt that takes its blocks."""
    ids = list(PROMPT.encode())
    whole = post(served, prompt=ids, max_tokens=4)["choices"][0]["text"]
    for prompt in (ids, PROMPT):
        answer = post(
            served,
            prompt=[prompt, "another one, much like it"],
            max_tokens=4,
            echo=True,
            logprobs=3,
            n=2,
        )
        choice, again, *_ = answer["choices"]
        logs = choice["logprobs"]
        assert again["logprobs"] == logs and choice["text"] == PROMPT + whole
        everything = ids + list(whole.encode(errors="replace"))[:4]
        scores = expected(ids)
        assert logs["token_logprobs"][0] is None and logs["top_logprobs"][0] is None
        picked = [float(scores[i, everything[i + 1]]) for i in range(len(ids) - 1)]
        assert logs["token_logprobs"][1 : len(ids)] == pytest.approx(picked, abs=1e-9)
        assert (
            len(logs["tokens"])
            == len(logs["text_offset"])
            == len(logs["token_logprobs"])
            == len(ids) + 4
        )
        tops = [max(top.values()) for top in logs["top_logprobs"][1 : len(ids)]]
        assert tops == pytest.approx(
            scores[: len(ids) - 1].max(-1).values.tolist(), abs=1e-9
        )
        assert answer["usage"]["completion_tokens"] == 16
        places = [len(bytes(ids[:i]).decode(errors="ignore")) for i in range(len(ids))]
        assert logs["text_offset"][: len(ids)] == places and PROMPT[places[-1]] == "s"


def test_no_token_is_asked_for(served: InProcess) -> None:
    (choice,) = post(served, prompt="abc", max_tokens=0, echo=True, logprobs=1)[
        "choices"
    ]
    assert (
        choice["text"] == "abc"
        and choice["finish_reason"] == "length"
        and len(choice["logprobs"]["tokens"]) == 3
    )
    answer = post(served, prompt=["abc", [5]], max_tokens=0)
    assert [choice["text"] for choice in answer["choices"]] == ["", ""] and answer[
        "usage"
    ]["completion_tokens"] == 0
    (plain,) = post(served, prompt="abc", max_tokens=2, echo=True)["choices"]
    assert plain["text"].startswith("abc") and plain["logprobs"] is None


def test_an_echo_streams(served: InProcess) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 3, "echo": True, "logprobs": 1}
    (whole,) = post(served, **asked)["choices"]
    text = served.client.post(
        "/v1/completions", json=asked | {"stream": True, "temperature": 0}
    ).text
    events = [
        json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]
    ]
    chunks = [event["choices"][0] for event in events]
    assert (
        chunks[0]["text"].startswith(PROMPT)
        and "".join(chunk["text"] for chunk in chunks) == whole["text"]
    )
    for name, values in whole["logprobs"].items():
        assert [
            value for chunk in chunks for value in chunk["logprobs"][name]
        ] == values, name
