"""Fields of requests: nulls and defaults are taken, what changes nothing is logged once, refusals name their field."""

from __future__ import annotations

import json
import logging
import types
import typing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from weft.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    Modelled,
    Refusal,
)
from weft.serve.request_reader import RequestReader
from weft.serve.responses import ResponsesRequest

TALK = [{"role": "user", "content": "hi"}]

#: Requests by the client's own type: what has to be said, and what OpenAI documents as the default of the rest.
KINDS: dict[str, tuple[type[Modelled], Any, dict[str, Any], dict[str, Any]]] = {
    "chat": (ChatRequest, chat_create_params.CompletionCreateParamsNonStreaming, {"model": "tiny", "messages": TALK}, {
        "frequency_penalty": 0, "function_call": "none", "logprobs": False, "modalities": ["text"], "n": 1,
        "parallel_tool_calls": True, "presence_penalty": 0, "prompt_cache_retention": "in_memory", "store": False,
        "reasoning_effort": "medium", "response_format": {"type": "text"}, "service_tier": "auto", "stream": False,
        "temperature": 1, "tool_choice": "none", "top_p": 1, "verbosity": "medium", "metadata": {}, "logit_bias": {},
        "stream_options": {"include_usage": False, "include_obfuscation": True}, "user": "", "tools": [],
        "functions": [], "prompt_cache_key": "k", "safety_identifier": "s", "top_logprobs": 0,
    }),
    "completions": (
        CompletionRequest, completion_create_params.CompletionCreateParamsNonStreaming,
        {"model": "tiny", "prompt": "a"}, {
            "best_of": 1, "echo": False, "frequency_penalty": 0, "logit_bias": {}, "max_tokens": 16, "n": 1,
            "presence_penalty": 0, "stop": None, "stream": False, "suffix": "", "temperature": 1, "top_p": 1,
            "user": "",
        },
    ),
    "responses": (
        ResponsesRequest, response_create_params.ResponseCreateParamsNonStreaming,
        {"model": "tiny", "input": "a"}, {
            "background": False, "context_management": [], "include": [], "metadata": {}, "parallel_tool_calls": True,
            "service_tier": "auto", "store": True, "stream": False, "temperature": 1, "tool_choice": "auto",
            "text": {"format": {"type": "text"}, "verbosity": "medium"}, "tools": [], "top_logprobs": 0, "top_p": 1,
            "truncation": "disabled", "reasoning": {"effort": "medium", "summary": None}, "user": "",
            "stream_options": {"include_obfuscation": True}, "prompt_cache_key": "k", "safety_identifier": "s",
        },
    ),
    "embeddings": (
        EmbeddingRequest, embedding_create_params.EmbeddingCreateParams, {"model": "tiny", "input": "a"},
        {"encoding_format": "float", "user": ""},
    ),
}  # fmt: skip


def nullable(kind: Any) -> list[str]:
    """The fields of a request's type that can be null."""
    hints = typing.get_type_hints(kind)
    return [
        name for name, hint in hints.items() if types.NoneType in typing.get_args(hint)
    ]


def read(kind: type[Modelled], **fields: Any) -> Any:
    return RequestReader().read(kind, json.dumps(fields).encode())


NULLABLE = {name: nullable(params) for name, (_, params, _, _) in KINDS.items()}


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_nulls_and_defaults_of_the_clients_own_types_are_taken(
    name: str, data: st.DataObject
) -> None:
    kind, _, needed, defaults = KINDS[name]
    nulls = dict.fromkeys(
        data.draw(st.sets(st.sampled_from(NULLABLE[name] or ["user"])))
    )
    assert read(kind, **nulls | needed) == read(kind, **needed), "null is the default"
    stated = data.draw(st.sets(st.sampled_from(sorted(defaults))))
    read(kind, **nulls | {field: defaults[field] for field in stated} | needed)


@pytest.mark.parametrize("name", KINDS)
def test_every_nullable_field_can_be_null(name: str) -> None:
    kind, params, needed, defaults = KINDS[name]
    assert not defaults.keys() - typing.get_type_hints(params).keys(), (
        "the client knows all that is called a default"
    )
    for field in NULLABLE[name]:
        read(kind, **{field: None} | needed)
    assert len(NULLABLE[name]) > 10 or name == "embeddings"


def test_a_prompt_that_is_null_begins_a_text() -> None:
    assert read(CompletionRequest, prompt=None).prompt == [""]
    with pytest.raises(Refusal, match="prompt: it is missing"):
        read(CompletionRequest, max_tokens=3)


def test_what_changes_nothing_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    reader = RequestReader()
    with caplog.at_level(logging.WARNING, "weft.serve"):
        for extra in (
            {"store": True, "request_id": "x"},
            {"request_id": "y", "user": "u"},
            {"metadata": {"a": "b"}, "store": None},
        ):
            reader.read(ChatRequest, json.dumps({"messages": TALK} | extra).encode())
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"requests have fields that change nothing here: {names}"
        for names in ("request_id, store", "metadata")
    ]


def test_a_field_that_is_given_twice_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The last value counts, as in other servers, at any depth."""
    reader = RequestReader()
    body = b'{"messages": [{"role": "user", "content": "a", "content": "b"}], "top_p": 1, "top_p": 0.5, "seed": 1}'
    with caplog.at_level(logging.WARNING, "weft.serve"):
        read = reader.read(ChatRequest, body)
    assert read.top_p == 0.5 and read.messages[0]["content"] == "b"
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "change nothing here: content (given twice), top_p (given twice)"
    )


@pytest.mark.parametrize(("kind", "fields", "said"), [
    (CompletionRequest, {"stop": ["x"] * 17}, "stop: at most 16 stops are taken, not 17"),
    (CompletionRequest, {"stop": "x" * 257}, "stop: a stop has at most 256 characters, not 257"),
    (CompletionRequest, {"stop": 5}, "stop: give a text, or a list of texts, not 5"),
    (CompletionRequest, {"stop": ["a", None]}, 'stop: give a text, or a list of texts, not ["a", null]'),
    (CompletionRequest, {"prompt": 5}, "prompt: give a text, ids, or a list of either, not 5"),
    (CompletionRequest, {"prompt": []}, "prompt: give a text, ids, or a list of either, not []"),
    (CompletionRequest, {"prompt": ["a", 3]}, "prompt: give a text, ids, or a list of either; its item 1 is 3"),
    (CompletionRequest, {"prompt": [[1], [True]]}, "prompt: give a text, ids, or a list of either; its item 1 is [tr"),
    (CompletionRequest, {"suffix": "end"}, "suffix: only '' is possible here; a text is only written on"),
    (CompletionRequest, {"tempratur": 1}, "tempratur: there is no such field; did you mean 'temperature'?"),
    (CompletionRequest, {"logit_bias": {"a": 1}}, "logit_bias.a: "),
    (CompletionRequest, {"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs: give one of"),
    (CompletionRequest, {"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos: a text that has"),
    (ChatRequest, {"tool_choice": "maybe"}, "tool_choice: give none, auto, required, a function, or allowed_tools"),
    (ChatRequest, {"tool_choice": {"type": "function"}}, "tool_choice: it names no function"),
    (ChatRequest, {"audio": {"voice": "alloy"}}, "audio: this is not possible here; answers are texts"),
    (ChatRequest, {"modalities": ["text", "audio"]}, "modalities: only ['text'] is possible here"),
    (ChatRequest, {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0."),
    (ChatRequest, {"top_logprobs": 3}, "top_logprobs: they stand beside log-probabilities; set logprobs to true"),
    (ChatRequest, {"response_format": {"type": "json_schema"}}, "response_format.json_schema: json_schema belongs to"),
    (ChatRequest, {"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt: a new turn"),
    (ChatRequest, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: 'messages' is no variable"),
    (ChatRequest, {"workflow": "q"}, "workflow: "),
    (ChatRequest, {"workflow": {"stage": "a"}}, "workflow.id: it is missing"),
    (ChatRequest, {"workflow": {"id": "q", "deadline_ms": 1e12}}, "workflow.deadline_ms: Input should be less"),
    (ChatRequest, {"workflow": {"id": "q", "remaining": ["a"] * 65}}, "workflow.remaining: at most 64 are taken, not"),
    (ChatRequest, {"workflow": {"id": "q", "slo": 3}}, "workflow.slo: there is no such field"),
    (ChatRequest, {"n": "many"}, "n: "), (ChatRequest, {"temperature": 3}, "temperature: Input should be less than or"),
    (ResponsesRequest, {"max_output_tokens": 0}, "max_output_tokens: "),
    (ResponsesRequest, {"text": {"format": {"type": "json_schema"}}}, "text.format"),
    (ResponsesRequest, {"text": {"format": 3}}, "text.format: give an object, not 3"),
    (ResponsesRequest, {"include": ["message.output_text.logprobs"]}, "include: log-probabilities are those of"),
    (ResponsesRequest, {"conversation": "c"}, "conversation: nothing is kept here"),
    (EmbeddingRequest, {"dimensions": 0}, "dimensions: "), (EmbeddingRequest, {"input": {}}, "input: give a text"),
])  # fmt: skip
def test_a_refusal_names_the_field_in_words_of_its_sender(
    kind: Any, fields: dict[str, Any], said: str
) -> None:
    needed = next(needed for own, _, needed, _ in KINDS.values() if own is kind)
    with pytest.raises(Refusal) as refused:
        read(kind, **needed | fields)
    error = refused.value.body["error"]
    assert (
        error["message"].startswith(said)
        and error["param"]
        and said.startswith(error["param"].split(".")[0])
    )
    assert not any(
        word in error["message"]
        for word in ("constrained", "str]", "Value error", "union")
    )


def test_allowed_tools_are_those_that_can_be_called() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "abc"]
    choice = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": tools[:2]},
    }
    asked = read(ChatRequest, messages=TALK, tools=tools, tool_choice=choice)
    assert [tool.function.name for tool in asked.offered] == ["a", "b"] and asked.forced
