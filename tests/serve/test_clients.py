"""The clients that people use: OpenAI's for Python, and curl."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.serve.running import Running, until
from tests.serve.test_call_finder import ASKED, CITY, HERMES, TIME, WEATHER
from weft.data.tokenizer import load_tokenizer

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"enum": [7, 70]}},
          "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
SHAPED: Any = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    running = Running(
        replace(load_tokenizer("bytes"), chat_template=HERMES), keys=("secret",)
    )
    running.client.headers["authorization"] = "Bearer secret"
    yield running
    until(running.empty)
    running.close()


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.client.base_url}/v1", api_key="secret", max_retries=0
    ) as client:
        yield client


def test_chats_and_streams(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    asked: Any = {
        "model": "tiny",
        "messages": ASKED,
        "max_tokens": 30,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked)
    text, usage = whole.choices[0].message.content, whole.usage
    assert (
        text
        and usage
        and usage.completion_tokens == 30
        and whole.choices[0].finish_reason == "length"
    )
    chunks = list(
        client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == text
    assert (
        chunks[-1].usage
        and chunks[-1].usage.completion_tokens == 30
        and chunks[-1].choices == []
    )
    completion = client.completions.create(
        model="tiny", prompt="a", max_tokens=3, logprobs=1
    )
    assert len(completion.choices[0].logprobs.token_logprobs) == 3  # type: ignore[union-attr, arg-type]


def test_tools_and_schemas(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": ASKED, "max_tokens": 400, "seed": 4}
    choice = client.chat.completions.create(
        **asked, tools=[WEATHER, TIME], tool_choice="required"
    ).choices[0]
    (call,) = choice.message.tool_calls or ()
    assert choice.finish_reason == "tool_calls" and call.type == "function"
    if call.function.name == "get_weather":
        jsonschema.validate(json.loads(call.function.arguments), CITY)
    shaped = client.chat.completions.create(**asked, response_format=SHAPED).choices[0]
    jsonschema.validate(json.loads(shaped.message.content or ""), SCHEMA)
    assert shaped.finish_reason == "stop"
    with client.chat.completions.stream(**asked, response_format=SHAPED) as stream:
        assert (
            stream.get_final_completion().choices[0].message.content
            == shaped.message.content
        )


@pytest.mark.soak
def test_a_call_streams_as_it_is_written(client: openai.OpenAI) -> None:
    strict: Any = {
        "type": "function",
        "function": WEATHER["function"] | {"strict": True},
    }
    asked: Any = {"model": "tiny", "messages": ASKED, "max_tokens": 400, "seed": 4, "tools": [strict],
                  "tool_choice": "required"}  # fmt: skip
    (whole,) = (
        client.chat.completions.create(**asked).choices[0].message.tool_calls or ()
    )
    with client.chat.completions.stream(**asked) as stream:
        deltas = [
            event
            for event in stream
            if event.type == "tool_calls.function.arguments.delta"
        ]
        choice = stream.get_final_completion().choices[0]
    (call,) = choice.message.tool_calls or ()
    assert (
        whole.type == call.type == "function"
        and choice.finish_reason == "tool_calls"
        and call.id
    )
    assert {each.name for each in deltas} == {call.function.name} == {
        whole.function.name
    } and len(deltas) > 5
    assert json.loads(call.function.arguments) == json.loads(whole.function.arguments)


def test_responses(client: openai.OpenAI) -> None:
    """Text, whole and in events that the client puts together again, and cut or not."""
    asked: Any = {
        "model": "tiny",
        "input": "Hello",
        "temperature": 0,
        "max_output_tokens": 20,
    }
    whole = client.responses.create(**asked, instructions="Be brief.")
    assert (
        whole.output_text
        and whole.status == "incomplete"
        and whole.usage
        and whole.usage.output_tokens == 20
    )
    assert (
        whole.incomplete_details
        and whole.incomplete_details.reason == "max_output_tokens"
    )
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]
    chat: Any = {"model": "tiny", "messages": talk, "temperature": 0, "max_tokens": 20}
    assert (
        client.chat.completions.create(**chat).choices[0].message.content
        == whole.output_text
    )
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
    events = list(
        client.responses.create(
            **asked | {"input": parts}, instructions="Be brief.", stream=True
        )
    )
    assert [event.type for event in events[:4]] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert [event.type for event in events[-4:]] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (
        "".join(
            event.delta
            for event in events
            if event.type == "response.output_text.delta"
        )
        == whole.output_text
    )
    assert (
        events[-1].type == "response.incomplete"
        and events[-1].response.output_text == whole.output_text
    )
    assert events[-1].response.usage.input_tokens_details.cached_tokens >= 8, (
        "a block of the prompt was known"
    )
    asked |= {"max_output_tokens": 300}
    with client.responses.stream(
        **asked, text={"format": SHAPED["json_schema"] | {"type": "json_schema"}}
    ) as stream:
        jsonschema.validate(json.loads(stream.get_final_response().output_text), SCHEMA)


@pytest.mark.soak
@pytest.mark.sampled(1)
def test_responses_that_call_functions(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **WEATHER["function"], "strict": True}
    asked: Any = {"model": "tiny", "input": [{"role": "user", "content": "?"}], "temperature": 0, "tools": [tool],
                  "tool_choice": "required", "max_output_tokens": 400}  # fmt: skip
    (call,) = client.responses.create(**asked).output
    assert call.type == "function_call" and call.status == "completed"
    jsonschema.validate(json.loads(call.arguments), CITY)
    with client.responses.stream(**asked) as stream:
        deltas = [
            event.delta
            for event in stream
            if event.type == "response.function_call_arguments.delta"
        ]
        (streamed,) = stream.get_final_response().output
    assert (
        streamed.type == "function_call"
        and len(deltas) > 5
        and "".join(deltas) == streamed.arguments
    )
    assert (
        json.loads(streamed.arguments) == json.loads(call.arguments)
        and streamed.name == call.name
    )
    output = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": "Rain.",
    }
    asked |= {
        "input": [*asked["input"], call.to_dict(), output],
        "tool_choice": "auto",
        "max_output_tokens": 3,
    }
    assert client.responses.create(**asked).status == "incomplete"


@pytest.mark.parametrize(("asked", "said"), [
    ({"background": True}, "background: nothing is kept here"), ({"truncation": "auto"}, "only 'disabled'"),
    ({"previous_response_id": "resp_1"}, "previous_response_id: nothing is kept here"),
    ({"input": [{"type": "computer_call"}]}, 'its item 0 is {"type": "computer_call"}'),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image"),
    ({"tools": [{"type": "web_search"}]}, "tools.0"), ({"n": 2}, "n: "), ({"input": 3}, "input"),
    ({"input": [3]}, "input"), ({"text": 5}, "text"), ({"reasoning": "low"}, "reasoning"),
])  # fmt: skip
def test_mistakes_in_responses(client: openai.OpenAI, asked: Any, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        client.responses.create(
            **{"model": "tiny", "input": "x"} | {"extra_body": asked}
        )


def test_who_closes_a_stream_is_forgotten(
    server: Running, client: openai.OpenAI
) -> None:
    asked: Any = {
        "model": "tiny",
        "messages": ASKED,
        "max_tokens": 3000,
        "stream": True,
    }
    stream = client.chat.completions.create(**asked, extra_body={"ignore_eos": True})
    next(iter(stream))
    (written,) = server.engine.scheduler.running
    stream.close()
    until(server.empty)
    assert len(written.written) < 3000


def test_refusals_are_the_clients_own_errors(
    server: Running, client: openai.OpenAI
) -> None:
    asked: Any = {"model": "tiny", "messages": ASKED}
    with pytest.raises(openai.AuthenticationError, match="no valid API key"):
        client.with_options(api_key="wrong").chat.completions.create(**asked)
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
        client.chat.completions.create(**asked | {"model": "gpt"})
    never: Any = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"enum": []}},
    }
    with pytest.raises(openai.BadRequestError, match="cannot be met"):
        client.chat.completions.create(**asked, response_format=never)


def test_embeddings(client: openai.OpenAI) -> None:
    """The client asks for base64 and decodes it; the same text yields the same vector beside others."""
    texts = ["a text", "another", "a text"]
    found = client.embeddings.create(model="tiny", input=texts)
    vectors = [one.embedding for one in found.data]
    assert (
        vectors[0] == vectors[2] != vectors[1]
        and len(vectors[0]) == 32
        and found.usage.prompt_tokens == 19
    )
    assert sum(x * x for x in vectors[0]) == pytest.approx(1, abs=1e-5)
    plain = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    assert [one.embedding for one in plain.data] == [
        pytest.approx(v, abs=1e-7) for v in vectors
    ]


def curl(server: Running, path: str, *words: str) -> str:
    found = subprocess.run(
        ["curl", "-sS", "-N", f"{server.client.base_url}{path}", "-H", "authorization: Bearer secret", *words],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return found.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl(server: Running, tmp_path: Path) -> None:
    json_type = ("-H", "content-type: application/json")
    assert json.loads(curl(server, "/health")) == {"status": "ok"}
    asked = {"messages": ASKED, "max_tokens": 9, "stream": True}
    lines = curl(
        server, "/v1/chat/completions", *json_type, "-d", json.dumps(asked)
    ).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""] and all(
        line.startswith("data: ") for line in lines[:-1]
    )
    form = {"prompt": "x", "max_tokens": 200, "response_format": SHAPED}
    text = json.loads(
        curl(server, "/v1/completions", *json_type, "-d", json.dumps(form))
    )["choices"][0]["text"]
    jsonschema.validate(json.loads(text), SCHEMA)
    asked |= {
        "tools": [WEATHER],
        "tool_choice": "required",
        "stream": False,
        "max_tokens": 300,
    }
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    answer = curl(
        server,
        "/v1/chat/completions",
        *json_type,
        "--data-binary",
        f"@{tmp_path / 'asked.json'}",
    )
    assert (
        json.loads(answer)["choices"][0]["message"]["tool_calls"][0]["function"]["name"]
        == "get_weather"
    )
    long = json.dumps({"prompt": "x", "max_tokens": 4000, "ignore_eos": True})
    words = [
        "curl",
        "-sS",
        "-m",
        "0.5",
        f"{server.client.base_url}/v1/completions",
        *json_type,
    ]
    cut = [*words, "-H", "authorization: Bearer secret", "-d", long]
    # its time was over
    assert subprocess.run(cut, capture_output=True, check=False).returncode == 28
    until(server.empty)
    assert (
        "no valid API key"
        in subprocess.run(
            ["curl", "-sS", f"{server.client.base_url}/v1/models"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
