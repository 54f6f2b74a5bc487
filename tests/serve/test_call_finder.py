# ruff: noqa: RUF001 (the bars in the names of DeepSeek's tokens)
"""Calls of tools: their form by the template of a model, found in its text, and forced by their schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import jsonschema
import pytest

from tests.chats import DEEPSEEK_R1, DEEPSEEK_V3, DEEPSEEK_V31, QWEN3
from tests.serve.running import Running, until
from weft.data.chat.chat_template import ChatTemplate
from weft.data.chat.edges import common_length
from weft.data.tokenizer import load_tokenizer
from weft.serve.call_finder import Call, CallFinder, CallPiece
from weft.serve.call_form import CallForm, ObjectCalls, call_form

#: As templates of Qwen and Hermes, of Llama and of Mistral write them, and as one does that is no JSON.
HEAD = (
    "{% if tools %}Tools:{% for t in tools %} {{ t | tojson }}{% endfor %}\n{% endif %}"
)
TURN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
TAIL = "\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
HERMES = f"{HEAD}{TURN}{CALLS}\n<tool_call>\n" + (
    '{{ {"name": f.name, "arguments": f.arguments} | tojson }}\n</tool_call>{% endfor %}'
    + TAIL
)
LLAMA = (
    f"{HEAD}{TURN}{CALLS}"
    + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}'
    + TAIL
)
MISTRAL = (
    f"{HEAD}{TURN}{{% if m.tool_calls %}}[TOOL_CALLS] [{CALLS}"
    '{"arguments": {{ f.arguments | tojson }}, "name": "{{ f.name }}"}{% if not loop.last %}, {% endif %}'
    "{% endfor %}]{% endif %}" + TAIL
)
#: A name and its arguments alone, as GLM-4's and Mistral's later ones where special tokens are left out.
BARE = (
    f"{HEAD}{TURN}{CALLS}"
    + "{{ f.name }}\n{{ f.arguments | tojson }}{% endfor %}"
    + TAIL
)
WORDS = f"{HEAD}{TURN}{CALLS}" + "call {{ f.name }} with x=3{% endfor %}" + TAIL
DEAF = f"{TURN}{TAIL}"
CITY = {
    "type": "object", "properties": {"city": {"enum": ["Oslo", "Zürich \"Nord\""]}, "days": {"$ref": "#/$defs/few"}},
    "required": ["city", "days"], "additionalProperties": False, "$defs": {"few": {"enum": [1, 2, 3]}},
}  # fmt: skip
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "-", "parameters": CITY},
}
ZONE = {
    "type": "object",
    "properties": {"zone": {"const": "UTC"}},
    "additionalProperties": False,
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": ZONE}}
ASKED = [{"role": "user", "content": "?"}]


def own(template: str) -> ChatTemplate:
    """A template that belongs to its tokenizer, which lacks its special tokens."""
    tokenizer = replace(load_tokenizer("bytes"), chat_template=template)
    return ChatTemplate(template, tokenizer)


def form_of(template: str) -> CallForm | None:
    return call_form(own(template))


@pytest.mark.parametrize(("template", "opening", "keys"), [
    (HERMES, "<tool_call>", ("name", "arguments")), (LLAMA, "", ("name", "parameters")),
    (MISTRAL, "[TOOL_CALLS] [", ("name", "arguments")),
], ids=["hermes", "llama", "mistral"])  # fmt: skip
def test_calls_are_found_as_the_template_writes_them(
    template: str, opening: str, keys: tuple[str, str]
) -> None:
    form = form_of(template)
    assert isinstance(form, ObjectCalls) and form.opening == opening
    assert (form.name, form.arguments) == keys
    talk = own(template)
    calls = [Call("a", '{"x": "}] </tool_call> {\\""}'), Call("b", "{}")]
    told = [
        {"function": {"name": c.name, "arguments": json.loads(c.arguments)}}
        for c in calls
    ]
    whole = talk.render(
        [*ASKED, {"role": "assistant", "content": "", "tool_calls": told}], [WEATHER]
    ).text
    text = whole[len(talk.render(ASKED, [WEATHER], prompt=True).text) - 1 :]
    for size in (1, 2, 7, len(text)):
        finder = CallFinder(form)
        shown = "".join(
            finder.add(text[at : at + size])[0] for at in range(0, len(text), size)
        )
        rest, pieces, finish = finder.end("stop")
        assert (
            not (shown + rest).strip()
            and finder.calls == calls
            and finish == "tool_calls"
        ), (size, shown, rest)
        assert pieces == [CallPiece(0, *calls[0]), CallPiece(1, *calls[1])]


@pytest.mark.parametrize(("template", "behind"), [
    (HERMES, '\n<tool_call>\n{"name": "a", "arguments": '), (LLAMA, '{"name": "a", "parameters": '),
], ids=["hermes", "llama"])  # fmt: skip
def test_calls_stream_from_their_names_on(template: str, behind: str) -> None:
    """Character by character: the name once, with the first of its arguments, of which each comes as it is written."""
    form, given = form_of(template), '{"x": "}] {\\"", "é": [{}]}'
    assert form is not None
    finder = CallFinder(form, streams=True)
    assert all(finder.add(c) == ("", []) for c in behind.lstrip())
    assert [finder.add(c) for c in given] == [
        ("", [CallPiece(0, None if i else "a", c)]) for i, c in enumerate(given)
    ]
    assert all(finder.add(c) == ("", []) for c in "}" + form.closing + behind)
    assert finder.add("{}} ") == ("", [CallPiece(1, "a", "{}")])
    assert finder.end("stop") == ("", [], "tool_calls") and finder.calls == [
        Call("a", given),
        Call("a", "{}"),
    ]


def test_a_call_that_is_cut_streams_as_far_as_it_came() -> None:
    """Whole answers have it as text: whoever reads them gets no half of a call."""
    form = form_of(HERMES)
    assert form is not None
    text, cut = (
        '<tool_call>{"name": "a", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "b", "arguments": {"x"',
    )
    finder = CallFinder(form, streams=True)
    assert finder.add(text + cut) == (
        "",
        [CallPiece(0, "a", "{}"), CallPiece(1, "b", '{"x"')],
    )
    assert finder.end("length") == ("", [], "length")
    finder = CallFinder(form)
    assert finder.add(text + cut) == ("", [])
    assert finder.end("length") == (
        cut.removeprefix("<tool_call>"),
        [CallPiece(0, "a", "{}")],
        "length",
    )


def test_words_behind_a_call_are_text() -> None:
    form = form_of(HERMES)
    assert form is not None
    finder = CallFinder(form)
    finder.add('<tool_call>{"name": "a", "arguments": {}}</tool_call> Done.')
    assert finder.end("stop") == ("Done.", [CallPiece(0, "a", "{}")], "tool_calls")


@pytest.mark.parametrize("text", [
    "no call", "a < b <tool", "<tool_call>{not json}</tool_call>", '<tool_call>{"name": 3}', "<tool_call>", '{"a": 1}',
    'so: {"name": "a", "arguments": {}}', "  ",
])  # fmt: skip
@pytest.mark.parametrize("template", [HERMES, LLAMA, MISTRAL])
def test_what_is_no_call_is_text(template: str, text: str) -> None:
    form = form_of(template)
    assert form is not None
    for streams in (False, True):
        finder = CallFinder(form, streams)
        shown = "".join(finder.add(c)[0] for c in text)
        rest, pieces, finish = finder.end("stop")
        assert (
            shown + rest == text and not (finder.calls or pieces) and finish == "stop"
        )


def test_words_before_a_call_are_shown_as_they_come() -> None:
    form = form_of(HERMES)
    assert form is not None
    finder = CallFinder(form)
    assert finder.add("Let me look. <tool") == ("Let me look. ", [])
    assert finder.add('_call>{"name": "a", "arguments": {"x": 1}}') == ("", [])
    assert finder.end("length") == ("", [CallPiece(0, "a", '{"x": 1}')], "tool_calls")


NAMED = {"v3": DEEPSEEK_V3, "v3.1": DEEPSEEK_V31, "r1": DEEPSEEK_R1, "bare": BARE}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("template", NAMED.values(), ids=NAMED)
def test_calls_are_found_where_arguments_are_text_between_others(template: str) -> None:
    """DeepSeek's: as the template writes two calls, behind words and alone, in pieces of any size."""
    talk = own(template)
    calls = [Call("get_a", '{"x": "}] ``` \\n {\\""}'), Call("b", "{}")]
    for before in ("", "Let me look. "):
        if before and template == BARE:
            continue  # a call that stands alone is all of the answer
        said = [
            {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in calls
        ]
        turn = {"role": "assistant", "content": before, "tool_calls": said}
        whole = talk.render([*ASKED, turn], [WEATHER]).text
        prompt = talk.render(ASKED, [WEATHER], prompt=True).text
        text = whole[common_length(prompt, whole) :].lstrip()
        for size, streams in product((1, 3, len(text)), (False, True)):
            finder = CallFinder(form_of(template), streams, {"get_a", "b"})  # type: ignore[arg-type]
            shown, pieces = "", list[CallPiece]()
            for at in range(0, len(text), size):
                piece, more = finder.add(text[at : at + size])
                shown, pieces = shown + piece, pieces + more
            end = finder.end("stop")
            assert (shown + end.text).strip() == before.strip()
            assert end.finish == "tool_calls" and finder.calls == calls
            for number, call in enumerate(calls):
                of_call = [p for p in [*pieces, *end.calls] if p.number == number]
                assert of_call[0].name == call.name
                assert "".join(p.arguments for p in of_call) == call.arguments


@pytest.mark.parametrize(("text", "finish"), [
    ("{}get_a", "stop"),  # what is no call is text
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>other\n```json\n{}\n```", "stop"),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_a\n```json\nnull\n```", "stop"),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_a\n```json\n{\"x\"", "length"),
    ("a < b <｜tool▁calls", "stop"), ("get_ab {}", "stop"), ("get_a is what", "stop"), ("get_", "length"),
])  # fmt: skip
def test_what_is_no_call_by_name_is_text(text: str, finish: str) -> None:
    for template in (DEEPSEEK_V3, BARE):
        form = form_of(template)
        assert form is not None
        finder = CallFinder(form, names=["get_a"])
        shown = "".join(finder.add(char)[0] for char in text)
        end = finder.end(finish)
        assert (shown + end.text, end.calls, end.finish) == (text, [], finish)


def test_reasoning_that_a_template_writes_is_no_part_of_a_call() -> None:
    """Qwen3's writes an empty one before the last turn, where a model writes its own: its calls went out as text."""
    form = form_of(QWEN3)
    assert isinstance(form, ObjectCalls) and form.opening == "<tool_call>"
    finder = CallFinder(form, names=["a"])
    finder.add('\n\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>')
    assert finder.end("stop").calls == [CallPiece(0, "a", "{}")]


def test_a_prompt_that_begins_a_tag_as_a_call_does_leaves_the_call_whole() -> None:
    """As QwQ's, which ends with ``<think>``."""
    form = form_of(
        HERMES.replace("assistant: {% endif", "assistant: \n<think>\n{% endif")
    )
    assert isinstance(form, ObjectCalls) and form.opening == "<tool_call>"


@pytest.mark.parametrize("template", [WORDS, DEAF])
def test_templates_without_calls_as_json(template: str) -> None:
    assert form_of(template) is None


@pytest.fixture(
    scope="module",
    params=[HERMES, LLAMA, MISTRAL, DEEPSEEK_V3],
    ids=["hermes", "llama", "mistral", "deepseek"],
)
def server(request: Any) -> Iterator[Running]:
    running = Running(replace(load_tokenizer("bytes"), chat_template=request.param))
    yield running
    until(running.empty)
    running.close()


@pytest.mark.sampled(3)
@pytest.mark.slow
def test_a_required_call_meets_its_schema(server: Running) -> None:
    """Of a model with random weights: names and arguments are what the tools say."""
    asked = {"messages": ASKED, "tools": [WEATHER, TIME], "tool_choice": "required", "max_tokens": 900,
             "seed": 1, "n": 8, "logit_bias": dict.fromkeys(map(str, b" \n\t\r"), -9)}  # fmt: skip
    choices = server.post("chat/completions", **asked).json()["choices"]
    assert len(choices) == 8
    for choice in choices:
        (call,) = choice["message"]["tool_calls"]
        assert (
            choice["finish_reason"] == "tool_calls"
            and choice["message"]["content"] is None
        )
        assert call["type"] == "function" and call["function"]["name"] in (
            "get_weather",
            "get_time",
        )
        schema = CITY if call["function"]["name"] == "get_weather" else ZONE
        jsonschema.validate(json.loads(call["function"]["arguments"]), schema)


@pytest.mark.sampled(2)
def test_a_named_call_streams_and_is_understood_when_it_comes_back(
    server: Running,
) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    asked = {
        "messages": ASKED,
        "tools": [TIME, WEATHER],
        "tool_choice": choice,
        "max_tokens": 600,
        "seed": 1,
    }
    chunks = [c["choices"][0] for c in server.events("chat/completions", **asked)]
    assert chunks[-1]["finish_reason"] == "tool_calls" and not any(
        c["delta"].get("content") for c in chunks
    )
    call, *more = [call for c in chunks for call in c["delta"].get("tool_calls", [])]
    assert call.pop("index") == 0 and call["function"]["name"] == "get_weather"
    assert all(each.keys() == {"index", "function"} for each in more)
    call["function"]["arguments"] += "".join(
        each["function"]["arguments"] for each in more
    )
    jsonschema.validate(json.loads(call["function"]["arguments"]), CITY)
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    answered = {
        "role": "tool",
        "tool_call_id": call["id"],
        "content": [{"type": "text", "text": "Rain."}],
    }
    asked |= {
        "messages": [*ASKED, said, answered],
        "tool_choice": "auto",
        "max_tokens": 4,
    }
    assert server.post("chat/completions", **asked).status_code == 200


@pytest.mark.parametrize(("asked", "said"), [
    ({"tool_choice": "required"}, "there are no tools"),
    ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "'x', which is none"),
    ({"tools": [TIME], "structured_outputs": {"grammar": "start: /a/"}}, "leave out tools or structured_outputs"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "strin"}}}],
      "tool_choice": "required"}, "Invalid type: strin"),
])  # fmt: skip
def test_mistakes_about_tools(server: Running, asked: Any, said: str) -> None:
    answer = server.post("chat/completions", messages=ASKED, **asked)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"], (
        answer.text
    )


def test_tools_are_refused_where_a_template_has_none() -> None:
    running = Running(replace(load_tokenizer("bytes"), chat_template=DEAF))
    answer = running.post("chat/completions", messages=ASKED, tools=[TIME])
    assert (
        answer.status_code == 400
        and "does not show tools to the model; ask" in answer.json()["error"]["message"]
    )
    assert (
        running.post(
            "chat/completions", messages=ASKED, tools=[TIME], tool_choice="none"
        ).status_code
        == 200
    )
    running.close()
