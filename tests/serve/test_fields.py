"""What clients send is heeded, refused by its name, or named in the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.inprocess import InProcess, serving
from tests.serve.test_call_finder import ASKED, HERMES
from weft.serve.anthropic import messages_as_chat
from weft.serve.request_reader import MOST_LOGGED, RequestReader
from weft.serve.responses import responses_as_chat

TEXT = {"prompt": "x", "max_tokens": 2}
TALK = {"messages": ASKED, "max_tokens": 2}
INPUT = {"input": "?", "max_output_tokens": 2}
MESSAGES = {"model": "tiny", "messages": ASKED, "max_tokens": 2}
TOOL = {"name": "f", "input_schema": {}}


@pytest.fixture(scope="module")
def served() -> Iterator[InProcess]:
    with serving(HERMES) as served:
        yield served


def post(served: InProcess, path: str, body: Any, **more: Any) -> Any:
    answer = served.client.post(f"/v1/{path}", json=body | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(("path", "body", "more", "said"), [
    ("completions", TEXT, {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
     "structured_outputs: response_format gives the text another form"),
    ("completions", TEXT, {"min_tokens": 3}, "min_tokens: the answer has at most 2 tokens, not 3"),
    ("completions", TEXT, {"best_of": 2, "n": 3}, "best_of: 3 answers are not the best of fewer"),
    ("completions", TEXT, {"logprobs": True}, "logprobs: give the number of likeliest tokens, not true"),
    ("completions", TEXT, {"structured_outputs": {"json": "[1]"}}, "structured_outputs.json: give a schema"),
    ("completions", TEXT, {"structured_outputs": {"json": "[" * 9999}}, "structured_outputs.json: nested too deeply"),
    ("completions", TEXT, {"structured_outputs": {"choice": []}}, "structured_outputs.choice: "),
    ("completions", {"prompt": "x"}, {"min_tokens": 5000}, "prompt: 1 tokens and 5,000 more are more than the cache"),
    ("chat/completions", TALK, {"max_completion_tokens": 9}, "max_tokens: the answer has at most 9 tokens by another"),
    ("responses", INPUT, {"reasoning": {"efort": "low"}}, "reasoning.efort: there is no such field"),
    ("responses", INPUT, {"text": {"fromat": {}}}, "text.fromat: there is no such field"),
    ("responses", INPUT, {"include": ["more"]}, 'include: there is no "more" to include'),
    ("responses", INPUT, {"logprobs": True}, "logprobs: "),
    ("responses", INPUT, {"messages": []}, "input: another field says otherwise"),
    ("responses", INPUT, {"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort: another"),
    ("messages", MESSAGES, {"n": 2}, "n: "), ("messages", MESSAGES, {"logprobs": True}, "logprobs: "),
    ("messages", MESSAGES, {"stop": ["a"], "stop_sequences": ["b"]}, "stop_sequences: another field says otherwise"),
    ("messages", MESSAGES, {"max_completion_tokens": 9}, "max_tokens: another field says otherwise"),
    ("messages", MESSAGES, {"continue_final_message": True}, "continue_final_message: another field says otherwise"),
    ("messages", MESSAGES, {"thinking": {"type": "on"}}, "thinking: give enabled, adaptive or disabled as its type"),
    ("messages", MESSAGES, {"thinking": {"type": "enabled", "budget": 3}}, "thinking.budget: there is no such field"),
    ("messages", MESSAGES, {"output_config": {"efort": "low"}}, "output_config.efort: there is no such field"),
    ("messages", MESSAGES, {"tools": [TOOL | {"schema": {}}]}, "tools.schema: there is no such field"),
    ("messages", MESSAGES, {"tool_choice": {"type": "auto", "names": []}}, "tool_choice.names: there is no such"),
    ("messages", MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": 2}]}},
     "context_management: "),
])  # fmt: skip
def test_what_would_be_left_out_is_refused(
    served: InProcess, path: str, body: Any, more: Any, said: str
) -> None:
    answer = served.client.post(f"/v1/{path}", json=body | more)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["message"].startswith(said), answer.text


def test_fields_inside_of_fields_are_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(HERMES) as served, caplog.at_level(logging.WARNING, "weft.serve"):
        kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
        thinking = {"type": "disabled", "budget_tokens": 1024}
        result = {"type": "tool_result", "tool_use_id": "a", "content": "x"}
        talk = [*ASKED, {"role": "user", "content": [result | {"is_error": True}]}]
        tools = [TOOL | {"cache_control": {"type": "ephemeral"}}]
        said = {"messages": talk, "thinking": thinking, "tools": tools}
        post(served, "messages", MESSAGES, context_management=kept, **said)
        reasoning = {"effort": None, "summary": "auto"}
        include = ["reasoning.encrypted_content"]
        post(served, "responses", INPUT, reasoning=reasoning, include=include)
        last = {"role": "assistant", "content": "So", "prefix": True, "refusal": ""}
        post(served, "chat/completions", TALK, messages=[*ASKED, last])
    logged = " ".join(record.getMessage() for record in caplog.records)
    for name in (
        "thinking.budget_tokens", "tools.cache_control", "messages[].is_error", "reasoning.summary", "include",
        "messages[].prefix",
    ):  # fmt: skip
        assert name in logged, logged
    assert "context" not in logged and "refusal" not in logged


def test_fields_of_chats_count_where_no_other_says_otherwise() -> None:
    chat = messages_as_chat(MESSAGES | {"stop": ["a"], "stop_sequences": None})
    assert chat["stop"] == ["a"] and chat["max_completion_tokens"] == 2
    assert (
        responses_as_chat(INPUT | {"reasoning_effort": "low"})["reasoning_effort"]
        == "low"
    )


def test_names_that_clients_choose_fill_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = RequestReader()
    with caplog.at_level(logging.WARNING, "weft.serve"):
        reader.note(["a\nb", "c" * 1000])
        for number in range(2 * MOST_LOGGED):
            reader.note([f"name{number}"])
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == MOST_LOGGED - 1 and not any("\n" in line for line in lines)
    assert len(lines[0]) < 200
