"""Anthropic's interface: questions become chats, answers and streams blocks, errors have its shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.serve.inprocess import InProcess, serving
from tests.serve.test_call_finder import CITY, HERMES
from tests.serve.test_conversations import SHAPE, THINKING
from weft.serve import api_server
from weft.serve.anthropic import messages_as_chat

TALK = [{"role": "user", "content": "?"}]
WEATHER = {"name": "get_weather", "description": "-", "input_schema": CITY}


@pytest.fixture(scope="module")
def served() -> Iterator[InProcess]:
    with serving(HERMES, keys=("secret",)) as served:
        served.client.headers["x-api-key"] = "secret"
        yield served


def ask(served: InProcess, **asked: Any) -> Any:
    answer = served.client.post(
        "/v1/messages",
        json={"model": "tiny", "messages": TALK, "max_tokens": 8} | asked,
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(served: InProcess, **asked: Any) -> list[Any]:
    body = {"model": "tiny", "messages": TALK, "max_tokens": 8, "stream": True} | asked
    blocks = served.client.post("/v1/messages", json=body).text.strip().split("\n\n")
    pairs = [block.split("\n") for block in blocks]
    events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [event["type"] for event in events] == [
        name.removeprefix("event: ") for name, _ in pairs
    ]
    return events


def test_answers_are_those_of_a_chat(served: InProcess) -> None:
    answer = ask(served, system=[{"type": "text", "text": "Be brief."}], temperature=0)
    chat = {
        "messages": [{"role": "system", "content": "Be brief."}, *TALK],
        "max_tokens": 8,
        "temperature": 0,
    }
    headers = {"authorization": "Bearer secret"}
    (choice,) = served.client.post(
        "/v1/chat/completions", json=chat, headers=headers
    ).json()["choices"]
    assert answer["content"] == [{"type": "text", "text": choice["message"]["content"]}]
    assert (answer["type"], answer["role"], answer["stop_reason"]) == (
        "message",
        "assistant",
        "max_tokens",
    )
    usage = answer["usage"]
    assert (
        usage["output_tokens"] == 8
        and usage["input_tokens"] + usage["cache_read_input_tokens"] == 35
    )
    counted = served.client.post(
        "/v1/messages/count_tokens",
        json={"model": "tiny", "messages": chat["messages"]},
    )
    assert counted.json() == {"input_tokens": 35}


def test_streams_are_events_of_blocks(served: InProcess) -> None:
    whole = ask(served, temperature=0)
    events = events_of(served, temperature=0)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert {*kinds[2:-3]} == {"content_block_delta"} and events[0]["message"][
        "content"
    ] == []
    assert (
        "".join(event["delta"]["text"] for event in events[2:-3])
        == whole["content"][0]["text"]
    )
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 8
    stop = whole["content"][0]["text"][2]
    stopped = ask(served, temperature=0, stop_sequences=["never", stop])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)


def test_tools_are_called_and_answered(served: InProcess) -> None:
    blanks = dict.fromkeys(map(str, b" \n\t\r"), -9)
    asked = {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "get_weather"}, "max_tokens": 600,
             "logit_bias": blanks, "seed": 1}  # fmt: skip
    answer = ask(served, **asked)
    (call,) = answer["content"]
    assert (
        answer["stop_reason"] == "tool_use"
        and call["type"] == "tool_use"
        and call["id"].startswith("toolu_")
    )
    jsonschema.validate(call["input"], CITY)
    events = events_of(served, **asked)
    begun = [
        event["content_block"]
        for event in events
        if event["type"] == "content_block_start"
    ]
    assert [block | {"id": ""} for block in begun] == [
        {"type": "tool_use", "id": "", "name": "get_weather", "input": {}}
    ]
    deltas = [
        event["delta"] for event in events if event["type"] == "content_block_delta"
    ]
    assert (
        json.loads("".join(delta["partial_json"] for delta in deltas)) == call["input"]
        and len(deltas) > 3
    )
    result = {
        "type": "tool_result",
        "tool_use_id": call["id"],
        "content": [{"type": "text", "text": "Rain."}],
    }
    talk = [
        *TALK,
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [result]},
    ]
    assert ask(served, messages=talk, tools=[WEATHER])["role"] == "assistant"


def test_a_question_becomes_a_chat() -> None:
    blocks = [
        {"type": "tool_result", "tool_use_id": "a", "content": "4"},
        {"type": "text", "text": "And?"},
    ]
    said = [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Wait."},
            {"type": "tool_use", "id": "a", "name": "add", "input": {"x": 1}}]  # fmt: skip
    chat = messages_as_chat({
        "messages": [*TALK, {"role": "assistant", "content": said}, {"role": "user", "content": blocks},
                     {"role": "assistant", "content": "It is"}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "thinking": {"type": "disabled"},
        "output_config": {"format": {"type": "json_schema", "schema": SHAPE}},
    })  # fmt: skip
    _, answer, result, more, last = chat["messages"]
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "add", "arguments": {"x": 1}},
    }
    thought = {
        "role": "assistant",
        "content": "Wait.",
        "tool_calls": [call],
        "reasoning_content": "Hm.",
    }
    assert answer == thought and result == {
        "role": "tool",
        "tool_call_id": "a",
        "content": "4",
    }
    assert (
        more == {"role": "user", "content": "And?"}
        and chat["continue_final_message"]
        and last["content"] == "It is"
    )
    assert not chat["parallel_tool_calls"] and chat["tool_choice"] == "auto"
    assert chat["chat_template_kwargs"] == {"enable_thinking": False}
    assert chat["response_format"]["json_schema"]["schema"] == SHAPE


def test_words_of_the_template_go_with_thinking() -> None:
    asked = {"messages": TALK, "thinking": {"type": "enabled", "budget_tokens": 99}}
    for own in ({"mood": "calm"}, {"mood": "calm", "enable_thinking": True}):
        chat = messages_as_chat(asked | {"chat_template_kwargs": own})
        assert chat["chat_template_kwargs"] == {"mood": "calm", "enable_thinking": True}
    words = {"chat_template_kwargs": {"enable_thinking": False}}
    with pytest.raises(ValueError, match="thinking: chat_template_kwargs"):
        messages_as_chat(asked | words)


def test_reasoning_is_a_block() -> None:
    with serving(THINKING) as served:
        answer = ask(served, temperature=0)
        (block,) = answer["content"]
        assert (
            block["type"] == "thinking"
            and block["thinking"]
            and block["signature"] == ""
        )
        deltas = [
            event["delta"]
            for event in events_of(served, temperature=0)
            if "index" in event and "delta" in event
        ]
        assert "".join(delta["thinking"] for delta in deltas) == block["thinking"]


@pytest.mark.parametrize(("asked", "said"), [
    ({"max_tokens": None}, "max_tokens: it is missing"), ({"max_tokens": 0}, "max_tokens: "),
    ({"messages": []}, "messages: give at least one"), ({"messages": [3]}, "messages: its item 0 is 3"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "only parts of type 'text'"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools: only tools with a name and an input_schema"),
    ({"tool_choice": {"type": "some"}}, "tool_choice: give auto, any, tool or none"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences: at most 16 stops are taken, not 17"),
    ({"thinking": 3}, "thinking: give an object, not 3"), ({"top_p": 2}, "top_p: "),
    ({"max_tokens": 10**6}, "messages: 18 tokens and 1,000,000 more are more than the cache"),
])  # fmt: skip
def test_mistakes_have_its_shape(served: InProcess, asked: Any, said: str) -> None:
    body = {"model": "tiny", "messages": TALK, "max_tokens": 8} | asked
    answer = served.client.post("/v1/messages", json=body)
    assert answer.status_code == 400 and answer.json()["type"] == "error", answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and said in error["message"], error


def test_other_refusals_have_its_shape_too(served: InProcess) -> None:
    body = {"model": "other", "messages": TALK, "max_tokens": 8}
    kinds = [
        (served.client.post("/v1/messages", json=body), 404, "not_found_error"),
        (
            served.client.post(
                "/v1/messages", json=body, headers={"x-api-key": "wrong"}
            ),
            401,
            "authentication_error",
        ),
        (served.client.get("/v1/messages"), 405, "invalid_request_error"),
    ]
    for answer, status, kind in kinds:
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind), (
            answer.text
        )
    assert (
        served.client.get("/v1/models", headers={"x-api-key": "wrong"}).json()["error"][
            "code"
        ]
        == "invalid_api_key"
    )


def test_refusals_before_a_route_have_its_shape(
    served: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the gate, which reads no more than the head, and of any path, if the client says that it is Anthropic's."""
    client, body = served.client, {"model": "tiny", "messages": TALK, "max_tokens": 8}
    own = {"anthropic-version": "2023-06-01"}
    page = {"origin": "https://page.example"}
    monkeypatch.setattr(api_server, "LARGEST", 10)
    refused = [
        (client.post("/v1/messages", json=body, headers=page), 403, "permission_error"),
        (
            client.post("/v1/messages", json=body, headers={"host": "a.b"}),
            403,
            "permission_error",
        ),
        (
            client.post(
                "/v1/messages", content="{}", headers={"content-type": "text/plain"}
            ),
            415,
            "",
        ),
        (client.post("/v1/messages", json=body), 413, "request_too_large"),
        (client.post("/v1/messages/batches", json=body), 404, "not_found_error"),
        (client.post("/v1/complete", json=body, headers=own), 404, "not_found_error"),
        (
            client.get("/v1/models", headers=own | {"x-api-key": "wrong"}),
            401,
            "authentication_error",
        ),
        (client.get("/v1/models", headers=own | page), 403, "permission_error"),
    ]
    monkeypatch.setattr(api_server, "LARGEST", 10_000)
    monkeypatch.setattr(api_server, "ALL", -1)
    refused.append((client.post("/v1/messages", json=body), 429, "rate_limit_error"))
    for answer, status, kind in refused:
        error = answer.json()
        assert (answer.status_code, error["type"]) == (status, "error"), answer.text
        assert error["error"]["type"] == (kind or "invalid_request_error")
        assert isinstance(error["error"]["message"], str)
    for path in ("/v1/chat/completions", "/v1/messagesx"):
        other = client.post(path, json=body, headers=page).json()
        assert other["error"]["code"] == "origin_not_allowed"
