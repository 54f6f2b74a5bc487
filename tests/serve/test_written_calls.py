"""Calls whose JSON nobody foresaw: of clients, and of models that are confused. They are answered, and come back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.serve.inprocess import InProcess, serving
from tests.serve.test_call_finder import ASKED, HERMES, MISTRAL, form_of
from tests.serve.test_conversations import THINKING
from weft.data.json_text import MOST_LEVELS, parse_json
from weft.serve.anthropic import MessageReplies
from weft.serve.call_finder import CallFinder, CallPiece
from weft.serve.json_values import encodable_json
from weft.serve.messages import read_live, with_short_ids
from weft.serve.replies import Answer, usage_of

#: JSON that a parser takes and UTF-8 or JSON cannot say, that ends no text, and that holds what Weft uses as marks.
ODD = [
    '{"zone": NaN}', '{"zone": -Infinity}', '{"zone": "\\ud83d"}', '{"\\udc00": ["\\udfff é"]}',
    '{"zone": ' + "[" * 1200 + "]" * 1200 + "}", '{"zone": ' + "[" * 30_000,
    '{"zone": "\\ufdd3\\ufde0\\ufdd4"}',
]  # fmt: skip


def answered(given: str) -> list[Any]:
    """A conversation in which the assistant has called with these arguments."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_time", "arguments": given},
    }
    return [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]


@pytest.fixture(scope="module")
def served() -> Iterator[InProcess]:
    with serving(HERMES, context=100_000, tokens=100_000) as served:
        yield served


@pytest.mark.parametrize("given", ODD, ids=range(len(ODD)))
def test_arguments_that_come_back_are_read(served: InProcess, given: str) -> None:
    answer = served.client.post("/tokenize", json={"messages": answered(given)})
    assert answer.status_code == 200, answer.text
    text = bytes(answer.json()["tokens"]).decode()
    assert text.count("get_time") == 1 and text.endswith("noonassistant: ")
    assert not any("\ufdd0" <= char <= "\ufdef" for char in text)


@pytest.mark.parametrize("given", ODD, ids=range(len(ODD)))
@pytest.mark.parametrize("streams", [False, True])
def test_calls_of_a_confused_model_can_be_sent(given: str, streams: bool) -> None:
    form = form_of(HERMES)
    assert form is not None
    text = f'<tool_call>\n{{"name": "get_time", "arguments": {given}}}\n</tool_call>'
    finder = CallFinder(form, streams, ["get_time"])
    before, pieces = finder.add(text)
    rest, more, finish = finder.end("stop")
    answer = Answer(before + rest, [], [*pieces, *more], finish)
    whole = MessageReplies("tiny", 3).whole([answer], usage_of(3, 4))
    said = json.dumps(whole, allow_nan=False, ensure_ascii=False).encode()
    assert b"get_time" in said, "nothing is lost"
    if "[[" in given:
        assert finish == "stop" and (streams or rest == text)
        return
    written = "".join(piece.arguments for piece in answer.calls)
    assert finish == "tool_calls" and repr(json.loads(written.encode())) == repr(
        json.loads(given)
    )


def test_numbers_and_characters_stay_where_they_can() -> None:
    def block(given: str) -> Any:
        replies = MessageReplies("tiny", 3)
        calls = [CallPiece(0, "get_time", given)]
        replies.whole([Answer("", [], calls, "tool_calls")], usage_of(3, 4))
        return replies.content[0]["input"]

    assert block('{"a": "\\ud83d"}') == {"a": "?"}
    assert block('{"a": NaN}') == {"arguments": '{"a": NaN}'}
    assert block('{"a": "é", "b": [1.5]}') == {"a": "é", "b": [1.5]}
    for value in ({"a": "é"}, {"a": "\ud83d é"}):
        text = encodable_json(value)
        assert json.loads(text.encode()) == value
    assert encodable_json({"a": "é"}) == '{"a": "é"}'
    nested = "[" * MOST_LEVELS + "]" * MOST_LEVELS
    assert isinstance(parse_json(f" {nested}\n"), list)
    for text in (f"[{nested}]", "[1] 2", "", "[" * 100_000):
        with pytest.raises(ValueError):
            parse_json(text)


#: As Mistral's own template, which writes ids and takes those of nine letters and digits only.
CHECK = (
    "{{% if {0} is not defined or {0}|length != 9 %}}{{{{ raise_exception('9 letters') }}}}{{% endif %}}"
    "{{{{ {0} }}}}"
)
STRICT = MISTRAL.replace('{"arguments"', CHECK.format("c.id") + '{"arguments"').replace(
    TURN := "{{ m['role'] }}: ",
    f"{TURN}{{% if m.role == 'tool' %}}{CHECK.format('m.tool_call_id')}{{% endif %}}",
)


def test_a_template_that_takes_short_ids_only_gets_such() -> None:
    talk = answered("{}")
    short = with_short_ids(read_live(talk))
    name = short[1]["tool_calls"][0]["id"]
    assert len(name) == 9 and name.isalnum() and short[2]["tool_call_id"] == name
    assert with_short_ids(short) == short, "such an id stays as it is"
    with serving(STRICT) as served:
        answer = served.client.post("/tokenize", json={"messages": talk})
        assert answer.status_code == 200, answer.text
        assert bytes(answer.json()["tokens"]).decode().count(name) == 2
        del talk[2]["tool_call_id"]
        refused = served.client.post("/tokenize", json={"messages": talk})
        assert refused.status_code == 400 and "9 letters" in refused.text


@pytest.mark.parametrize(
    "template", [THINKING, THINKING.replace("enable_thinking", "x")]
)
def test_a_form_begins_behind_the_reasoning(template: str) -> None:
    """The prompt would end in the middle of reasoning, where no form is expected."""

    def tokens(served: InProcess, **asked: Any) -> int:
        body = {"messages": ASKED, "max_tokens": 1} | asked
        answer = served.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        count: int = answer.json()["usage"]["prompt_tokens"]
        return count

    with serving(template) as served:
        thinking, answering = tokens(served), tokens(served, reasoning_effort="none")
        assert thinking != answering
        shape = {"response_format": {"type": "json_object"}}
        assert tokens(served, **shape) == answering
        asked = {"chat_template_kwargs": {"enable_thinking": True}}
        assert tokens(served, structured_outputs={"choice": ["a"]}, **asked) != thinking
        assert tokens(served, response_format={"type": "text"}) == thinking


@pytest.mark.parametrize("given", ODD, ids=range(len(ODD)))
def test_a_conversation_that_is_scored_is_read_like_others(
    served: InProcess, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = list[list[int]]()
    facts = replace(served.server.backend.facts, scores=True)

    class Judge:
        failure = None

        def __init__(self) -> None:
            self.facts = facts

        async def score(self, ids: list[int]) -> float:
            scored.append(ids)
            return 0.5

    monkeypatch.setattr(served.server, "backend", Judge())
    talk = {"messages": answered(given)}
    answer = served.client.post("/v1/score", json=talk)
    assert answer.status_code == 200 and answer.json()["score"] == 0.5, answer.text
    chat = talk | {"add_generation_prompt": False}
    assert scored == [served.client.post("/tokenize", json=chat).json()["tokens"]]
